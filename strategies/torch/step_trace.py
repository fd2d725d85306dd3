"""Phases of a step: their times, and their names in the traces of `torch.profiler`."""

from __future__ import annotations

import gzip
import shutil
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.profiler import profile, record_function

_recording = False  # of this process, which has one profiler


def span(name: str) -> AbstractContextManager[object]:
    """Return a context whose operations get a name in the trace, while steps are recorded."""
    return record_function(name) if _recording else nullcontext()


class TorchTraceRecorder:
    """Records operations of the CPU and of a GPU, where there is one. For one thread, but `save`."""

    suffix: ClassVar[str] = ".trace.json.gz"
    folder: ClassVar[str] = "profile"

    def __init__(self) -> None:
        self._profile: profile | None = None

    def start(self) -> None:
        """Start to record."""
        global _recording
        # By default, all kinds of devices that there are. Without `acc_events` torch 2.11 warns that it clears events.
        recorded = profile(record_shapes=False, acc_events=True)
        recorded.start()
        self._profile, _recording = recorded, True

    def step(self, number: int) -> AbstractContextManager[object]:
        """Return the context of a step, whose name viewers know."""
        return record_function(f"ProfilerStep#{number}")

    def span(self, name: str) -> AbstractContextManager[object]:
        """Return a context whose operations get a name."""
        return record_function(name)

    def stop(self) -> None:
        """End the recording; `save` can follow on another thread."""
        global _recording
        _recording = False
        if self._profile is not None:
            self._profile.stop()

    def save(self, path: Path) -> None:
        """Write the recording as a Chrome trace, compressed."""
        assert self._profile is not None, "start comes first"
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=6) as target:
                shutil.copyfileobj(source, target)


# --- Phases of a step -------------------------------------------------------------------------------------------------


_Mark = tuple[str, Any]  # a phase and when it ended


class PhaseTimer:
    """Times the phases of one rank's steps.

    On the CPU it reads a clock in each step. On a GPU, whose kernels a host's clock does not see, it records events in
    some steps (FIRST, FIRST + EVERY, ...), and reads them in the step after, which has waited for the device anyway.
    """

    EVERY, FIRST = 32, 15

    def __init__(self, device: torch.device) -> None:
        self._by_clock = device.type == "cpu"
        self._now = time.perf_counter if self._by_clock else _event
        self._timing = self._own = False
        self._marks: list[_Mark] = []
        self._recorded: list[_Mark] = []

    def begin(self, step: int) -> None:
        """Start a step."""
        self._timing = self._by_clock or step % self.EVERY == self.FIRST
        self._marks = []
        self._lap("")

    def forward(self) -> None:
        """End the forward of a micro-batch."""
        self._own = False
        self._lap("forward")

    def own(self) -> None:
        """Note that the last of this rank's own gradients of a micro-batch is computed."""
        self._own = True
        self._lap("backward")

    def backward(self, *, reduced: bool) -> None:
        """End the backward of a micro-batch, in which gradients were `reduced` over the ranks, or not."""
        self._lap("backward" if not reduced else "wait" if self._own else "backward+wait")

    def wait(self) -> None:
        """End a wait for other ranks."""
        self._lap("wait")

    def optimizer(self) -> None:
        """End the update."""
        self._lap("optimizer")

    @property
    def own_s(self) -> float | None:
        """Seconds that this rank took for its losses and gradients without waiting; None where not measured."""
        if not self._by_clock:
            return None
        own = [end - start for (_, start), (phase, end) in pairwise(self._marks) if phase in ("forward", "backward")]
        return sum(own) if own else None

    def ended(self) -> dict[str, float] | None:
        """Return seconds by phase of the step that ends now, on a GPU of an earlier one; None where not timed."""
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
