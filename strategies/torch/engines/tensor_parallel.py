"""The engine of tensor parallelism: each layer is divided over a few ranks, with replicas, over gloo or NCCL."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from trainwright.core.data import Feed
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Plan
from trainwright.strategies.torch.distributed.mesh_runner import MeshRunner
from trainwright.strategies.torch.distributed.process_group import check_same_start
from trainwright.strategies.torch.engines.sharded_model_engine import ShardedModelEngine, plan_layers
from trainwright.strategies.torch.shard_layout import WHOLE_MODEL, ShardSlice
from trainwright.strategies.torch.training.objective import Objective
from trainwright.strategies.torch.training.train_step import GradientNoiseProbe, StepRunner


class TensorParallel(ShardedModelEngine):
    """A part of each layer on each worker: `mesh.tensor` workers hold a model, and there are `mesh.data` replicas."""

    def _shard_model(self, spec: ModelSpec, plan: Plan, model: nn.Module) -> Mapping[str, ShardSlice]:
        boxes = self._layers.shard(model, plan_layers(self._layers, spec, plan, model, self._where))
        model.to(self._device)
        return boxes

    def _warmed(self, feed: Feed) -> StepRunner:
        """Return a runner that has run once on all ranks."""
        if self._part == WHOLE_MODEL:
            return super()._warmed(feed)
        check_same_start(0 if self.replica.step else self._checksum, self._device, self._where)
        self.verify()
        objective = Objective(self.replica.model, self._caller(), world=1)
        runner = MeshRunner(
            objective=objective,
            reduced=objective,
            probe=GradientNoiseProbe(objective, ()),  # no rank sees a gradient of its own
            place=self._placed,
            others=self._placed.data_groups,
        )
        self._throwaway(runner, feed)
        return runner
