"""How a rank that holds a part of a model runs a step: its micro-batches, then the sums over the mesh."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed
from torch.distributed import Work

from trainwright.core.data import Feed
from trainwright.strategies.torch.distributed.mesh_groups import MeshGroups, all_reduce_gradients
from trainwright.strategies.torch.shard_layout import to_local
from trainwright.strategies.torch.training.train_state import TorchReplica
from trainwright.strategies.torch.training.train_step import StepRunner, StepTotals


@dataclass(frozen=True, kw_only=True)
class MeshRunner(StepRunner):
    """Runs micro-batches of a part of a model and adds up the results over the mesh.

    Attributes:
        place: this rank's place in the mesh.
        pending_sums: the sums of this step, with the all-reduce that is under way.
    """

    place: MeshGroups
    pending_sums: list[tuple[Tensor, Work | None]] = field(default_factory=list)
    measures_own_time: bool = False

    def accumulate(self, replica: TorchReplica, feed: Feed, *, sampled: bool) -> None:
        """Run forward and backward of every micro-batch."""
        self.pending_sums.clear()
        super().accumulate(replica, feed, sampled=sampled)

    def start_sums(self) -> None:
        """Start the all-reduce of the step's sums over all ranks."""
        carried = self.objective.carry.grad
        assert carried is not None, "all losses have been added"
        sums = self.place.scaled_sums(carried) / self.objective.world
        self.pending_sums.append((sums, distributed.all_reduce(sums, async_op=True)))

    def reduce(self, replica: TorchReplica) -> None:
        """Make each gradient that of the global batch."""
        if self.place.replicas is not None:
            all_reduce_gradients(replica.trainable, self.place.replicas)

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
        weight, loss, wish, *told = sums.tolist()
        replica.laps.wait()
        gradients = [to_local(each.grad) for each in replica.trainable if each.grad is not None]
        return gradients, StepTotals(weight=weight, loss=loss, wish=wish > 0.5, told=tuple(told), norm=norm)

    def _norm(self, replica: TorchReplica) -> float:
        """Return the norm of the whole model's gradient."""
        square = self.place.squared_norm(replica, self.counted_elsewhere())
        distributed.all_reduce(square)
        return float(torch.sqrt(square))
