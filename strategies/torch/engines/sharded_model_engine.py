"""What engines share whose ranks each hold a part of the model: stages, shards, parts of layers, or combinations."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainwright.core.data import Feed, MetricSums
from trainwright.core.engine import MetricStates, ModelSpec, StateSnapshot
from trainwright.core.errors import CheckpointError, JobError
from trainwright.core.plan import Plan
from trainwright.core.topology import Group, StateTag, StateTransfer
from trainwright.strategies.torch.checkpoint import host_state, replica_digests
from trainwright.strategies.torch.checkpoint.host_state import HostState
from trainwright.strategies.torch.distributed.mesh_groups import MeshGroups
from trainwright.strategies.torch.engines.data_parallel import ProcessGroupEngine
from trainwright.strategies.torch.shard_layout import WHOLE_MODEL, ModelPart, ShardSlice
from trainwright.strategies.torch.tensor_parallel.layers import TensorParallelPlan
from trainwright.strategies.torch.tensor_parallel.tensor_group import TensorParallelGroup
from trainwright.strategies.torch.training.objective import JobFunctions
from trainwright.strategies.torch.training.train_state import TorchReplica, is_elementwise


@dataclass(frozen=True, kw_only=True)
class _KeptState:
    """What this rank held when it left a group: tensors, and nothing that belongs to the group."""

    state: HostState
    buffers: Mapping[str, Tensor]
    sound: bool

    @classmethod
    def of(cls, replica: TorchReplica) -> _KeptState | None:
        """Return the state of a replica; None where the optimizer's state cannot be saved."""
        try:
            state = host_state.state_of(replica)
        except CheckpointError:
            return None
        return cls(state=state, buffers=dict(replica.named_buffers()), sound=replica.sound)

    def beside(self, free: int) -> _KeptState:
        """Return it as it can wait while the next model and its optimizer, which have its size, are built.

        Args:
            free: bytes of the device. Memory that torch's allocator holds unused is not among them.

        Returns:
            Itself where the device has room for both; else a copy in host memory of what is not there already.
        """
        held = (*self.state.memory.values(), *self.buffers.values())
        if sum(tensor.nbytes for tensor in held if tensor.device.type != "cpu") <= free:
            return self
        buffers = {name: buffer.cpu() for name, buffer in self.buffers.items()}
        return replace(self, state=self.state.mapped(lambda _, tensor: tensor.cpu()), buffers=buffers)

    def restore_into(self, replica: TorchReplica) -> None:
        """Give a fresh replica of the same part this state."""
        host_state.restore(replica, self.state)
        replica.sound = self.sound
        replica.take_buffers(self.buffers)


