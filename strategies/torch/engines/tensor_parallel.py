"""The engine of tensor parallelism: each layer is divided over a few ranks, with replicas, over gloo or NCCL."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from trainwright.core.data import Feed
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Plan
from trainwright.strategies.torch.distributed.mesh_groups import MeshRunner
from trainwright.strategies.torch.engines.sharded_model_engine import ShardedModelEngine, choose_layers
from trainwright.strategies.torch.shard_layout import WHOLE_MODEL, ShardSlice
from trainwright.strategies.torch.tensor_parallel.layers import shard_layers
from trainwright.strategies.torch.training.deferred_init import keep_new_tensors
from trainwright.strategies.torch.training.objective import Objective
from trainwright.strategies.torch.training.train_step import StepRunner


class TensorParallel(ShardedModelEngine):
    """A part of each layer on each worker: `mesh.tensor` workers hold a model, and there are `mesh.data` replicas."""

    def _shard_model(self, spec: ModelSpec, plan: Plan, model: nn.Module) -> Mapping[str, ShardSlice]:
        layers = choose_layers(spec, plan, model, self._part.tensors, self._where)
        keep_new_tensors()
        slices = shard_layers(model, layers, self._tensor_group, self._where)
        model.to(self._device)
        return slices

    def _warmed(self, feed: Feed) -> StepRunner:
        if self._part == WHOLE_MODEL:
            return super()._warmed(feed)
        self._check_start()
        objective = Objective(self.replica.model, self._caller(), world=1)
        runner = MeshRunner(objective=objective, place=self._placed, data_groups=self._placed.data_groups)
        self._throwaway(runner, feed, check=self._wants_check(feed))
        return runner
