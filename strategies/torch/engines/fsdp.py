"""The engine of sharded data parallelism: torch's FSDP2 (ZeRO-2 and 3, and hybrid shard), over gloo or NCCL.

Each rank holds a part of every parameter, of its gradient and of the optimizer's state. After a failure there is a new
process group, to which neither FSDP2's modules nor DTensors can change. So the job's function builds the model again,
it is sharded again, and it takes over the tensors that this rank held.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import distributed, nn

from trainwright.core.data import Columns, Feed, MetricSums
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.plan import Plan
from trainwright.strategies.torch.distributed.fsdp_wrap import (
    BlockCalls,
    fsdp_modules,
    fully_shard_model,
    reshard_model,
    run_step_with_freezing,
)
from trainwright.strategies.torch.distributed.mesh_runner import MeshRunner
from trainwright.strategies.torch.distributed.process_group import check_same_start
from trainwright.strategies.torch.engines.sharded_model_engine import ShardedModelEngine, plan_layers
from trainwright.strategies.torch.shard_layout import WHOLE_MODEL, ShardSlice
from trainwright.strategies.torch.torch_compat import queue_backward_callback
from trainwright.strategies.torch.training.model_blocks import compile_blocks
from trainwright.strategies.torch.training.objective import Objective
from trainwright.strategies.torch.training.train_state import TorchReplica
from trainwright.strategies.torch.training.train_step import GradientNoiseProbe, StepRunner


@dataclass(frozen=True, kw_only=True)
class _ShardedRunner(MeshRunner):
    """Runs micro-batches of a divided model.

    FSDP2 reduces the model's gradients alone. The step's sums and what `calls` recorded go through one more, small
    all-reduce. It starts with the last gradients' reduction, so that nothing waits for it.

    Attributes:
        calls: what each step ran.
    """

    calls: BlockCalls

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Start the sums at the end of the last backward, before FSDP2 waits for the first layers' gradients."""
        carry = self.objective.carry  # its gradient comes before FSDP2 queues what it does at the end
        hook = carry.register_post_accumulate_grad_hook(lambda _: queue_backward_callback(self.start_sums))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            hook.remove()

    def start_sums(self) -> None:
        """Start the all-reduce of the step's sums and of the parameters that were used."""
        order, used = self.calls.take()
        carried = self.objective.carry.grad
        assert carried is not None, "carry is part of every objective"
        facts = torch.tensor([order, order**2, *(name in used for name in self.calls.names)], dtype=torch.float64)
        sums = torch.cat((self.place.scaled_sums(carried) / self.objective.world, facts.to(carried.device)))
        self.pending_sums.append((sums, distributed.all_reduce(sums, async_op=True)))

    def reduce(self, replica: TorchReplica) -> None:
        """Drop the gradients of unused parameters; FSDP2 has reduced all gradients.

        Raises:
            JobError: on every rank, where they did not run the same blocks.
        """
        sums, work = self.pending_sums.pop()
        assert work is not None, "this rank is in the group"
        work.wait()
        told = len(sums) - len(self.calls.names)
        orders, squared = sums[told - 2 : told].tolist()
        if int(orders) ** 2 != int(squared) * self.place.mesh.size:  # equal for equal orders alone
            raise JobError(
                [
                    "the ranks ran different blocks of the model, or in another order: every rank must run the same "
                    'ones for every batch; a model that chooses by its data needs strategy="data_parallel"'
                ],
                where=self.where,
            )
        for parameter, count in zip(replica.trainable, sums[told:].tolist(), strict=True):
            if not count:
                parameter.grad = None  # as on one device: the optimizer passes it by
        self.pending_sums.append((sums[: told - 2], work))


class Sharded(ShardedModelEngine):
    """Parameters sharded over `mesh.shard` workers, together with tensor parallelism where the plan says so."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: BlockCalls | None = None
        self._modules_hold_group = True

    # --- steps --------------------------------------------------------------------------------------------

    def evaluate_step(self, feed: Feed) -> MetricSums:
        """Return local sums of `loss` and the metrics. Every rank calls it, since parameters are gathered."""
        with self._gathering():
            return super().evaluate_step(feed)

    def predict_step(self, feed: Feed) -> Columns:
        """Return the model's outputs for the feed's rows. Every rank calls it, since parameters are gathered."""
        with self._gathering():
            return super().predict_step(feed)

    # --- inside -------------------------------------------------------------------------------------------

    def _drop_model(self) -> None:
        self._calls = None
        super()._drop_model()

    def _build_replica(self, spec: ModelSpec, plan: Plan) -> TorchReplica:
        step = None if spec.step is None else partial(run_step_with_freezing, spec.step)
        replica = super()._build_replica(replace(spec, step=step), plan)
        self._calls = BlockCalls(replica.model, replica.names)
        return replica

    def _shard_model(self, spec: ModelSpec, plan: Plan, model: nn.Module) -> Mapping[str, ShardSlice]:
        boxes = self._layers.shard(model, plan_layers(self._layers, spec, plan, model, self._where))
        if spec.compile == "inductor":
            compile_blocks(model, self._device)
        mesh = self._placed.device_mesh(self._device)
        fully_shard_model(model, mesh, zero=plan.zero, offload=plan.offload, where=self._where)
        return boxes

    def _warmed(self, feed: Feed) -> StepRunner:
        """Return a runner that has run once on all ranks."""
        if self._part == WHOLE_MODEL:
            return super()._warmed(feed)
        assert self._calls is not None, "build() comes first"
        check_same_start(0 if self.replica.step else self._checksum, self._device, self._where)
        self.verify()
        place = self._placed
        objective = Objective(self.replica.model, self._caller(), world=place.mesh.data_ranks)
        runner = _ShardedRunner(
            objective=objective,
            reduced=objective,
            probe=GradientNoiseProbe(objective, ()),  # no rank sees a gradient of its own
            local=self._unreplicated,
            calls=self._calls,
            place=place,
            others=place.data_groups,
        )
        self._throwaway(runner, feed)
        self._calls.take()
        return runner

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Drop gathered parameters at the end: without a backward FSDP2 keeps those that it gathered last."""
        try:
            yield
        finally:
            reshard_model(self.replica.model)

    @contextmanager
    def _unreplicated(self) -> Iterator[None]:
        """Scatter gradients in every backward, and add those of replicas only in the last one."""
        root = fsdp_modules(self.replica.model)[0]
        root.set_requires_all_reduce(False)
        try:
            yield
        finally:
            root.set_requires_all_reduce(True)
