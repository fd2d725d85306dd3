"""When the phases of a step end; `trainwright.core.data` says which there are."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

EVERY, FIRST = 32, 15  # on a GPU the steps FIRST, FIRST + EVERY, ...
_Mark = tuple[str, Any]  # a phase and when it ended


class PhaseTimer:
    """Times the phases of one rank's steps.

    On the CPU it reads a clock in each step. On a GPU, whose kernels a host's clock does not see, it records events in
    some steps, and reads them in the step after, which has waited for the device anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._by_clock = device.type == "cpu"
        self._now = time.perf_counter if self._by_clock else _event
        self._timing = self._own = False
        self._marks: list[_Mark] = []
        self._recorded: list[_Mark] = []

    def begin(self, step: int) -> None:
        """A step starts."""
        self._timing = self._by_clock or step % EVERY == FIRST
        self._marks = []
        self._lap("")

    def forward(self) -> None:
        """A micro-batch's losses are there."""
        self._own = False
        self._lap("forward")

    def own(self) -> None:
        """The last of this rank's own gradients of a micro-batch is there."""
        self._own = True
        self._lap("backward")

    def backward(self, *, reduced: bool) -> None:
        """A micro-batch's backward is over, in which the gradients were `reduced` over the ranks, or not."""
        self._lap("backward" if not reduced else "wait" if self._own else "backward+wait")

    def wait(self) -> None:
        """What this rank needed of others is there."""
        self._lap("wait")

    def optimizer(self) -> None:
        """The update is done."""
        self._lap("optimizer")

    @property
    def own_s(self) -> float | None:
        """What this rank took for its losses and gradients, without waiting; None where no clock tells."""
        if not self._by_clock:
            return None
        own = [end - start for (_, start), (phase, end) in pairwise(self._marks) if phase in ("forward", "backward")]
        return sum(own) if own else None

    def ended(self) -> dict[str, float] | None:
        """Seconds by phase of the step that ends now, on a GPU of one before; None where none was timed."""
        if self._by_clock:
            return _seconds_by_phase(self._marks)
        marks, self._recorded = self._recorded, self._marks if self._timing else []
        return _seconds_by_phase(marks)

    def _lap(self, phase: str) -> None:
        if self._timing:
            self._marks.append((phase, self._now()))


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds_by_phase(marks: list[_Mark]) -> dict[str, float] | None:
    """Seconds by phase; None for a step that did not end in an update."""
    if not marks or marks[-1][0] != "optimizer":
        return None
    spent = dict.fromkeys((phase for phase, _ in marks[1:]), 0.0)
    for (_, before), (phase, after) in pairwise(marks):
        spent[phase] += after - before if isinstance(after, float) else before.elapsed_time(after) / 1e3
    return spent
