"""What the engines share whose ranks hold a part of the model each: stages, shards, parts of layers, and products."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainwright.core.data import Columns, Feed, MetricSums
from trainwright.core.engine import ModelSpec, StateSnapshot
from trainwright.core.errors import CheckpointError, JobError
from trainwright.core.plan import Plan
from trainwright.core.topology import Group, StateTag, StateTransfer
from trainwright.strategies.torch.checkpoint import host_state, replica_digests
from trainwright.strategies.torch.checkpoint.host_state import HostState
from trainwright.strategies.torch.checkpoint.shard_layout import WHOLE_MODEL, ModelPart, ShardSlice
from trainwright.strategies.torch.distributed.mesh_groups import MeshGroups
from trainwright.strategies.torch.distributed.process_group import all_gather_ints, check_same_start
from trainwright.strategies.torch.engines.process_group_engine import ProcessGroupEngine
from trainwright.strategies.torch.tensor_parallel.layers import TensorParallelPlan, shard_layers
from trainwright.strategies.torch.tensor_parallel.tensor_group import TensorParallelGroup
from trainwright.strategies.torch.training.batch_norm import batch_norms
from trainwright.strategies.torch.training.objective import JobFunctions
from trainwright.strategies.torch.training.train_state import AUTOCAST_DTYPES, TorchReplica


@dataclass(frozen=True, kw_only=True)
class _KeptState:
    """What this rank held when it left a group; tensors and nothing of the group's."""

    state: HostState
    buffers: Mapping[str, Tensor]
    sound: bool


