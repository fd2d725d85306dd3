"""What all torch engines share but the process group: state and steps of a replica; and the engine of one device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup

from trainwright.core import random_state
from trainwright.core.data import Columns, Feed, MetricSums, PeakMemory, StepReport
from trainwright.core.engine import MetricStates, ModelSpec, StateReader, StateSnapshot, StateWriter
from trainwright.core.errors import DeviceError, JobError, PeerLost, TrainwrightError
from trainwright.core.plan import Plan
from trainwright.core.topology import Address, Capabilities, Group, Role, StateTag, StateTransfer
from trainwright.strategies.common.user_code_errors import peer_lost_error
from trainwright.strategies.torch.checkpoint import host_state, safetensors_files
from trainwright.strategies.torch.step_trace import TorchTraceRecorder
from trainwright.strategies.torch.torch_errors import TorchUserCode, clear_frames, sticky_error
from trainwright.strategies.torch.training import evaluation, train_step
from trainwright.strategies.torch.training.objective import (
    DevicePrefetcher,
    JobFunctions,
    Objective,
    evaluation_mode,
)
from trainwright.strategies.torch.training.train_state import DataRank, TorchReplica
from trainwright.strategies.torch.training.train_step import StepRunner

Result = TypeVar("Result")


class _ReplicaEngine:
    """Holds a replica and moves its state; `TorchEngine` adds the steps.

    `trainwright.core.engine.Engine` says who calls what and when, and what it raises.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        reform="in_place",
        topology="collective",
        devices_per_worker=1,
        inductor=True,
        torch_training=True,
        decodes=True,
        tracer=TorchTraceRecorder,
    )

    def __init__(self) -> None:
        self._group: Group | None = None
        self._replica: TorchReplica | None = None
        self._runner: StepRunner | None = None
        self._device = torch.device("cpu")
        self._copies = host_state.HostStateCopier()
        # Of a process group: wait for the device and raise PeerLost where values may be those of an aborted collective;
        # and whether they may be.
        self._confirm: Callable[[], None] = lambda: None
        self._aborted: Callable[[], bool] = lambda: False

    # --- the group ----------------------------------------------------------------------------------------

    def reserve(self, role: Role) -> Address:
        """Return an address without a port: no other rank connects to this one."""
        return Address(host="127.0.0.1", port=0)

    def form(self, group: Group) -> StateTag:
        """Set threads and device; return what state this rank holds."""
        self._runner = None
        self._group = group
        self._device = torch.device(group.devices[0])
        if group.threads:
            torch.set_num_threads(group.threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        if self._replica is not None:
            self._replica.move(self._device)
        return self._tag()

    def leave(self) -> None:
        """Leave the group; the process keeps its state. Safe to call at any time, and twice."""
        self._runner = None

    def interrupt(self, deadline_s: float) -> bool:
        """Return False: work that does not wait for other ranks cannot be interrupted."""
        return False

    # --- the state ----------------------------------------------------------------------------------------

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """Build model and optimizer, the same on every rank for one seed."""
        spec.check(self.capabilities)
        self._replica = self._guarded(lambda: self._build_replica(spec, plan))
        if self._replica.custom and not self.capabilities.custom_steps:
            kind = type(self._replica.optimizer).__name__
            problem = f"{kind}, whose step() takes a closure, needs all of the model on each worker"
            raise JobError([f'optimizer() returned {problem}: set strategy="data_parallel"'], where=self._where)
        self._runner = None
        return self._tag()

    def transfer(self, moves: Sequence[StateTransfer]) -> StateTag:
        """Send nothing, since one rank holds all state. A fresh build is at step 0 from now on."""
        if self.replica.step is None:
            self.replica.step, self.replica.data_rank = 0, self._data_rank
        return self._tag()

    def check_unsaved(self) -> None:
        """Check the frozen parameters that no state holds: a pass over those that may change. Raises JobError."""
        if self._replica is not None:
            self._replica.moving.check()

    def snapshot(self) -> StateSnapshot:
        """Copy the state to host memory. Training may continue at once.

        Of data ranks with local state only the first copies what all have, the others what they keep as their own.
        """
        held = host_state.state_of(self.replica)
        if held.local is not None and held.local.data_rank.rank:
            held = replace(held, model={}, slots={}, boxes={}, trained=())
        copy = self._copies.of(held)
        return StateSnapshot(step=copy.step or 0, size_bytes=copy.size_bytes, state=copy)

    def restore(self, copy: StateSnapshot) -> StateTag:
        """Restore a state copied by `snapshot`."""
        host_state.restore(self.replica, copy.state)
        return self._tag()

    @staticmethod
    def save(copy: StateSnapshot, writer: StateWriter) -> None:
        """Write a snapshot's files; may run in another thread, after the engine is gone."""
        safetensors_files.write(copy.state, writer)

    def load(self, reader: StateReader) -> StateTag:
        """Load the state of a checkpoint."""
        replica, data_rank = self.replica, self._data_rank
        own = safetensors_files.read_local(reader, data_rank) if replica.local else None
        host_state.restore(replica, replace(safetensors_files.read(reader, replica.wanted, replica.part), local=own))
        replica.data_rank = data_rank
        return self._tag()

    def verify(self) -> None:
        """Do nothing: no other rank holds a copy of this state."""

    # --- for the engines ----------------------------------------------------------------------------------

    def _build_replica(self, spec: ModelSpec, plan: Plan) -> TorchReplica:
        return TorchReplica(spec, plan, self._device, self._where, confirm=self._confirm)

    @property
    def replica(self) -> TorchReplica:
        """Model, optimizer and step of this rank; `build` comes first."""
        assert self._replica is not None, "build() comes first"
        return self._replica

    @property
    def _rank(self) -> int:
        return self._group.rank if self._group else 0

    @property
    def _where(self) -> str:
        return f"rank {self._rank}"

    @property
    def _data_rank(self) -> DataRank:
        """This rank's number among the data ranks."""
        return DataRank(rank=self._rank, ranks=self._group.size if self._group else 1)

    def _tag(self) -> StateTag:
        """Return what state this rank holds; local state counts only for the data rank that it belongs to."""
        replica, data_rank = self._replica, self._data_rank
        if replica is None:
            return StateTag(step=None)
        if not replica.local:
            return StateTag(step=replica.step, sound=replica.sound)
        return StateTag(
            step=replica.step,
            pieces=frozenset({"state", data_rank.piece}),
            total=data_rank.ranks + 1,
            sound=replica.sound and (replica.step is None or replica.data_rank == data_rank),
        )

    def _guarded(self, work: Callable[[], Result]) -> Result:
        """Run `work`; clear the frames of errors, which would keep a process group's sockets open.

        Meanwhile no other thread draws from the global generators of random numbers. Whatever comes of an aborted
        group, an error or a result, is PeerLost.
        """
        failure: TrainwrightError
        try:
            with random_state.GENERATORS_LOCK:
                result = work()
            if not self._aborted():
                return result
            failure = PeerLost("the group was aborted", where=self._where, remedy="look at the rank that failed first")
        except TrainwrightError as error:
            failure = error
            if self._aborted() and not isinstance(error, (PeerLost, DeviceError)):
                failure = peer_lost_error(error, self._where)
                clear_frames(error)
        except Exception as error:  # also of what reads the bytes that an aborted collective wrote
            failed = sticky_error(error, self._where)
            if failed is not None:
                failure = failed
            elif self._aborted() or TorchUserCode.lost_peer(error):
                failure = peer_lost_error(error, self._where)
            elif TorchUserCode.is_out_of_memory(error):  # outside of the user's functions, in a reduction for instance
                failure = TorchUserCode("a step", self._where).meaning(error)
            else:
                raise
            clear_frames(error)
        clear_frames(failure)
        raise failure


class TorchEngine(_ReplicaEngine):
    """A replica that takes steps by itself."""

    def warm(self, feed: Feed) -> None:
        """Run a throwaway forward and backward of full shape; parameters, buffers and random states are kept."""
        self._runner = self._guarded(lambda: self._warmed(feed))

    def train_step(self, feed: Feed) -> StepReport:
        """Run this rank's part of one global step."""
        if self._runner is None:
            self.warm(feed)
        return self._guarded(lambda: train_step.train(self.replica, self._ready, feed))

    def evaluate_step(self, feed: Feed, states: MetricStates | None = None) -> MetricSums:
        """Return local sums of `loss` and the metrics, and update those with state."""
        replica = self.replica
        replica.begin_evaluation()
        with replica.averaged(), self._evaluating(feed) as through:
            return self._guarded(
                lambda: evaluation.evaluate(replica.model, self._caller(), feed, replica.step or 0, through, states)
            )

    def predict_step(self, feed: Feed) -> Columns:
        """Return the model's outputs for the feed's rows, on the first rank of each tensor-parallel group."""
        with self.replica.averaged(), self._evaluating(feed) as through:
            found = self._guarded(lambda: evaluation.predict(self.replica.model, self._caller(), feed, through))
        return {} if self.replica.part.tensor else found

    def decode_step(self, feed: Feed, cache: dict[int, Any]) -> Columns | None:
        """Return outputs as `predict_step`, for the tokens that follow those of earlier calls with the same cache.

        None where the model keeps nothing, or its stages are on several ranks.
        """
        with self.replica.averaged(), self._evaluating(feed) as through:
            if through is not None:
                return None
            found = self._guarded(lambda: evaluation.decode(self.replica.model, self._caller(), feed, cache))
        return {} if found is not None and self.replica.part.tensor else found

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        """Give the user's module as evaluations see it. Raises JobError where the plan divides it."""
        replica = self.replica
        if replica.part.total > 1:
            problem = (
                "context.model: the plan divides the model, and no worker holds all of it: use "
                'tw.load_model(job, step=...) of a checkpoint, or strategy="data_parallel"'
            )
            raise JobError([problem], where=self._where)
        replica.begin_evaluation()
        with replica.averaged(), evaluation_mode(replica.model), torch.no_grad():
            yield replica.model

    def peak_memory(self) -> PeakMemory | None:
        """Return the most memory of this rank's GPU used since `form`; None on a CPU."""
        if self._device.type != "cuda":
            return None
        return PeakMemory(
            allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            reserved_bytes=torch.cuda.max_memory_reserved(self._device),
        )

    def prefetcher(self) -> Callable[[Feed], Feed] | None:
        """Return a function that copies a feed's batches to the GPU, for another thread; None on a CPU."""
        return DevicePrefetcher(self._caller(), self._device) if self._device.type == "cuda" else None

    @contextmanager
    def _evaluating(self, feed: Feed) -> Iterator[evaluation.OutputsOf | None]:
        """Give what computes outputs in place of a call of the model; None for the call."""
        yield None

    @property
    def _ready(self) -> StepRunner:
        assert self._runner is not None, "warm() comes before a step"
        return self._runner

    def _caller(self) -> JobFunctions:
        replica = self.replica
        return JobFunctions(
            spec=replica.spec, device=replica.device, autocast=replica.autocast, where=self._where,
            selective_recompute=replica.selective_recompute, group=self._batch_group,
            divided=replica.part.total > 1,
        )  # fmt: skip

    @property
    def _batch_group(self) -> Callable[[], ProcessGroup] | None:
        """A function that makes the process group of a global batch's ranks, called by all; None without one."""
        return None

    def _warmed(self, feed: Feed) -> StepRunner:
        """Return a runner that has run once."""
        runner = self._alone(world=1)
        self._throwaway(runner, feed, check=self._wants_check(feed))
        return runner

    def _wants_check(self, feed: Feed) -> bool:
        """Return whether the loss is to be checked for the division of a batch; every rank calls it.

        A state of a run that passed the check is not checked again: later batches and values must not end that run.
        """
        return not self.replica.checked and train_step.needs_check(self.replica.spec, feed)

    def _alone(self, world: int) -> StepRunner:
        """Return a runner that reduces nothing."""
        objective = Objective(self.replica.model, self._caller(), world=world)
        return StepRunner(objective=objective, observed=self.replica.trainable)

    def _throwaway(self, runner: StepRunner, feed: Feed, *, check: bool) -> bool:
        """Run a copy of the first micro-batch with weight 0; says whether every parameter got a gradient.

        Args:
            check: refuse a loss that depends on how the batch is divided.
        """
        replica = self.replica
        _, share = next(train_step.throwaway_micro_batches(feed))
        with replica.attempt(), random_state.preserve_generators(self._device), runner.objective.checking(check):
            replica.reseed(0)
            with replica.finding_last() if runner.measures_own_time else nullcontext():
                train_step.rehearse(runner, share)
            replica.checked = replica.checked or (check and train_step.has_several_samples([share]))
            every_used = all(parameter.grad is not None for parameter in replica.trainable)
        self._add_logged_names(runner.objective)
        runner.objective.begin()
        return every_used

    def _add_logged_names(self, objective: Objective) -> None:
        """Add the values that a throwaway micro-batch of any rank logged, now or earlier, to a step's sums."""
        if objective.logged.names is None:
            self.replica.logged = self._all_names({*self.replica.logged, *objective.logged.first_names})
            objective.add_logged_names(self.replica.logged)

    def _all_names(self, own: Collection[str]) -> tuple[str, ...]:
        """Return the names of all ranks, in one order; every rank calls it."""
        return tuple(sorted(own))


class OneDevice(TorchEngine):
    """A model on one device of one worker."""

    capabilities: ClassVar[Capabilities] = replace(
        TorchEngine.capabilities, local_state=True, synchronized_batch_norm=True, custom_steps=True
    )

    def form(self, group: Group) -> StateTag:
        """Set threads and device."""
        assert group.size == 1, "one device is driven by one worker"
        return super().form(group)
