"""One decision in the making: the state so far and the effects wanted so far. Lives within one call of `decide`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainwright.core.events import Event
from trainwright.driver.messages import Call, CancelTimer, Effect, Emit, SetTimer, Verb
from trainwright.driver.persistent_collections import PersistentMap, PersistentSet
from trainwright.driver.run_policy import Settings
from trainwright.driver.state import RECOVERING, Phase, State


class Turn:
    """A draft of a decision. Attributes: `state`, `effects`, `now_s` (the clock of whoever calls `decide`)."""

    def __init__(self, state: State, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []

    @property
    def settings(self) -> Settings:
        """The run's settings."""
        return self.state.settings

    def change(self, **fields: Any) -> None:
        """Replace fields of the state. Not `dataclasses.replace`: its constructor took half of a decision's time."""
        known = vars(self.state)
        assert fields.keys() <= known.keys(), f"no fields of State: {fields.keys() - known.keys()}"
        state = object.__new__(State)
        vars(state).update(known, **fields)
        self.state = state

    def enter(self, phase: Phase, **fields: Any) -> None:
        """Begin a phase with no answers yet."""
        self.change(phase=phase, phase_s=self.now_s, answers=PersistentMap(), **fields)

    def want(self, effect: Effect) -> None:
        """Ask for an effect, after those already asked for."""
        self.effects.append(effect)

    def emit(self, event: Event) -> None:
        """Ask for an event of the run to be written."""
        self.effects.append(Emit(event=event))

    def call(self, workers: Iterable[int], verb: Verb, argument: Any = None) -> None:
        """Call workers with the same argument; does not note that they owe an answer."""
        generation = self.state.generation
        self.effects.extend(
            Call(worker=worker, generation=generation, verb=verb, argument=argument) for worker in workers
        )

    def call_all(self, verb: Verb, argument: Any = None) -> None:
        """Call every member that takes part, and await each of them."""
        workers = [member.worker for member in self.state.members if member.worker not in self.state.apart]
        self.change(awaiting=PersistentSet(workers))
        self.call(workers, verb, argument)

    def arm(self, name: str, after_s: float) -> None:
        """Set a timer; one of the same name is forgotten."""
        number = self.state.clock + 1
        self.change(clock=number, timers={**self.state.timers, name: number})
        self.want(SetTimer(name=name, number=number, after_s=after_s))

    def disarm(self, *names: str) -> None:
        """Forget those of the timers that run; all of them when none is named."""
        running = [name for name in names or self.state.timers if name in self.state.timers]
        if running:
            self.change(timers={name: number for name, number in self.state.timers.items() if name not in running})
            for name in running:
                self.want(CancelTimer(name=name))

    def reached(self, step: int) -> None:
        """A step is known to be complete. A new one clears the failures, except the one being recovered from."""
        state = self.state
        if step > state.high:
            failures = min(state.failures, 1) if state.phase in RECOVERING else 0
            self.change(high=step, progress=step, failures=failures, losing=frozenset())
        elif step > state.progress:
            self.change(progress=step)