class ShardedModelEngine(ProcessGroupEngine):
    """A part of the model on each worker, as the plan's mesh says."""

    def __init__(self) -> None:
        super().__init__()
        self._place: MeshGroups | None = None
        self._part: ModelPart = WHOLE_MODEL
        self._job: tuple[ModelSpec, Plan] | None = None
        self._tensor_group: TensorParallelGroup | None = None
        self._held: _KeptState | None = None
        self._checksum = 0

    # --- the group ----------------------------------------------------------------------------------------

    def form(self, group: Group) -> StateTag:
        """Join the process group, and hold this rank's part in it.

        What this rank held is kept where that is its part in the new group too, and dropped with its step otherwise.

        Raises:
            PeerLost: it does not form by the group's deadline.
            JobError: the plan's parts do not divide the group.
        """
        self._release()
        super().form(group)
        if self._job is not None:
            self._guarded(partial(self._again, *self._job))
        return self._tag()

    def leave(self) -> None:
        """Drop what holds the process group, end it and close its sockets; the state stays."""
        self._release()
        super().leave()

    # --- the state ----------------------------------------------------------------------------------------

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """Make the model as one device would, and keep this rank's part of it.

        Raises:
            JobError: the model cannot be trained or divided, or not over this group.
            UserCodeError: the user's code raised.
        """
        self._job, self._place = (spec, plan), None
        return super().build(spec, plan)

    def transfer(self, moves: Sequence[StateTransfer]) -> StateTag:
        """Make this rank equal to the one that its part comes from, bit by bit. Raises PeerLost."""
        source = {move.piece: move.source for move in moves}.get(self._part.name)
        if source is not None:
            group = self._placed.replicas
            self._guarded(lambda: host_state.broadcast(self.replica, source, self._rank, self._device, group))
        return super().transfer(moves)

    def snapshot(self) -> StateSnapshot:
        """Copy this rank's part to host memory. Training may go on at once."""
        if self._replica is None and self._held is not None:
            kept = self._copies.of(self._held.state)
            return StateSnapshot(step=kept.step or 0, size_bytes=kept.size_bytes, state=kept)
        return super().snapshot()

    # --- steps --------------------------------------------------------------------------------------------

    def evaluate_step(self, feed: Feed) -> MetricSums:
        """Local sums of `loss` and the metrics, on one of the ranks that compute them together."""
        sums = super().evaluate_step(feed)
        return MetricSums() if self._part.tensor else sums

    def predict_step(self, feed: Feed) -> Columns:
        """The model's outputs for the feed's rows, on one of the ranks that compute them together."""
        outputs = super().predict_step(feed)
        return {} if self._part.tensor else outputs

    # --- for the engines ----------------------------------------------------------------------------------

    @property
    def _bound(self) -> bool:
        """Whether the modules know the group, so that they cannot outlive it."""
        return False

    @property
    def _placed(self) -> MeshGroups:
        assert self._place is not None, "form() and build() come first"
        return self._place

    def _tag(self) -> StateTag:
        plain, part = super()._tag(), self._part
        if part == WHOLE_MODEL:
            return plain
        pieces = frozenset({part.name})
        return StateTag(step=plain.step, layout=self._layout, pieces=pieces, total=part.total, sound=plain.sound)

    @property
    def _layout(self) -> str:
        return self._part.layout

    def _made(self, spec: ModelSpec, plan: Plan) -> TorchReplica:
        """Model and optimizer, this rank's part of both; makes the groups where there are none."""
        if self._place is None:
            self._settle(plan)
        if self._part == WHOLE_MODEL:
            return super()._made(spec, plan)
        problems = [*self._problems(spec, plan)]
        if self._part.tensors > 1 and spec.compile == "inductor":
            problems.append('compile="inductor" was not tried with tensor parallelism: leave it out, or use tp=1')
        if self._part.tensors > 1 and not is_elementwise(spec):
            problems.append(
                "the optimizer does not work number by number, so that it cannot step on parts of a layer: use one "
                'that does, such as AdamW, or strategy="data_parallel"'
            )
        if problems:
            raise JobError(problems, where=self._where)
        return TorchReplica(
            spec, plan, self._device, self._where, part=self._part, place=partial(self._partition, spec, plan)
        )

    def _problems(self, spec: ModelSpec, plan: Plan) -> Sequence[str]:
        """What of a job this engine cannot do."""
        return ()

    def _partition(self, spec: ModelSpec, plan: Plan, model: nn.Module) -> Mapping[str, ShardSlice]:
        """Keep this rank's part of a whole model, where it will be; says what it left of each tensor it cut."""
        self._checksum = replica_digests.parameter_digest(model)
        return self._kept(spec, plan, model)

    def _kept(self, spec: ModelSpec, plan: Plan, model: nn.Module) -> Mapping[str, ShardSlice]:
        """The same, in an engine's own way."""
        raise NotImplementedError

    def _split(self, spec: ModelSpec, plan: Plan, model: nn.Module) -> TensorParallelPlan:
        """How tensor-parallel ranks divide a whole model's layers. Raises JobError where that is not possible."""
        degree = self._placed.mesh.tensor
        if degree == 1:
            return TensorParallelPlan()
        from trainwright.strategies.torch.profiling.model_profile import meta_runner, trace_model
        from trainwright.strategies.torch.tensor_parallel.plan_search import (
            TensorParallelPlanner,
            sequence_parallel_problem,
        )

        assert spec.sample is not None, "a job brings a sample"
        caller = self._caller_for(spec, plan)
        columns, call = caller.tensors(spec.sample()), (spec.inputs, spec.keywords)
        least = 2 if batch_norms(model) else 1  # rows that it takes
        columns = {name: torch.cat([column] * least) for name, column in columns.items()}
        given = columns if spec.step else {name: columns[name] for name in spec.inputs}
        run = meta_runner(given, call, spec.step, least)
        splitter = TensorParallelPlanner(model, run, degree, self._where)
        if spec.tensor_plan:
            split = splitter.planned(spec.tensor_plan)
        else:
            split = splitter.found(lambda bones: trace_model(bones, given, call, spec.step))
        if plan.sequence and (why := sequence_parallel_problem(model, split, run, degree, self._where)):
            raise JobError(
                [f"sequence=1: the model's tokens cannot be divided between layers that are: {why}; leave it out"],
                where=self._where,
            )
        return replace(split, sequence=plan.sequence)

    def _caller_for(self, spec: ModelSpec, plan: Plan) -> JobFunctions:
        """How the job's functions are called in host memory, before there is a replica."""
        return JobFunctions(
            spec=spec, device=torch.device("cpu"), autocast=AUTOCAST_DTYPES.get(plan.precision), where=self._where
        )

    def _divide(self, model: nn.Module, split: TensorParallelPlan) -> dict[str, ShardSlice]:
        """Keep this rank's part of each layer that is divided. Raises JobError where it has hooks."""
        place = self._placed
        if place.tensors is None:
            return {}
        index, of = self._part.tensor, place.mesh.tensor
        self._tensor_group = TensorParallelGroup(
            index=index, size=of, process_group=place.tensors, sequence=split.sequence
        )
        return shard_layers(model, split, self._tensor_group, self._where)

    def verify(self) -> None:
        """Make sure that ranks hold the same where they should; every rank calls it, between two steps.

        Raises:
            JobError: on every rank, where some differ.
            PeerLost: a rank is gone.
        """
        if self._replica is not None and self._placed.mesh.size > 1:
            self._guarded(
                lambda: replica_digests.check_replicas(self.replica, self._placed.kin, self._device, self._where)
            )

    def _check_start(self) -> None:
        """Raise JobError, on every rank, where the ranks' first parameters differ."""
        answers = all_gather_ints([0 if self.replica.step else self._checksum], self._device)
        check_same_start([checksum for (checksum,) in answers], self._where)

    def _made_group(self) -> ProcessGroup:
        return self._placed.batch_group()

    def _settle(self, plan: Plan) -> None:
        """Find this rank's place in the group."""
        assert self._group is not None, "form() comes first"
        self._place = MeshGroups.of(plan.mesh, self._group, self._where).joined()
        self._part = self._place.part

    # --- inside -------------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Hold nothing of the group's any more."""
        self._runner = self._place = None
        if self._tensor_group is not None:
            self._tensor_group.process_group = None
        if self._bound:
            self._keep()
            self._let_go()

    def _keep(self) -> None:
        """Keep the tensors of this rank's part, which outlive all that knows the group."""
        replica = self._replica
        if replica is not None:
            self._held = None
            with suppress(CheckpointError):  # an optimizer's state that cannot be saved cannot be carried over either
                self._held = _KeptState(
                    state=host_state.state_of(replica), buffers=dict(replica.named_buffers()), sound=replica.sound
                )

    def _let_go(self) -> None:
        """Hold no model any more."""
        self._replica = self._runner = None

    def _again(self, spec: ModelSpec, plan: Plan) -> None:
        """Stay with what is held where it is still this rank's part; otherwise build as at first."""
        before = self._part
        self._settle(plan)
        if self._replica is not None and self._part == before:
            if self._tensor_group is not None:
                self._tensor_group.process_group = self._placed.tensors
            return
        held, self._held = self._held, None
        if held is not None and (held.state.step is None or held.state.part != self._part):
            held = None
        self._let_go()
        gc.collect()  # there may be no room for the model of another part beside the next one
        self._replica = self._made(spec, plan)
        if held is not None:
            host_state.restore(self._replica, held.state)
            self._replica.sound = held.sound
            self._replica.take_buffers(held.buffers)


def is_elementwise(spec: ModelSpec) -> bool:
    """Whether an optimizer does to parts of a parameter what it does to all of it; True where it cannot be tried."""
    assert spec.optimizer is not None, "only a job with run='fit' may leave it out"
    start = torch.linspace(-1.0, 2.0, 16).view(4, 4)
    whole = [nn.Parameter(start.clone())]
    parts = [nn.Parameter(start[:2].clone()), nn.Parameter(start[2:].clone())]
    try:
        for given in (whole, parts):
            optimizer = spec.optimizer(list(given))
            for step in (1.0, 3.0):
                for parameter, slope in zip(given, (start.cos() * step).chunk(len(given)), strict=True):
                    parameter.grad = slope.clone()
                optimizer.step()
    except Exception:
        return True
    return torch.allclose(whole[0], torch.cat((parts[0], parts[1])), rtol=1e-5, atol=1e-7)
