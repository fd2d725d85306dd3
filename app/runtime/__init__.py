"""The driver's side of a run: actors, placement, effects, take-over."""
