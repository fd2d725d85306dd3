"""Base of the TensorFlow engines: all but the `tf.distribute` strategy that they open."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import tensorflow as tf

from trainwright.core.data import Columns, Feed, MetricSums, PeakMemory, StepReport
from trainwright.core.engine import MetricStates, ModelSpec, StateReader, StateSnapshot, StateWriter
from trainwright.core.errors import JobError, PeerLost, ResourceError, TrainwrightError
from trainwright.core.plan import Plan
from trainwright.core.topology import Address, Capabilities, Group, Role, StateTag, StateTransfer
from trainwright.strategies.common.user_code_errors import peer_lost_error
from trainwright.strategies.tensorflow.tensorflow_compat import before_first_use
from trainwright.strategies.tensorflow.training import checkpoint_files
from trainwright.strategies.tensorflow.training.evaluation import Evaluator
from trainwright.strategies.tensorflow.training.tensorflow_errors import TensorFlowUserCode
from trainwright.strategies.tensorflow.training.train_function import TrainFunction
from trainwright.strategies.tensorflow.training.train_state import KerasReplica, KerasTrainState

_Result = TypeVar("_Result")
_TOO_LATE = re.compile(r"must be configured at program startup|cannot be modified after initialization")
_FIRST_USE: list[traceback.FrameSummary] = []  # frames of the first use of TensorFlow, which starts its devices


def _remember_first_use() -> None:
    if not _FIRST_USE:
        _FIRST_USE.extend(traceback.extract_stack()[:-2])


before_first_use(_remember_first_use)


class _TraceRecorder:
    """Records operations of the host and of its devices by `tf.profiler.experimental`, for TensorBoard."""

    suffix: ClassVar[str] = ".xplane.pb"
    folder: ClassVar[str] = "profile/plugins/profile"  # where TensorBoard looks below its folder

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        """Start to record."""
        self._folder = tempfile.TemporaryDirectory(prefix="trainwright-profile-")
        tf.profiler.experimental.start(self._folder.name)

    def step(self, number: int) -> AbstractContextManager[object]:
        """Return the context of a step, whose number TensorBoard knows."""
        trace: AbstractContextManager[object] = tf.profiler.experimental.Trace("train", step_num=number, _r=1)
        return trace

    def span(self, name: str) -> AbstractContextManager[object]:
        """Return a context whose operations get a name."""
        trace: AbstractContextManager[object] = tf.profiler.experimental.Trace(name)
        return trace

    def stop(self) -> None:
        """End the recording; `save` can follow on another thread."""
        tf.profiler.experimental.stop()

    def save(self, path: Path) -> None:
        """Write the recording, as TensorFlow has stored it on this machine."""
        assert self._folder is not None, "start comes first"
        found = sorted(Path(self._folder.name).rglob(f"*{self.suffix}"))
        if not found:
            raise ResourceError("the profiler of TensorFlow wrote no file", remedy="install a release of TensorFlow")
        shutil.move(found[-1], path)
        self._folder.cleanup()


class TensorFlowEngine(ABC):
    """One worker of a `tf.distribute` strategy; `trainwright.core.engine.Engine` documents the calls.

    TensorFlow opens one strategy in a process: each rendezvous epoch needs a new process.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        reform="new_process", topology="collective", xla=True, tracer=_TraceRecorder
    )

    def __init__(self) -> None:
        self._group: Group | None = None
        self._strategy: Any = None
        self._replica: KerasTrainState | None = None
        self._program: TrainFunction | None = None
        self._evaluation: Evaluator | None = None
        self._copier: checkpoint_files.StateCopier | None = None

    @abstractmethod
    def open_strategy(self, group: Group) -> Any:
        """Open and return the `tf.distribute.Strategy` of this worker."""

    # --- the group ----------------------------------------------------------------------------------------

    def reserve(self, role: Role) -> Address:
        """Return a placeholder address: no rank connects to this one."""
        self._check_new()
        return Address(host="127.0.0.1", port=0)

    def form(self, group: Group) -> StateTag:
        """Set threads and devices, and open the strategy. Raises PeerLost, JobError."""
        self._check_new()
        self._group = group
        try:
            if group.threads:
                tf.config.threading.set_intra_op_parallelism_threads(group.threads)
                tf.config.threading.set_inter_op_parallelism_threads(max(group.threads, 2))
            self._strategy = self.open_strategy(group)
        except RuntimeError as error:
            late = _too_late_error(error, self._where)
            if late is None:
                raise
            raise late from error
        return self._tag()

    def leave(self) -> None:
        """Drop compiled functions; the process cannot form another group."""
        self._program = self._evaluation = None

    def interrupt(self, deadline_s: float) -> bool:
        """Return False: no other thread can interrupt a collective of TensorFlow."""
        return False

    # --- the state ----------------------------------------------------------------------------------------

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """Make model and optimizer in the strategy's scope, the same on every rank for one seed.

        Raises:
            JobError: the model cannot be trained.
            UserCodeError: the user's code raised.
        """
        spec.check(self.capabilities)
        tf.config.run_functions_eagerly(spec.compile == "eager")
        self._program = self._evaluation = self._copier = None  # of a model before
        self._replica = self._guarded(lambda: self._make_replica(spec, plan))
        return self._tag()

    def peak_memory(self) -> PeakMemory | None:
        """Return the most memory used of the fullest GPU of this process; None without one."""
        own = range(len(tf.config.get_visible_devices("GPU")))  # logical devices can be those of other processes
        peaks = [int(tf.config.experimental.get_memory_info(f"GPU:{number}")["peak"]) for number in own]
        return PeakMemory(allocated_bytes=max(peaks)) if peaks else None

    def verify(self) -> None:
        """Do nothing: the strategy keeps its variables equal."""
        return

    def transfer(self, moves: Sequence[StateTransfer]) -> StateTag:
        """Set a fresh build to step 0. The strategy makes variables equal when it creates them."""
        self.replica.step = self.replica.step or 0
        return self._tag()

    def check_unsaved(self) -> None:
        """Do nothing: checkpoints hold all variables."""
        return

    def snapshot(self) -> StateSnapshot:
        """Copy the state to host memory. Training can continue at once.

        Raises:
            PeerLost: a step ended in the middle of its update, so that the state belongs to no step.
        """
        if not self.replica.sound:
            raise PeerLost("a step ended in the middle of its update", where=self._where)
        copy = self._guarded(lambda: self._copying().copy())
        return StateSnapshot(step=self.replica.step or 0, size_bytes=copy.size_bytes, state=copy)

    def restore(self, copy: StateSnapshot) -> StateTag:
        """Take a state copied by `snapshot`. Raises CheckpointError if it does not fit, with nothing changed."""
        checkpoint_files.apply_files(self.replica, checkpoint_files.to_files(copy.state))
        return self._tag()

    def save(self, copy: StateSnapshot, writer: StateWriter) -> None:
        """Write a snapshot's files; may run in another thread. Raises StorageError, NonFiniteLoss."""
        for name, data in checkpoint_files.to_files(copy.state).items():
            writer.write(name, data)

    def load(self, reader: StateReader) -> StateTag:
        """Take the state of a checkpoint. Raises CheckpointError if it does not fit, with nothing changed."""
        checkpoint_files.apply_files(self.replica, checkpoint_files.read_files(reader))
        return self._tag()

    # --- steps --------------------------------------------------------------------------------------------

    def warm(self, feed: Feed) -> None:
        """Compile the step by a trial step of full shape that applies nothing.

        Raises:
            JobError: also for a divided batch, of which the model or the optimizer needs all.
            UserCodeError, PeerLost: as `train_step`.
        """
        if feed.total > 1:
            self._guarded(self.replica.check_divided)
        self._guarded(lambda: self._ready().run(feed, muted=True))

    def train_step(self, feed: Feed) -> StepReport:
        """Compute this rank's part of one global step.

        Raises:
            NonFiniteLoss: on every rank, before anything is applied.
            PeerLost: another rank was lost.
            UserCodeError, JobError: the user's code raised or is wrong.
        """
        return self._guarded(lambda: self._ready().train(feed))

    def evaluate_step(self, feed: Feed, states: MetricStates | None = None) -> MetricSums:
        """Return local sums of `loss` and the metrics, and update those with state. Raises UserCodeError, JobError."""
        return self._guarded(lambda: self._evaluating().evaluate(feed, states))

    def predict_step(self, feed: Feed) -> Columns:
        """Return the model's outputs for the feed's rows. Raises UserCodeError, JobError."""
        return self._guarded(lambda: self._evaluating().predict(feed))

    # --- for the engines ----------------------------------------------------------------------------------

    @property
    def replica(self) -> KerasTrainState:
        """Model, optimizer and step of this rank; call `build` first."""
        assert self._replica is not None, "call build() first"
        return self._replica

    def _copying(self) -> checkpoint_files.StateCopier:
        if self._copier is None:
            self._copier = checkpoint_files.StateCopier(self.replica)
        return self._copier

    @property
    def _where(self) -> str:
        return f"rank {self._group.rank if self._group else 0}"

    def _tag(self) -> StateTag:
        replica = self._replica
        return StateTag(step=replica.step if replica else None, sound=replica.sound if replica else True)

    def _check_new(self) -> None:
        if self._strategy is not None:
            raise TrainwrightError("TensorFlow opens one strategy in a process", remedy="start a new process")

    def _make_replica(self, spec: ModelSpec, plan: Plan) -> KerasTrainState:
        return KerasReplica(spec, self._strategy, plan, self._where)

    def _ready(self) -> TrainFunction:
        if self._program is None:
            replica = self.replica
            assert isinstance(replica, KerasReplica), "only those have a program"
            self._program = TrainFunction(replica)
        return self._program

    def _evaluating(self) -> Evaluator:
        if self._evaluation is None:
            self._evaluation = Evaluator(self.replica.model, self.replica.caller)
        return self._evaluation

    def _guarded(self, work: Callable[[], _Result]) -> _Result:
        """Do work; translate a broken collective to PeerLost, and an error from a graph back to the original."""
        try:
            return work()
        except Exception as error:
            failure = _original_error(error)
            if TensorFlowUserCode.lost_peer(error):
                failure = peer_lost_error(error, self._where)
            elif failure is None and TensorFlowUserCode.is_out_of_memory(error):
                failure = TensorFlowUserCode("a step", self._where).meaning(error)
            if failure is None or failure is error:
                raise
        raise failure


def _too_late_error(error: BaseException, where: str) -> JobError | None:
    """Return the error of a strategy that is opened after the first use of TensorFlow; None for other errors."""
    if not _TOO_LATE.search(str(error)):
        return None
    libraries = TensorFlowUserCode.libraries
    own = [frame for frame in _FIRST_USE if not os.path.abspath(frame.filename).startswith(libraries)]
    line = f", first in {own[-1].filename}, line {own[-1].lineno}: {own[-1].line}" if own else ""
    return JobError(
        [
            f"TensorFlow was used in this worker before its strategy was built{line}; make tensors, models and data "
            "sets inside model(), loss() and optimizer(), not when a module is imported or a worker is set up"
        ],
        where=where,
    )


def _original_error(error: BaseException) -> TrainwrightError | None:
    """Return the TrainwrightError that was raised while a graph was traced. AutoGraph raises another one for it."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, TrainwrightError):
        behind = behind.__cause__ or behind.__context__
    return behind
