"""The engine of pipelines: stages of a model on one rank each, replicas of them, over gloo or NCCL.

`strategies.cost_model.pipeline_schedules` gives the order of a stage's operations. torch's own pipelining is not used:
it has no room for values between stages that are no tensors or get no gradient, for micro-batches of unequal rows, for
weighted losses, and it keeps memory for all micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from trainwright.core.data import Batch, Feed, StepReport
from trainwright.core.engine import ModelSpec, StateSnapshot
from trainwright.core.errors import NonFiniteLoss
from trainwright.core.plan import Plan
from trainwright.strategies.torch.distributed.fsdp_wrap import StageShards
from trainwright.strategies.torch.engines.sharded_model_engine import ShardedModelEngine, choose_layers
from trainwright.strategies.torch.pipeline.p2p import StageLinks
from trainwright.strategies.torch.pipeline.split import SplitModel, layout_hash, split_stage, stage_problems
from trainwright.strategies.torch.pipeline.stage_executor import StageExecutor, StageRunner
from trainwright.strategies.torch.shard_layout import WHOLE_MODEL, ShardSlice
from trainwright.strategies.torch.training import evaluation
from trainwright.strategies.torch.training.objective import MicroBatchShare, Objective
from trainwright.strategies.torch.training.train_step import StepRunner


class Pipeline(ShardedModelEngine):
    """A stage of the model, or a part of one, on each worker, with `mesh.data` replicas."""

    def __init__(self) -> None:
        super().__init__()
        self._cut: SplitModel | None = None
        self._links: StageLinks | None = None
        self._shards: StageShards | None = None

    def interrupt(self, deadline_s: float) -> bool:
        """End blocked transfers and collectives, so that whoever waits for one raises PeerLost at once."""
        ended = super().interrupt(deadline_s)
        links = self._links  # read after that: later ones cannot connect any more
        if links is not None:
            links.cut()
        return ended

    # --- the state ----------------------------------------------------------------------------------------

    def snapshot(self) -> StateSnapshot:
        """Copy this rank's part to host memory. Training may continue at once."""
        assert not self._begun, "the announced next step comes first"
        return super().snapshot()

    # --- steps --------------------------------------------------------------------------------------------

    def prefetcher(self) -> None:
        """Return None: each stage needs columns of its own."""

    def train_step(self, feed: Feed) -> StepReport:
        """Run this rank's part of one global step, and in a streamed pipeline the first forwards of the next step.

        These forwards change only buffers. All ranks drop them where the next step may not follow: a rank requested to
        stop, or the step was not applied, so that its buffers are restored.
        """
        try:
            report = super().train_step(feed)
        except NonFiniteLoss:
            self._recall()
            raise
        if report.stop_requested or report.overflowed or not report.weight:
            self._recall()
        return report

    # --- inside -------------------------------------------------------------------------------------------

    @property
    def _batch_group(self) -> None:
        """None: only the last stage has outputs to gather, and all ranks would have to make the group."""
        return None

    @property
    def _begun(self) -> bool:
        """Whether forwards of the next step have run."""
        return isinstance(self._runner, StageRunner) and self._runner.pipe.begun is not None

    def _recall(self) -> None:
        """Drop the forwards of the next step."""
        if self._begun:
            assert isinstance(self._runner, StageRunner), "it has begun"
            self._guarded(self._runner.pipe.recall)
            self.replica.recall()

    def _release(self) -> None:
        links, self._links = self._links, None
        if links is not None:
            links.close()
        if self._replica is not None:
            self._replica.recall()
        super()._release()

    def _drop_model(self) -> None:
        self._shards = self._cut = None
        self._modules_hold_group = False
        super()._drop_model()

    def _join_mesh(self, plan: Plan) -> None:
        super()._join_mesh(plan)
        assert self._group is not None, "form() comes first"
        if self._links is not None:  # of a build that was interrupted
            self._links.close()
        if self._part != WHOLE_MODEL:
            meant = replace(plan, mesh=self._placed.mesh)
            self._links = StageLinks(meant, self._group, self._device)
            self._links.connect()
            self._layout = f"{self._part.layout}-{layout_hash(plan)}"

    def _problems(self, spec: ModelSpec, plan: Plan) -> list[str]:
        return stage_problems(spec, plan)

    def _shard_model(self, spec: ModelSpec, plan: Plan, model: nn.Module) -> Mapping[str, ShardSlice]:
        part = self._part
        layers = choose_layers(spec, plan, model, part.tensors, self._where)
        self._cut, slices = split_stage(
            model, part.stage, spec, plan, layers, self._tensor_group, device=self._device, where=self._where
        )
        if self._placed.shards is not None:
            self._shards = StageShards(model, self._placed.device_mesh(self._device), self._where, plan.wire)
            self._modules_hold_group = True
        return slices

    def _warmed(self, feed: Feed) -> StepRunner:
        if self._part == WHOLE_MODEL:
            return super()._warmed(feed)
        self._check_start()
        # FSDP2 gives the mean over ranks.
        world = 1 if self._shards is None else self._placed.mesh.data_ranks
        runner = StageRunner.of(self._executor(world), self._placed, self._shards)
        runner.rehearse(feed, check=self._wants_check(feed))
        self._add_logged_names(runner.objective)  # only the last stage has called it
        return runner

    def _executor(self, world: int) -> StageExecutor:
        """Return what runs this rank's stage; gradients are averaged over `world` ranks."""
        assert self._job is not None and self._cut is not None, "build() comes first"
        assert self._links is not None, "form() and build() come first"
        objective = Objective(self.replica.model, self._caller(), world=world)
        return StageExecutor(self._job[1], self._cut, self._links, objective, self.replica)

    @contextmanager
    def _evaluating(self, feed: Feed) -> Iterator[evaluation.OutputsOf | None]:
        """Run micro-batches through all stages, without gradients; no training step is needed before.

        Gives a function that returns a micro-batch's outputs on the stage that ends the model. All stages call it.
        """
        if self._part == WHOLE_MODEL:
            yield None
            return
        assert not self._begun, "the announced next step comes first"
        executor = self._runner.pipe if isinstance(self._runner, StageRunner) else self._executor(world=1)

        def outputs(batch: Batch) -> Any:
            return executor.outputs(MicroBatchShare(batch=batch, data_rank=feed.data_ranks[0], rows=feed.rows))

        if self._shards is None:
            yield outputs
            return
        with self._shards.gathered():
            yield outputs
        self._shards.reshard()