class ShardedModelEngine(ProcessGroupEngine):
    """A part of the model on each worker, by the plan's mesh."""

    def __init__(self) -> None:
        super().__init__()
        self._place: MeshGroups | None = None
        self._part: ModelPart = WHOLE_MODEL
        self._job: tuple[ModelSpec, Plan] | None = None
        self._tensor_group = TensorParallelGroup(index=0, size=1)
        self._modules_hold_group = False  # so that they cannot outlive it
        self._layout = WHOLE_MODEL.layout
        self._kept_state: _KeptState | None = None

    # --- the group ----------------------------------------------------------------------------------------

    def form(self, group: Group) -> StateTag:
        """Join the process group, and hold this rank's part of the model.

        What this rank held is kept where that is its part in the new group too, and dropped with its step otherwise.
        Raises JobError where the plan's parts do not divide the group.
        """
        self._release()
        super().form(group)
        if self._job is not None:
            self._guarded(partial(self._rejoin, *self._job))
        return self._tag()

    def leave(self) -> None:
        """Drop what holds the process group, end it and close its sockets; the state stays."""
        self._release()
        super().leave()

    # --- the state ----------------------------------------------------------------------------------------

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """Build the model and keep this rank's part of it."""
        self._place = None
        tag = super().build(spec, plan)
        self._job = spec, plan  # not before: an interrupted build is done again, after a group was formed without it
        return tag

    def transfer(self, moves: Sequence[StateTransfer]) -> StateTag:
        """Make this rank equal to the one that its part comes from, bit by bit."""
        source = {move.piece: move.source for move in moves}.get(self._part.name)
        if source is not None:
            group = self._placed.replicas
            self._guarded(lambda: host_state.broadcast(self.replica, source, self._rank, self._device, group))
        return super().transfer(moves)

    def snapshot(self) -> StateSnapshot:
        """Copy this rank's part to host memory. Training may continue at once."""
        if self._replica is None and self._kept_state is not None:
            kept = self._copies.of(self._kept_state.state)
            return StateSnapshot(step=kept.step or 0, size_bytes=kept.size_bytes, state=kept)
        return super().snapshot()

    # --- steps --------------------------------------------------------------------------------------------

    def evaluate_step(self, feed: Feed, states: MetricStates | None = None) -> MetricSums:
        """Return local sums of `loss` and the metrics, on the first rank of each tensor-parallel group."""
        sums = super().evaluate_step(feed, None if self._part.tensor else states)
        return MetricSums() if self._part.tensor else sums

    # --- for the engines ----------------------------------------------------------------------------------

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

    def _build_replica(self, spec: ModelSpec, plan: Plan) -> TorchReplica:
        """Return this rank's part of a new model and optimizer; make the groups where there are none."""
        if self._place is None:
            self._join_mesh(plan)
        if self._part == WHOLE_MODEL:
            return super()._build_replica(spec, plan)
        part = self._part
        problems, divided = [*self._problems(spec, plan)], part.tensors > 1
        if divided and spec.compile == "inductor":
            problems.append('compile="inductor" was not tested with tensor parallelism: leave it out, or use tp=1')
        if divided and not is_elementwise(spec):
            problems.append(
                "the optimizer is not elementwise, so that it cannot update parts of a layer: use one that is, "
                'such as AdamW, or strategy="data_parallel"'
            )
        if problems:
            raise JobError(problems, where=self._where)
        self._tensor_group = TensorParallelGroup(
            index=part.tensor, size=part.tensors, process_group=self._placed.tensors, sequence=plan.sequence
        )
        place = partial(self._shard_model, spec, plan)
        return TorchReplica(spec, plan, self._device, self._where, part=part, place=place, confirm=self._confirm)

    def _problems(self, spec: ModelSpec, plan: Plan) -> Sequence[str]:
        """Return what of a job this engine cannot do."""
        return ()

    def _shard_model(self, spec: ModelSpec, plan: Plan, model: nn.Module) -> Mapping[str, ShardSlice]:
        """Keep this rank's part of a whole model, on its device; return the slice of each tensor that was cut."""
        raise NotImplementedError

    def _check_start(self) -> None:
        """Check that all ranks built the same model, and that replicas hold the same state; raises as `verify`."""
        checksum = 0 if self.replica.step else self.replica.start_digest
        replica_digests.check_same_start(checksum, self._device, self._where)
        self.verify()

    def verify(self) -> None:
        """Check that replicas hold the same state; every rank calls it, between two steps."""
        if self._replica is not None and self._placed.mesh.size > 1:
            keys = self._placed.comparison_keys
            self._guarded(lambda: replica_digests.check_replicas(self.replica, keys, self._device, self._where))

    def _make_batch_group(self) -> ProcessGroup:
        return self._placed.batch_group()

    def _join_mesh(self, plan: Plan) -> None:
        """Make the groups of the mesh, and find this rank's part."""
        assert self._group is not None, "form() comes first"
        self._place = MeshGroups.join(plan.mesh, self._group, self._where)
        self._part = self._place.part
        self._layout = self._part.layout

    # --- inside -------------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Drop what belongs to the group."""
        self._runner = self._place = None
        self._tensor_group.process_group = None
        if self._modules_hold_group:
            if self._replica is not None:
                self._kept_state = _KeptState.of(self._replica)
            self._drop_model()

    def _drop_model(self) -> None:
        self._replica = self._runner = None

    def _rejoin(self, spec: ModelSpec, plan: Plan) -> None:
        """Keep the replica where it is still this rank's part; otherwise build it, and restore the kept state."""
        self._join_mesh(plan)
        if self._replica is not None and self._replica.part == self._part:
            self._tensor_group.process_group = self._placed.tensors
            return
        held, self._kept_state = self._kept_state, None
        if held is not None and (held.state.step is None or held.state.part != self._part):
            held = None
        self._drop_model()
        gc.collect()  # there may be no room for the model of another part beside the next one
        if held is not None:
            held = held.beside(_free_bytes(self._device))
        self._replica = self._build_replica(spec, plan)
        if held is not None:
            held.restore_into(self._replica)


def _free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU; 0 for host memory, in which everything is already."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def choose_layers(spec: ModelSpec, plan: Plan, model: nn.Module, degree: int, where: str) -> TensorParallelPlan:
    """Choose how tensor-parallel ranks divide the layers of a whole model. Raises JobError where they cannot."""
    if degree == 1:
        return TensorParallelPlan()
    # Imported here: only tensor parallelism needs the tracer, which takes time to import.
    from trainwright.strategies.torch.tensor_parallel.plan_search import plan_layers

    assert spec.sample is not None, "a job has a sample"
    functions = JobFunctions.on_host(spec, plan, where)
    found = functions.tensors(spec.sample())

    def call(model: nn.Module, on: Mapping[str, Tensor]) -> Any:
        if spec.step is not None and not spec.inputs:
            return spec.numbered(spec.step, 0)(model, on)
        return functions.call_model(model, [on[name] for name in spec.inputs])

    given = found if spec.step else {name: found[name] for name in spec.inputs}
    return plan_layers(model, given, call, degree, where, named=spec.tensor_plan, sequence=plan.sequence)
