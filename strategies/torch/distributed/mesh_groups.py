"""A rank's place in the mesh of a plan, the groups that it communicates in, and the sums over the mesh in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from trainwright.core.data import Feed
from trainwright.core.errors import JobError
from trainwright.core.plan import Mesh
from trainwright.core.topology import Group
from trainwright.strategies.torch.shard_layout import ModelPart, to_local
from trainwright.strategies.torch.training.train_state import TorchReplica
from trainwright.strategies.torch.training.train_step import StepRunner, StepTotals

_BUCKET_BYTES = 25 * 2**20  # of gradients in one all-reduce, as in DDP


@dataclass(frozen=True, kw_only=True)
class MeshGroups:
    """A rank's place in the mesh and its groups."""

    mesh: Mesh  # of the group, with as many replicas as it has
    rank: int  # in it
    deadline: timedelta  # of every collective
    replicas: ProcessGroup | None = None  # ranks that hold the same part; like the others None where this one is alone
    shards: ProcessGroup | None = None  # those that divide each parameter with it
    tensors: ProcessGroup | None = None  # those that divide layers with it

    @classmethod
    def join(cls, planned: Mesh, group: Group, where: str) -> MeshGroups:
        """Make the groups of a mesh; every rank calls it. A rank that is alone holds the whole model.

        Raises:
            JobError: the group cannot hold a whole number of models.
        """
        deadline = timedelta(seconds=group.deadline_s)
        if group.size == 1:
            return cls(mesh=Mesh(), rank=0, deadline=deadline)
        parts = planned.size // planned.data
        data, rest = divmod(group.size, parts)
        if rest:
            kinds = (("stages", planned.pipeline), ("parts", planned.shard), ("tensor-parallel parts", planned.tensor))
            what = " of ".join(f"{count} {kind}" for kind, count in kinds if count > 1)
            raise JobError(
                [f"{group.size} ranks cannot hold a model in {what}: use a multiple of {parts} workers"], where=where
            )
        place = cls(mesh=replace(planned, data=data), rank=group.rank, deadline=deadline)
        replicas, shards, tensors = (place._group_along(dimension) for dimension in (1, 2, 3))
        return replace(place, replicas=replicas, shards=shards, tensors=tensors)

    @property
    def data_groups(self) -> tuple[ProcessGroup, ...]:
        """Groups of ranks that hold the same stage and part of its layers, with other data."""
        return tuple(group for group in (self.shards, self.replicas) if group is not None)

    @property
    def comparison_keys(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Keys of the state that each rank holds: (stage, part of layers), and the same with its shard."""
        at = [self._indices(rank) for rank in range(self.mesh.size)]
        return tuple(((stage, tensor), (stage, shard, tensor)) for stage, _, shard, tensor in at)

    def device_mesh(self, device: torch.device) -> DeviceMesh:
        """Return the device mesh of the ranks that hold this stage and part of its layers: shards, and replicas."""
        assert self.shards is not None, "each parameter is divided"
        if self.replicas is None:
            return DeviceMesh.from_group(self.shards, device.type)
        stage, _, _, tensor = self._indices(self.rank)
        ranks, names = self._ranks[stage, :, :, tensor], ("replicate", "shard")
        return DeviceMesh.from_group([self.replicas, self.shards], device.type, mesh=ranks, mesh_dim_names=names)

    def batch_group(self) -> ProcessGroup:
        """Make a group of the ranks that hold this stage and part of its layers; every rank calls it."""
        return self._own_group(self._ranks.flatten(1, 2).movedim(1, -1).flatten(0, 1).tolist())

    @property
    def part(self) -> ModelPart:
        """The part of the model that this rank holds."""
        stage, _, shard, tensor = self._indices(self.rank)
        mesh = self.mesh
        return ModelPart(
            stage=stage, stages=mesh.pipeline, shard=shard, shards=mesh.shard, tensor=tensor, tensors=mesh.tensor
        )

    @property
    def _ranks(self) -> torch.Tensor:
        """All ranks, by stage, replica, shard and tensor-parallel part."""
        mesh = self.mesh
        return torch.arange(mesh.size).reshape(mesh.pipeline, mesh.data, mesh.shard, mesh.tensor)

    def _indices(self, rank: int) -> tuple[int, int, int, int]:
        """Return a rank's indices in the mesh."""
        stage, data, shard, tensor = (int(each) for each in (self._ranks == rank).nonzero()[0])
        return stage, data, shard, tensor

    def _group_along(self, dimension: int) -> ProcessGroup | None:
        """Make this rank's group along a dimension of the mesh; None where it is alone."""
        rows = self._ranks.movedim(dimension, -1).flatten(0, -2).tolist()
        if len(rows[0]) == 1:
            return None
        return distributed.group.WORLD if len(rows) == 1 else self._own_group(rows)

    def _own_group(self, rows: list[list[int]]) -> ProcessGroup:
        """Make a group of each row of ranks, and return the one with this rank."""
        groups: list[ProcessGroup] = [distributed.new_group(row, timeout=self.deadline) for row in rows]
        return next(group for group, row in zip(groups, rows, strict=True) if self.rank in row)


# --- A step -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MeshRunner(StepRunner):
    """Runs micro-batches of a part of a model and adds up the results over the mesh."""

    place: MeshGroups  # this rank's place in the mesh
    # the sums of this step, with the all-reduce that is under way
    pending_sums: list[tuple[Tensor, Work | None]] = field(default_factory=list)
    measures_own_time: bool = False

    def accumulate(self, replica: TorchReplica, feed: Feed, *, sampled: bool) -> None:
        """Run forward and backward of every micro-batch."""
        self.pending_sums.clear()
        super().accumulate(replica, feed, sampled=sampled)

    def start_sums(self) -> None:
        """Start the all-reduce of the step's sums over all ranks."""
        sums = self.own_sums()
        self.pending_sums.append((sums, distributed.all_reduce(sums, async_op=True)))

    def own_sums(self) -> Tensor:
        """Return this rank's contribution to the sums; tensor-parallel ranks share what all of them know."""
        sums_gradient = self.objective.sums_parameter.grad
        assert sums_gradient is not None, "all losses have been added"
        sums = sums_gradient.double()
        # Not the stop request, which one rank may have alone.
        sums[[*range(2), *range(3, len(sums))]] /= self.place.mesh.tensor
        return sums / self.objective.world

    def reduce(self, replica: TorchReplica) -> None:
        """Make each gradient that of the global batch."""
        if self.place.replicas is not None:
            _all_reduce_gradients(replica.trainable, self.place.replicas)

    def counted_elsewhere(self) -> frozenset[Tensor]:
        """Return the parameters whose gradients another rank adds to the norm."""
        return frozenset()

    def settle(self, replica: TorchReplica, *, wants_norm: bool) -> tuple[list[Tensor], StepTotals]:
        """Return this rank's gradients, of the global batch, and the sums over all ranks."""
        if not self.pending_sums:
            self.start_sums()
        self.reduce(replica)
        norm = self._norm(replica) if wants_norm else None
        sums, work = self.pending_sums.pop()
        assert work is not None, "this rank is in the group"
        work.wait()
        totals = StepTotals.of(sums.tolist(), norm)
        replica.phase_timer.wait()
        return [to_local(each.grad) for each in replica.trainable if each.grad is not None], totals

    def _norm(self, replica: TorchReplica) -> float:
        """Return the norm of the whole model's gradient."""
        split, elsewhere = replica.split, self.counted_elsewhere()
        squares = [torch.zeros((), dtype=torch.float64, device=replica.device)]
        for parameter, name in replica.names.items():
            if parameter.grad is not None and parameter not in elsewhere:
                held = to_local(parameter.grad)
                real = torch.view_as_real(held) if held.is_complex() else held
                holders = self.place.mesh.data * (1 if name in split else self.place.mesh.tensor)
                squares.append(torch.linalg.vector_norm(real, dtype=torch.float64).to(replica.device) ** 2 / holders)
        square = torch.stack(squares).sum()
        distributed.all_reduce(square)
        return float(torch.sqrt(square))


def _all_reduce_gradients(parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
    """Sum the gradients over a group, in buckets; a gradient that no rank has stays None."""
    given = [parameter.grad is not None for parameter in parameters]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    used = torch.tensor(given, dtype=torch.float32, device=parameters[0].device)
    pieces = _gradient_buckets([parameter.grad for parameter in parameters if parameter.grad is not None])
    flats = [used, *(torch.cat([each.reshape(-1) for each in piece]) for piece in pieces)]
    for work in [distributed.all_reduce(flat, group=group, async_op=True) for flat in flats]:
        assert work is not None, "this rank is in the group"
        work.wait()
    for piece, flat in zip(pieces, flats[1:], strict=True):
        for each, whole in zip(piece, torch.split(flat, [each.numel() for each in piece]), strict=True):
            each.copy_(whole.view_as(each))
    for parameter, count in zip(parameters, used.tolist(), strict=True):
        if not count:
            parameter.grad = None


def _gradient_buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return buckets of gradients of one type, of about `_BUCKET_BYTES` each."""
    pieces: list[list[Tensor]] = []
    size = 0
    for gradient in gradients:
        if not pieces or size >= _BUCKET_BYTES or pieces[-1][0].dtype != gradient.dtype:
            pieces.append([])
            size = 0
        pieces[-1].append(gradient)
        size += gradient.nbytes
    return pieces
