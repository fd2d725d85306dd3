"""The driver's decisions, pure: `state_machine.decide` takes a state and an event; see `messages` for both."""
