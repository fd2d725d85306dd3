"""The engine of tensor parallelism: each layer divided over a few ranks, and replicas of that, over gloo or NCCL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed, nn
from torch.distributed import Work

from trainwright.core.data import Feed
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Plan
from trainwright.strategies.torch.checkpoint.shard_layout import WHOLE_MODEL, ShardSlice, to_local
from trainwright.strategies.torch.distributed.mesh_groups import MeshGroups, all_reduce_gradients
from trainwright.strategies.torch.engines.sharded_model_engine import ShardedModelEngine
from trainwright.strategies.torch.training.objective import Objective
from trainwright.strategies.torch.training.train_state import TorchReplica
from trainwright.strategies.torch.training.train_step import GradientNoiseProbe, StepRunner, StepTotals


@dataclass(frozen=True, kw_only=True)
class MeshRunner(StepRunner):
    """Runs micro-batches of a part of a model, and adds up over the mesh what they gave.

    Attributes:
        place: of this rank.
        telling: what travels in this step, on its way.
    """

    place: MeshGroups
    telling: list[tuple[Tensor, Work | None]] = field(default_factory=list)
    tells_own: bool = False

    def accumulate(self, replica: TorchReplica, feed: Feed, *, sampled: bool) -> None:
        """Forward and backward of every micro-batch."""
        self.telling.clear()
        super().accumulate(replica, feed, sampled=sampled)

    def tell(self) -> None:
        """Begin to add up what travels, of all ranks."""
        carried = self.objective.carry.grad
        assert carried is not None, "all losses have been told"
        sums = self.place.told(carried) / self.objective.world
        self.telling.append((sums, distributed.all_reduce(sums, async_op=True)))

    def reduce(self, replica: TorchReplica) -> None:
        """Make each gradient that of the global batch."""
        if self.place.replicas is not None:
            all_reduce_gradients(replica.trainable, self.place.replicas)

    def twice(self) -> frozenset[Tensor]:
        """Parameters that count in the norm on another rank."""
        return frozenset()

    def settle(self, replica: TorchReplica, *, wants_norm: bool) -> tuple[list[Tensor], StepTotals]:
        """This rank's gradients, of the global batch, and the sums over all ranks."""
        if not self.telling:
            self.tell()
        self.reduce(replica)
        norm = self._norm(replica) if wants_norm else None
        sums, work = self.telling.pop()
        assert work is not None, "this rank is in the group"
        work.wait()
        weight, loss, wish, *told = sums.tolist()
        replica.laps.wait()
        gradients = [to_local(each.grad) for each in replica.trainable if each.grad is not None]
        return gradients, StepTotals(weight=weight, loss=loss, wish=wish > 0.5, told=tuple(told), norm=norm)

    def _norm(self, replica: TorchReplica) -> float:
        """Of the whole model's gradient."""
        square = self.place.square(replica, self.twice())
        distributed.all_reduce(square)
        return float(torch.sqrt(square))


class TensorParallel(ShardedModelEngine):
    """A part of each layer on each worker: `mesh.tensor` of them make a whole, `mesh.data` times."""

    def _kept(self, spec: ModelSpec, plan: Plan, model: nn.Module) -> Mapping[str, ShardSlice]:
        boxes = self._divide(model, self._split(spec, plan, model))
        model.to(self._device)
        return boxes

    def _warmed(self, feed: Feed) -> StepRunner:
        """A runner that has run once on all ranks."""
        if self._part == WHOLE_MODEL:
            return super()._warmed(feed)
        self._check_start()
        self.verify()
        objective = Objective(self.replica.model, self._caller(), world=1)
        runner = MeshRunner(
            objective=objective,
            reduced=objective,
            probe=GradientNoiseProbe(objective, ()),  # no rank sees a gradient of its own
            place=self._placed,
            others=self._placed.others,
        )
        self._throwaway(runner, feed)
        return runner
