"""One rank in a process of its own: carries out the verbs that the harness sends."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FunctionType
from typing import Any

from tests.support.conformance import problems
from tests.support.conformance.problems import Problem
from tests.support.own_signals import signal_self
from trainwright.core.data import Columns, Feed, MetricSums, StepReport, zero_weight
from trainwright.core.engine import ModelSpec, StateSnapshot
from trainwright.core.errors import NonFiniteLoss, TrainwrightError
from trainwright.core.loss_api import takes_targets_first
from trainwright.core.metric_states import metric_states, with_states
from trainwright.core.plan import Plan
from trainwright.core.topology import (
    Address,
    Group,
    Role,
    StalenessCounts,
    StateTag,
    StateTransfer,
    WorkUnit,
)
from trainwright.driver.messages import PredictRequest
from trainwright.strategies import engine_class

NAN = float("nan")


class Files:
    """The files of a checkpoint in memory: a Writer and a Reader."""

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        self.files = dict(files or {})

    def write(self, name: str, *pieces: bytes | memoryview) -> None:
        self.files[name] = b"".join(pieces)

    weights_only = False

    def names(self) -> tuple[str, ...]:
        return tuple(self.files)

    def read(self, name: str) -> bytes:
        return self.files[name]

    def stream(self, name: str) -> Iterator[memoryview]:
        yield memoryview(self.read(name))


class Folder:
    """The files of a checkpoint on disk: a Writer and a Reader."""

    weights_only = False

    def __init__(self, place: Path) -> None:
        self.place = place

    def write(self, name: str, *pieces: bytes | memoryview) -> None:
        with (self.place / name).open("wb") as file:
            file.writelines(pieces)

    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.place.iterdir())

    def read(self, name: str) -> bytes:
        return (self.place / name).read_bytes()

    def stream(self, name: str) -> Iterator[memoryview]:
        with (self.place / name).open("rb") as file:
            while piece := file.read(1 << 20):
                yield memoryview(piece)


class Faulty:
    """A loss that goes wrong once it is armed with the name of a fault, after a number of calls."""

    def __init__(self, loss: Any) -> None:
        self.loss = self.__wrapped__ = loss  # whose parameters are looked at
        self.arm("")

    def arm(self, fault: str, after: int = 0) -> None:
        self.fault, self.left = fault, after

    def __call__(self, outputs: Any, targets: Any, **numbers: int) -> Any:
        result = self.loss(outputs, targets, **numbers)
        self.left -= 1
        return getattr(self, self.fault)(result) if self.fault and self.left < 0 else result

    def kill(self, result: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return result

    def freeze(self, result: Any) -> Any:
        """Once: until somebody lets it go on."""
        self.arm("")
        signal_self(signal.SIGSTOP)
        return result

    def error(self, result: Any) -> Any:
        raise ZeroDivisionError("the loss went wrong on purpose")

    def nan(self, result: Any) -> Any:
        return _changed(result, lambda values: values * NAN)

    def reduced(self, result: Any) -> Any:
        return _changed(result, lambda values: values.mean())

    def short(self, result: Any) -> Any:
        return _changed(result, lambda values: values[:-1])


class Session:
    """An engine and what the harness wants remembered between verbs."""

    engine: Any

    def __init__(self) -> None:
        self.kept: dict[str, StateSnapshot] = {}
        self.decoded: dict[int, Any] = {}
        self.fresh = True

    def open(self, plan: Plan) -> int:
        """Make a fresh engine; the process id."""
        self.engine = engine_class(plan)()
        if self.fresh:  # as a worker does: `leave` collects, and looks through all imports otherwise
            gc.freeze()
            self.fresh = False
        return os.getpid()

    def begin_peak(self) -> int:
        """Count the peak of this process's memory from here; the bytes that it has, and its share of common ones."""
        Path("/proc/self/clear_refs").write_text("5")
        self.memory_before = _memory_bytes("VmRSS")
        return _memory_bytes("Pss", "smaps_rollup")

    def peak_bytes(self) -> int:
        """By how much memory grew at most."""
        return _memory_bytes("VmHWM") - self.memory_before

    def held_digests(self) -> dict[str, tuple[tuple[slice, ...], int]]:
        """The slice of each tensor that this rank holds, with a digest."""
        from trainwright.strategies.torch.checkpoint.host_state import state_of
        from trainwright.strategies.torch.checkpoint.tensor_digests import digests
        from trainwright.strategies.torch.shard_layout import ShardSlice

        state = state_of(self.engine.replica)
        boxes = {name: state.boxes.get(name) or ShardSlice.all_of(value.shape) for name, value in state.model.items()}
        found = zip(boxes.items(), digests(state.model.values()), strict=True)
        return {name: (box.inside(ShardSlice.all_of(box.shape)), digest) for (name, box), digest in found}

    def set_environment(self, name: str, value: str) -> None:
        os.environ[name] = value

    def block_until_aborted(self) -> None:
        """Let collectives of groups to come raise nothing, and block until they are aborted."""
        from tests.support import aborting_backend

        aborting_backend.install()

    def reserve(self, role: Role) -> Address:
        return self.engine.reserve(role)

    def form(self, group: Group) -> StateTag:
        if group.size > 1 and group.devices[0] != "cpu":
            from trainwright.strategies.torch.distributed import process_group

            process_group._BACKENDS.clear()  # gloo
        return self.engine.form(group)

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """With a loss that can be made to fail, unless it is an object of the framework's or in Keras' order."""
        self.faulty, self.metrics = Faulty(spec.loss), spec.metrics
        plain = isinstance(spec.loss, FunctionType | partial) and not takes_targets_first(spec.loss)
        return self.engine.build(replace(spec, loss=self.faulty) if plain else spec, plan)

    def transfer(self, moves: Sequence[StateTransfer]) -> StateTag:
        return self._stepping(self.engine.transfer, moves)

    def warm(self, feed: Feed) -> None:
        self._stepping(self.engine.warm, feed)

    def train(self, feeds: Sequence[Feed], fault: str = "") -> list[StepReport]:
        """Steps; `fault` strikes in the last of them. Without one all ranks compare what they hold afterwards."""
        reports = []
        for feed in feeds:
            self.faulty.arm(fault if feed is feeds[-1] else "")
            reports.append(self._stepping(self.engine.train_step, feed))
        if not fault:
            self._stepping(self.engine.verify)
        return reports

    def train_past(self, feeds: Sequence[Feed]) -> list[StepReport]:
        """Steps as a worker takes them that passes by what is not finite."""
        reports = []
        for feed in feeds:
            try:
                reports.append(self.engine.train_step(feed))
            except NonFiniteLoss:
                reports.append(self.engine.train_step(zero_weight(feed)))
        return reports

    def follow(self) -> None:
        """Do what rank 0 asks for."""
        self._stepping(self.engine.follow)

    def serve(self, until: int) -> list[StepReport]:
        """A server: let the steps before `until` be taken."""
        return self._stepping(lambda: list(self.engine.serve(until, lambda: False)))

    def step(self) -> int:
        """A server: completed steps."""
        return self.engine.snapshot().step

    def work(self, problem: Problem, plan: Plan, first: int, fault: str = "", after: int = 0) -> list[WorkUnit]:
        """A worker: lease units of the segment from step `first` on and compute them until none is left.

        `fault` strikes after so many losses.
        """
        self.faulty.arm(fault, after)
        return self._stepping(lambda: list(self._worked(problem, plan, first)))

    def _worked(self, problem: Problem, plan: Plan, first: int) -> Iterator[WorkUnit]:
        data = problems.columns(problem)
        while (unit := self.engine.lease(first)) is not None:
            ids = problems.batches(problem, unit.step + unit.steps)
            for step in range(unit.step, unit.step + unit.steps):
                self.engine.train_step(problems.feeds(problem, plan, step, ids[step], data)[unit.share])
            yield unit

    def staleness(self) -> StalenessCounts:
        return self.engine.staleness()

    def evaluate(self, feeds: Sequence[Feed]) -> MetricSums:
        states = metric_states(self.metrics)
        return with_states(sum((self.engine.evaluate_step(feed, states) for feed in feeds), MetricSums()), states)

    def predict(self, feed: Feed) -> Columns:
        return self.engine.predict_step(feed)

    def decode(self, wanted: PredictRequest) -> tuple[Columns, ...]:
        from trainwright.worker.worker import predicted

        return predicted(self.engine, wanted, self.decoded)

    def keep(self, name: str) -> int:
        """Remember a snapshot; its step."""
        self.kept[name] = self.engine.snapshot()
        return self.kept[name].step

    def restore(self, name: str) -> StateTag:
        return self.engine.restore(self.kept[name])

    def files(self, name: str = "") -> Mapping[str, bytes]:
        """The files of this rank's state now, or of a snapshot kept."""
        files = Files()
        self.engine.save(self.kept[name] if name else self.engine.snapshot(), files)
        return files.files

    def load(self, files: Mapping[str, bytes]) -> StateTag:
        return self.engine.load(Files(files))

    def save_in(self, folder: Path) -> None:
        """Write the files of this rank's state now."""
        self.engine.save(self.engine.snapshot(), Folder(folder))

    def load_from(self, folder: Path) -> StateTag:
        return self.engine.load(Folder(folder))

    def leave(self) -> None:
        """Twice, because that is allowed."""
        self.engine.leave()
        self.engine.leave()

    def interrupted(self, after_s: float, call: str, *arguments: Any) -> Exception | None:
        """What a call of the engine raises when `interrupt` comes from another thread `after_s` into it.

        The answer False kills.
        """
        over = threading.Event()

        def strike() -> None:
            over.wait(after_s)
            if not self.engine.interrupt(10.0):
                os.kill(os.getpid(), signal.SIGKILL)

        thread = threading.Thread(target=strike)
        thread.start()
        raised: Exception | None = None
        try:
            getattr(self.engine, call)(*arguments)
        except TrainwrightError as error:
            raised = error
        over.set()
        thread.join(20.0)
        return raised

    def _stepping(self, method: Any, *arguments: Any) -> Any:
        """As a worker does it: whatever goes wrong, the group is left, so that the others notice."""
        try:
            return method(*arguments)
        except Exception:
            self.engine.leave()
            raise


def main(pipe: Connection) -> None:
    """Answer verbs until the harness hangs up. SIGUSR1 prints where all threads are."""
    faulthandler.register(signal.SIGUSR1)
    session = Session()
    while True:
        try:
            verb, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(session, verb, arguments))


def _answer(session: Session, verb: str, arguments: tuple[Any, ...]) -> tuple[str, Any, str]:
    try:
        return "returned", getattr(session, verb)(*arguments), ""
    except TrainwrightError as error:
        return "raised", error.with_traceback(None), traceback.format_exc()
    except Exception as error:
        return "raised", RuntimeError(f"{type(error).__name__}: {error}"), traceback.format_exc()


def _memory_bytes(name: str, file: str = "status") -> int:
    (line,) = [line for line in Path(f"/proc/self/{file}").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def _changed(result: Any, change: Any) -> Any:
    """A loss's result with its values changed."""
    return result._replace(values=change(result.values)) if hasattr(result, "_replace") else change(result)
