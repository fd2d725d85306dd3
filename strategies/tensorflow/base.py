"""What the TensorFlow engines share: everything but the strategy that they open."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import tensorflow as tf

from trainwright.core.checkpoint import Reader, Writer
from trainwright.core.data import Columns, Feed, StepReport, Sums
from trainwright.core.engine import ModelSpec, StateCopy
from trainwright.core.errors import TrainwrightError
from trainwright.core.group import Address, Capabilities, Generation, Group, Move, Role, StateTag
from trainwright.core.plan import Plan
from trainwright.strategies.common.error_mapping import peer_lost
from trainwright.strategies.tensorflow.training import checkpoint_files
from trainwright.strategies.tensorflow.training.error_mapping import ours, remember_first_use, too_late, user_code
from trainwright.strategies.tensorflow.training.evaluation import Evaluation
from trainwright.strategies.tensorflow.training.objective import Caller
from trainwright.strategies.tensorflow.training.train_function import Program
from trainwright.strategies.tensorflow.training.train_state import Replica, Trained

Result = TypeVar("Result")
remember_first_use()


class TensorFlowEngine(ABC):
    """One worker of a `tf.distribute` strategy; `trainwright.core.engine.Engine` says who calls what, and when.

    TensorFlow opens one strategy in a process: a new generation takes a new one.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(reform="new_process", topology="collective", xla=True)

    def __init__(self) -> None:
        self._group: Group | None = None
        self._strategy: Any = None
        self._replica: Trained | None = None
        self._program: Program | None = None
        self._evaluation: Evaluation | None = None
        self._copier: checkpoint_files.Copier | None = None

    @abstractmethod
    def open_strategy(self, group: Group) -> Any:
        """The engine's own part: the `tf.distribute.Strategy` of this worker."""

    # --- the group ----------------------------------------------------------------------------------------

    def reserve(self, generation: Generation, role: Role) -> Address:
        """Nobody has to reach this rank: no port is bound."""
        self._check_new()
        return Address(host="127.0.0.1", port=0)

    def form(self, group: Group) -> StateTag:
        """Take threads and devices, and open the strategy. Raises PeerLost, JobError."""
        self._check_new()
        self._group = group
        try:
            if group.threads:
                tf.config.threading.set_intra_op_parallelism_threads(group.threads)
                tf.config.threading.set_inter_op_parallelism_threads(max(group.threads, 2))
            self._strategy = self.open_strategy(group)
        except RuntimeError as error:
            late = too_late(error, self._where)
            if late is None:
                raise
            raise late from error
        return self._tag()

    def leave(self) -> None:
        """Let go of what is compiled; the process is of no further use."""
        self._program = self._evaluation = None

    def interrupt(self, deadline_s: float) -> bool:
        """False: nothing makes a collective of TensorFlow raise from another thread."""
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
        self._replica = self._guarded(lambda: self._made(spec, plan))
        return self._tag()

    def verify(self) -> None:
        """Do nothing: a strategy of TensorFlow keeps its variables equal itself."""
        return

    def transfer(self, moves: Sequence[Move]) -> StateTag:
        """A strategy makes its variables equal as it creates them. A fresh build stands at step 0 from then on."""
        self.replica.step = self.replica.step or 0
        return self._tag()

    def snapshot(self) -> StateCopy:
        """Copy the state to host memory. Training may go on at once."""
        copy = self._guarded(lambda: self._copying().copy())
        return StateCopy(step=self.replica.step or 0, size_bytes=copy.size_bytes, state=copy)

    def restore(self, copy: StateCopy) -> StateTag:
        """Take a state copied by `snapshot`. Raises CheckpointError where it does not fit, with nothing changed."""
        checkpoint_files.taken(self.replica, checkpoint_files.written(copy.state))
        return self._tag()

    def save(self, copy: StateCopy, writer: Writer) -> None:
        """Write a snapshot's files; may run in another thread. Raises StorageError, NonFiniteLoss."""
        for name, data in checkpoint_files.written(copy.state).items():
            writer.write(name, data)

    def load(self, reader: Reader) -> StateTag:
        """Take the state of a checkpoint. Raises CheckpointError where it does not fit, with nothing changed."""
        checkpoint_files.taken(self.replica, checkpoint_files.read(reader))
        return self._tag()

    # --- steps --------------------------------------------------------------------------------------------

    def warm(self, feed: Feed) -> None:
        """Compile the step, in a throwaway one of full shape that applies nothing; all state is kept.

        Raises:
            JobError, UserCodeError, PeerLost: as `train_step`.
        """
        self._guarded(lambda: self._ready().run(feed, muted=True))

    def train_step(self, feed: Feed) -> StepReport:
        """One step of this rank, its part of one global step.

        Raises:
            NonFiniteLoss: on every rank, before anything is applied.
            PeerLost: another rank went away.
            UserCodeError, JobError: the user's code raised or is wrong.
        """
        return self._guarded(lambda: self._ready().train(feed))

    def evaluate_step(self, feed: Feed) -> Sums:
        """Local sums of `loss` and the metrics. Raises UserCodeError, JobError."""
        return self._guarded(lambda: self._evaluating().evaluate(feed))

    def predict_step(self, feed: Feed) -> Columns:
        """The model's outputs for the feed's rows. Raises UserCodeError, JobError."""
        return self._guarded(lambda: self._evaluating().predict(feed))

    # --- for the engines ----------------------------------------------------------------------------------

    @property
    def replica(self) -> Trained:
        """Model, optimizer and step of this rank; `build` comes first."""
        assert self._replica is not None, "build() comes first"
        return self._replica

    def _copying(self) -> checkpoint_files.Copier:
        if self._copier is None:
            self._copier = checkpoint_files.Copier(self.replica)
        return self._copier

    @property
    def _where(self) -> str:
        return f"rank {self._group.rank if self._group else 0}"

    @property
    def _caller(self) -> Caller:
        return Caller(spec=self.replica.spec, where=self._where)

    def _tag(self) -> StateTag:
        replica = self._replica
        return StateTag(step=replica.step if replica else None, sound=replica.sound if replica else True)

    def _check_new(self) -> None:
        if self._strategy is not None:
            raise TrainwrightError("TensorFlow opens one strategy in a process", remedy="start a new process")

    def _made(self, spec: ModelSpec, plan: Plan) -> Trained:
        return Replica(spec, self._strategy, plan, Caller(spec=spec, where=self._where))

    def _ready(self) -> Program:
        if self._program is None:
            replica = self.replica
            assert isinstance(replica, Replica), "only those have a program"
            self._program = Program(replica, self._caller)
        return self._program

    def _evaluating(self) -> Evaluation:
        if self._evaluation is None:
            self._evaluation = Evaluation(self.replica.model, self._caller)
        return self._evaluation

    def _guarded(self, work: Callable[[], Result]) -> Result:
        """Do work; a broken collective becomes PeerLost, and an error that left a graph in disguise itself again."""
        try:
            return work()
        except Exception as error:
            failure = peer_lost(error, self._where) if user_code.lost_peer(error) else ours(error)
            if failure is None or failure is error:
                raise
        raise failure
