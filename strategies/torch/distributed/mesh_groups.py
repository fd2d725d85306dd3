"""A rank's place in the mesh of a plan, and the groups that it communicates in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from trainwright.core.errors import JobError
from trainwright.core.plan import Mesh
from trainwright.core.topology import Group
from trainwright.strategies.torch.shard_layout import ModelPart, to_local
from trainwright.strategies.torch.training.train_state import TorchReplica

_BUCKET_BYTES = 25 * 2**20  # of gradients in one all-reduce, as in DDP
_Kind = Literal["data", "shard", "tensor"]
_KINDS: tuple[_Kind, ...] = ("data", "shard", "tensor")


@dataclass(frozen=True, kw_only=True)
class MeshGroups:
    """A rank's place in the mesh and its groups.

    Attributes:
        mesh: of the group, with as many replicas as it has.
        rank: in it.
        deadline: of every collective.
        replicas: ranks that hold the same part; like the others None where this one is alone.
        shards: those that divide each parameter with it.
        tensors: those that divide layers with it.
    """

    mesh: Mesh
    rank: int
    deadline: timedelta
    replicas: ProcessGroup | None = None
    shards: ProcessGroup | None = None
    tensors: ProcessGroup | None = None

    @classmethod
    def of(cls, planned: Mesh, group: Group, where: str) -> MeshGroups:
        """Return a rank's place, without groups; a rank that is alone holds the whole model.

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
        return cls(mesh=replace(planned, data=data), rank=group.rank, deadline=deadline)

    def joined(self) -> MeshGroups:
        """Return the place with its groups; every rank of the world calls it, since each makes all groups."""
        replicas, shards, tensors = (self._group(kind) for kind in _KINDS)
        return replace(self, replicas=replicas, shards=shards, tensors=tensors)

    @property
    def data_groups(self) -> tuple[ProcessGroup, ...]:
        """Groups of ranks that hold the same stage and part of its layers, with other data."""
        return tuple(group for group in (self.shards, self.replicas) if group is not None)

    @property
    def comparison_keys(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Keys of the state that each rank holds: (stage, part of layers), and the same with its shard."""
        at = [tuple(int(each) for each in (self._ranks == rank).nonzero()[0]) for rank in range(self.mesh.size)]
        return tuple(((stage, tensor), (stage, shard, tensor)) for stage, _, shard, tensor in at)

    def device_mesh(self, device: torch.device) -> DeviceMesh:
        """Return the device mesh of the ranks that hold this stage and part of its layers: shards, and replicas."""
        assert self.shards is not None, "each parameter is divided"
        if self.replicas is None:
            return DeviceMesh.from_group(self.shards, device.type)
        stage, _, _, tensor = self._at
        ranks, names = self._ranks[stage, :, :, tensor], ("replicate", "shard")
        return DeviceMesh.from_group([self.replicas, self.shards], device.type, mesh=ranks, mesh_dim_names=names)

    def batch_group(self) -> ProcessGroup:
        """Make a group of the ranks that hold this stage and part of its layers; every rank calls it."""
        rows = self._ranks.flatten(1, 2).movedim(1, -1).flatten(0, 1).tolist()
        groups: list[ProcessGroup] = [distributed.new_group(row, timeout=self.deadline) for row in rows]
        return next(group for group, row in zip(groups, rows, strict=True) if self.rank in row)

    @property
    def part(self) -> ModelPart:
        """The part of the model that this rank holds."""
        stage, _, shard, tensor = self._at
        mesh = self.mesh
        return ModelPart(
            stage=stage,
            stages=mesh.pipeline,
            shard=shard,
            shards=mesh.shard,
            tensor=tensor,
            tensors=mesh.tensor,
        )

    def scaled_sums(self, carried: Tensor) -> Tensor:
        """Return this rank's contribution to sums over all ranks; tensor-parallel ranks share what all of them know."""
        sums = carried.double()
        sums[[*range(2), *range(3, len(sums))]] /= self.mesh.tensor  # all but the wish, which one rank may have alone
        return sums

    def squared_norm(self, replica: TorchReplica, others: Collection[Tensor] = ()) -> Tensor:
        """Return this rank's contribution to the squared norm of the whole model's gradient.

        Args:
            replica: of this rank; its gradients are those of the global batch.
            others: parameters that count on another rank.
        """
        split = replica.split
        squares = [torch.zeros((), dtype=torch.float64, device=replica.device)]
        for parameter, name in replica.names.items():
            if parameter.grad is not None and parameter not in others:
                held = to_local(parameter.grad)
                real = torch.view_as_real(held) if held.is_complex() else held
                holders = self.mesh.data * (1 if name in split else self.mesh.tensor)
                squares.append(torch.linalg.vector_norm(real, dtype=torch.float64).to(replica.device) ** 2 / holders)
        return torch.stack(squares).sum()

    @property
    def _ranks(self) -> torch.Tensor:
        """All ranks, by stage, replica, shard and tensor-parallel part."""
        mesh = self.mesh
        return torch.arange(mesh.size).reshape(mesh.pipeline, mesh.data, mesh.shard, mesh.tensor)

    @property
    def _at(self) -> tuple[int, int, int, int]:
        """This rank's indices in the mesh."""
        stage, data, shard, tensor = (int(each) for each in (self._ranks == self.rank).nonzero()[0])
        return stage, data, shard, tensor

    def _group(self, kind: _Kind) -> ProcessGroup | None:
        """Return this rank's group along a dimension of the mesh; None where it is alone."""
        rows = self._ranks.movedim(1 + _KINDS.index(kind), -1).flatten(0, -2).tolist()
        if len(rows[0]) == 1:
            return None
        if len(rows) == 1:
            return distributed.group.WORLD
        groups: list[ProcessGroup] = [distributed.new_group(row, timeout=self.deadline) for row in rows]
        return next(group for group, row in zip(groups, rows, strict=True) if self.rank in row)


def all_reduce_gradients(parameters: Sequence[nn.Parameter], group: distributed.ProcessGroup) -> None:
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
