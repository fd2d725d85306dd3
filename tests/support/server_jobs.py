"""Jobs with parameter servers, torch's and TensorFlow's, whose processes are killed by the driver of the run itself.

The order of ranks is a coordinator's chief, then servers, then workers. So that no run is over before the place of a
killed worker is taken, torch's workers that are left wait for that, and TensorFlow's chief does at a step.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from tests.support import keras_jobs, torch_jobs
from trainwright.core import events
from trainwright.core.topology import Generation
from trainwright.driver import messages as m
from trainwright.runtime.controller import EffectExecutor, WorkerOutput
from trainwright.storage.checkpoints import CheckpointWriter

ROWS, BATCH, EVERY = 192, 24, 5
EPOCHS = {"torch": 4, "tensorflow": 5}
FIRST_WORKER = {"torch": 2, "tensorflow": 3}  # its rank
RATE = 1e-2  # of the account of samples
SHARED = {"batch_size": BATCH, "checkpoint_steps": EVERY, "workers": 2}


def await_file(path: Path) -> None:
    """Wait until it is there."""
    tick, patience = threading.Event(), 3000
    while not path.exists():
        tick.wait(0.02)
        patience -= 1
        assert patience, f"{path} is not there within a minute"


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A step that is not begun before the file `gate` is there."""

    folder: Path
    step: int

    def __call__(self, step: int, total: int) -> float:
        """A factor on the learning rate."""
        if step == self.step:
            await_file(self.folder / "gate")
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Cross-entropy, and the account of samples; the processes that the file `held` names wait for the file `gate`."""

    folder: Path

    def __call__(self, model: Any, batch: Any) -> Any:
        """The loss of each sample."""
        from torch.nn import functional

        held = self.folder / "held"
        if held.exists() and str(os.getpid()) in held.read_text().split():
            await_file(self.folder / "gate")
        seen = model.seen[batch["id"]]
        return functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none") + seen - seen.detach()


@dataclass(frozen=True, kw_only=True)
class Torn:
    """A model whose server of a rank dies in the middle of its shard, of the first checkpoint from `kill.step` on."""

    kill: torch_jobs.Kill

    def __call__(self) -> Any:
        """The model, in a process that is armed."""
        write, mine, first = CheckpointWriter.write, f"server-{self.kill.rank}-", self.kill.step

        def torn(writer: Any, name: str, *pieces: Any) -> None:
            struck = mine in name and torch_jobs.step_written(writer) >= first and not self.kill.mark.exists()
            write(writer, name, *(piece[: len(piece) // 2] if struck else piece for piece in pieces))
            if struck:
                self.kill.strike()

        CheckpointWriter.write = torn  # type: ignore[method-assign]
        return torch_jobs.Net()


def steps(framework: str) -> int:
    """Of a whole run."""
    return EPOCHS[framework] * ROWS // BATCH


def job(folder: Path, framework: str, *, gate: int = 0, **fields: Any) -> tw.Job:
    """A job of two workers and two servers, a checkpoint each 5 steps; `gate`: a step, from 0, that waits."""
    wait = Gate(folder=folder.parent, step=gate) if gate else None
    made = {"torch": _torch, "tensorflow": _tensorflow}[framework]
    return made(folder, schedule=wait, epochs=EPOCHS[framework], plan="dp=2,servers=2", **SHARED, **fields)


def _torch(folder: Path, **fields: Any) -> tw.Job:
    table = tw.datasets.table({name: rows[:ROWS] for name, rows in torch_jobs.data().items()})
    return torch_jobs.job(
        folder, strategy="parameter_server", train=table, step=Counted(folder=folder.parent), **fields
    )


def _tensorflow(folder: Path, **fields: Any) -> tw.Job:
    table = tw.datasets.table({name: rows[:ROWS] for name, rows in keras_jobs.data().items()})
    judged = {"evaluate": table, "evaluate_epochs": EPOCHS["tensorflow"], "metrics": {"accuracy": accuracy}}
    loss = {"step": None, "loss": cross_entropy, "inputs": "x", "targets": "y"}
    return keras_jobs.job(folder, strategy="tf_parameter_server", train=table, **{**loss, **judged, **fields})


def cross_entropy(outputs: Any, targets: Any) -> Any:
    import tensorflow as tf

    return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)


def accuracy(outputs: Any, targets: Any) -> Any:
    import tensorflow as tf

    return tf.cast(tf.equal(tf.argmax(outputs, axis=1), targets), tf.float32)


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A signal to the processes of some ranks once a step is told."""

    step: int
    ranks: tuple[int, ...]
    number: int = signal.SIGKILL


@dataclass(kw_only=True)
class Striker:
    """Kills the processes of some ranks, or freezes them, once a step is told and a checkpoint is there.

    Until a worker has taken the place of the first victim, the other workers wait for the file `gate`. So the run can
    neither end before that nor pass the steps of later strikes. And no other strike comes: who waits for a file cannot
    be interrupted, and would be taken for hung where the generation ended.

    Attributes:
        plan: in order.
        folder: of the file `gate`, made once a worker has joined, and `held`, the processes that wait for it.
    """

    plan: list[Strike]
    folder: Path
    pids: dict[int, int] = field(default_factory=dict)  # by worker
    ranks: dict[int, int] = field(default_factory=dict)  # worker, by rank
    saved: bool = False
    step: int = 0
    struck: list[int] = field(default_factory=list)  # processes

    def carried(self, effect: m.Effect) -> None:
        """The driver has something done."""
        match effect:
            case m.CallWorker(verb="form"):
                self.ranks[effect.argument.rank] = effect.worker
            case m.EmitEvent(event=events.Placed() as placed):
                self.pids[placed.worker] = placed.pid
            case m.EmitEvent(event=events.Joined()):
                self._gate.touch()
            case m.EmitEvent(event=events.Checkpointed()) if not self.saved:
                self.saved = True
                self._strike()

    def told(self, news: events.Steps) -> None:
        """Steps were completed."""
        if news.step:
            self.step = news.step[-1]
            self._strike()

    @property
    def _gate(self) -> Path:
        return self.folder / "gate"

    def _strike(self) -> None:
        if not self.plan or self.step < self.plan[0].step or (self.struck and not self._gate.exists()):
            return
        (self.folder / "held").write_text(" ".join(str(self.pids[worker]) for worker in self.ranks.values()))
        if self.saved:
            strike = self.plan.pop(0)
            for rank in strike.ranks:
                self.struck.append(self.pids[self.ranks[rank]])
                os.kill(self.struck[-1], strike.number)


@contextmanager
def striking(folder: Path, *plan: Strike) -> Iterator[Striker]:
    """Within it, the run that this process drives loses processes."""
    striker = Striker(plan=list(plan), folder=folder.parent)
    carry_out: Callable[..., None] = EffectExecutor.carry_out
    tell: Callable[..., None] = WorkerOutput._report

    def carried(self: EffectExecutor, effect: m.Effect) -> None:
        carry_out(self, effect)
        striker.carried(effect)

    def told(self: WorkerOutput, generation: Generation, news: events.Steps) -> None:
        tell(self, generation, news)
        striker.told(news)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EffectExecutor, "carry_out", carried)
        patch.setattr(WorkerOutput, "_report", told)
        yield striker
