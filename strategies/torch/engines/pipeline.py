"""The engine of pipelines: stages of a model on one rank each, replicas of them, over gloo or NCCL.

Orders of work are `strategies.orders`'. What torch's own pipelining has no room for is why stages are run here: values
between stages that are no tensors or get no gradient, micro-batches of unequal rows, weighted losses, and memory for
the micro-batches under way alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, distributed, nn

from trainwright.core import random_state
from trainwright.core.data import Columns, Feed, MetricSums, StepReport
from trainwright.core.engine import ModelSpec, StateSnapshot
from trainwright.core.errors import JobError, NonFiniteLoss
from trainwright.core.plan import Plan, chunk_problem, section_of, stage_of_section
from trainwright.strategies.cost_model.plan_constraints import invalid_combination, too_few_micro_batches
from trainwright.strategies.torch.checkpoint.shard_layout import WHOLE_MODEL, ShardSlice, to_local
from trainwright.strategies.torch.distributed.fsdp_wrap import StageShards
from trainwright.strategies.torch.engines.sharded_model_engine import ShardedModelEngine
from trainwright.strategies.torch.engines.tensor_parallel import MeshRunner
from trainwright.strategies.torch.pipeline.p2p import StageLinks
from trainwright.strategies.torch.pipeline.split import SplitModel
from trainwright.strategies.torch.pipeline.stage_executor import StageExecutor
from trainwright.strategies.torch.tensor_parallel.layers import TensorParallelPlan
from trainwright.strategies.torch.training import evaluation
from trainwright.strategies.torch.training.batch_losses import GroupFactory
from trainwright.strategies.torch.training.batch_tensors import copy_batch
from trainwright.strategies.torch.training.model_blocks import compile_blocks
from trainwright.strategies.torch.training.objective import MicroBatchShare, Objective
from trainwright.strategies.torch.training.train_state import TorchReplica
from trainwright.strategies.torch.training.train_step import GradientNoiseProbe, StepRunner, micro_batches_of


@dataclass(frozen=True, kw_only=True)
class PipelineRunner(MeshRunner):
    """Runs micro-batches through all stages.

    Attributes:
        pipe: this rank's stage.
        shared: parameters that other stages use too, with the ranks of this pipeline that do, and whether this one is
            the first of them.
        shards: of the stage's parameters, where ranks divide them.
    """

    pipe: StageExecutor
    shared: tuple[tuple[nn.Parameter, distributed.ProcessGroup, bool], ...]
    shards: StageShards | None = None

    def accumulate(self, replica: TorchReplica, feed: Feed, *, sampled: bool) -> None:
        """Forward and backward of every micro-batch, in the order of the schedule."""
        following = feed.following if replica.versions is not None else None
        assert following is None or following.step == feed.step + 1, "steps follow each other"
        self.run(micro_batches_of(feed), feed, micro_batches_of(following) if following else ())

    def run(
        self,
        given: Sequence[tuple[int, MicroBatchShare]],
        feed: Feed,
        following: Sequence[tuple[int, MicroBatchShare]] = (),
    ) -> None:
        """The same of micro-batches, with those of the next step."""
        self.objective.begin()
        self.telling.clear()
        with nullcontext() if self.shards is None else self.shards.gathered():
            self.pipe.step(given, feed.step, partial(self._tell, feed), following)

    def _tell(self, feed: Feed) -> None:
        """Begin to add up what travels: it does not wait for the last backwards, nor do stages for each other's."""
        if not self.pipe.last:
            self.objective.tell_wish(feed.wish)
        self.tell()

    def reduce(self, replica: TorchReplica) -> None:
        """Make each gradient that of the global batch."""
        if self.shards is None:
            super().reduce(replica)
        else:
            self.shards.reduce(replica, self.place)
        for parameter, group, _ in self.shared:  # after the replicas, so that all copies come to the same bits
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce(to_local(parameter.grad), group=group)

    def twice(self) -> frozenset[Tensor]:
        """Parameters that count in the norm on another stage."""
        return frozenset(parameter for parameter, _, first in self.shared if not first)


class Pipeline(ShardedModelEngine):
    """A stage of the model on each worker, or a part of one, `mesh.data` times."""

    def __init__(self) -> None:
        super().__init__()
        self._cut: SplitModel | None = None
        self._links: StageLinks | None = None
        self._shards: StageShards | None = None

    def leave(self) -> None:
        """Drop what holds the process group, end it and close its sockets; the state stays."""
        links = self._links
        super().leave()
        del links  # only now, with what an error left on its way

    # --- the state ----------------------------------------------------------------------------------------

    def snapshot(self) -> StateSnapshot:
        """Copy this rank's part to host memory. Training may go on at once."""
        assert not self._begun, "the step that was told to follow comes first"
        return super().snapshot()

    # --- steps --------------------------------------------------------------------------------------------

    def train_step(self, feed: Feed) -> StepReport:
        """One step of this rank, its part of one global step; where the plan's steps follow each other, with the first
        forwards of the next.

        These change nothing but buffers. Where the next step may not be what follows, all ranks drop them: a wish to
        stop was told, or the step was not applied, so that its buffers are taken back.

        Raises:
            NonFiniteLoss, PeerLost, UserCodeError, JobError: as of all engines.
        """
        try:
            report = super().train_step(feed)
        except NonFiniteLoss:
            self._recall()
            raise
        if report.wish or report.overflowed or not report.weight:
            self._recall()
        return report

    def evaluate_step(self, feed: Feed) -> MetricSums:
        """Local sums of `loss` and the metrics, on the stage with the loss; nothing on the others, which call it."""
        if self._part == WHOLE_MODEL:
            return super().evaluate_step(feed)
        with self._gathering():
            through = self._through(feed)
            sums = self._guarded(lambda: evaluation.evaluate(self.replica.model, self._caller(), feed, through))
        return MetricSums() if self._part.tensor else sums

    def predict_step(self, feed: Feed) -> Columns:
        """The model's outputs for the feed's rows, on the stage with the loss; nothing on the others, which call it."""
        if self._part == WHOLE_MODEL:
            return super().predict_step(feed)
        with self._gathering():
            through = self._through(feed)
            outputs = self._guarded(lambda: evaluation.predict(self.replica.model, self._caller(), feed, through))
        return {} if self._part.tensor else outputs

    # --- inside -------------------------------------------------------------------------------------------

    @property
    def _batch_group(self) -> GroupFactory | None:
        """Only the last stage has outputs to gather, and making a group takes all ranks."""
        return None

    @property
    def _begun(self) -> bool:
        """Whether something of the next step is done."""
        return isinstance(self._runner, PipelineRunner) and self._runner.pipe.begun

    def _recall(self) -> None:
        """Drop what was done of the next step."""
        if self._begun:
            assert isinstance(self._runner, PipelineRunner), "it has begun"
            self._guarded(self._runner.pipe.recall)
            self.replica.recall()

    @property
    def _bound(self) -> bool:
        return self._shards is not None

    @property
    def _layout(self) -> str:
        assert self._job is not None, "build() comes first"
        plan = self._job[1]
        order = [section for stage in range(self._part.stages) for section in _sections(plan, stage)]
        cuts = hashlib.sha256("\n".join((*plan.cuts, str(order))).encode()).hexdigest()[:8]
        return f"{self._part.layout}-{cuts}"

    def _release(self) -> None:
        self._links = None
        if self._replica is not None:
            self._replica.recall()
        super()._release()

    def _let_go(self) -> None:
        self._shards = self._cut = None
        super()._let_go()

    def _settle(self, plan: Plan) -> None:
        super()._settle(plan)
        if self._part != WHOLE_MODEL:
            meant, deadline_s = replace(plan, mesh=self._placed.mesh), self._placed.deadline.total_seconds()
            self._links = StageLinks.of(meant, self._rank, self._device, deadline_s)

    def _problems(self, spec: ModelSpec, plan: Plan) -> list[str]:
        """What of a job a pipeline cannot do."""
        found = []
        if spec.step is not None or not spec.inputs:
            found.append(
                "a pipeline runs the model stage by stage, so that step= cannot: give the job inputs=, targets= and "
                "loss="
            )
        if chunk_problem(plan.schedule, plan.chunks):
            found.append(chunk_problem(plan.schedule, plan.chunks))
        if len(plan.cuts) + 1 != plan.sections:
            counts = f"{len(plan.cuts)} cuts for {plan.sections} sections"
            found.append(f"the plan has {counts}: it needs one less than there are sections")
        if plan.streamed and plan.accumulation < plan.mesh.pipeline:
            found.append(": ".join(too_few_micro_batches(plan, plan.accumulation)))
        refused = invalid_combination(plan)
        return [*found, *([": ".join(refused)] if refused else []), *spec.collation.static_problems()]

    def _kept(self, spec: ModelSpec, plan: Plan, model: nn.Module) -> Mapping[str, ShardSlice]:
        """Keep this rank's stage of a whole model, or its part of it, and bring that to the device."""
        assert spec.sample is not None, "a job brings a sample"
        part, caller, split = self._part, self._caller_for(spec, plan), self._split(spec, plan, model)
        columns = caller.inputs(spec.sample())
        given = [columns[name] for name in spec.inputs]
        boxes: dict[str, ShardSlice] = {}
        prepare = partial(self._prepared, boxes, split, plan.cuts if spec.compile == "inductor" else None)
        own = _sections(plan, part.stage)
        self._cut = SplitModel(model, plan.cuts, own, given, caller.precisely, self._where, prepare)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise JobError(
                [f"stage {part.stage} has no parameter to train: cut the model elsewhere, or into fewer stages"],
                where=self._where,
            )
        model.to(self._device)
        if self._placed.shards is not None:
            self._shards = StageShards(model, self._placed.device_mesh(self._device), self._where)
        return boxes

    def _prepared(
        self,
        boxes: dict[str, ShardSlice],
        split: TensorParallelPlan,
        compiled: Sequence[str] | None,
        model: nn.Module,
        users: Mapping[str, frozenset[int]],
    ) -> None:
        """Divide the layers of a stage, or compile its blocks between these cuts.

        Raises:
            JobError: a cut lies between two layers that only work together.
        """
        if compiled is not None:
            compile_blocks(model, device=self._device, cuts=compiled)
        for group in split.groups:
            used = {name: users.get(f"{name}.weight", frozenset()) for name in group}
            if len(frozenset().union(*used.values())) > 1:
                raise JobError(
                    [
                        f"modules {', '.join(map(repr, group))} are divided together by tensor parallelism, and a cut "
                        "lies between them: cut the model before the first or after the last of them"
                    ],
                    where=self._where,
                )
        boxes |= self._divide(model, split)

    def _warmed(self, feed: Feed) -> StepRunner:
        """A runner that has run once on all ranks."""
        if self._part == WHOLE_MODEL:
            return super()._warmed(feed)
        assert self._group is not None and self._job is not None and self._cut is not None, "build() comes first"
        self._check_start()
        self.verify()
        # FSDP2 gives the mean over ranks.
        world = 1 if self._shards is None else self._placed.mesh.data_ranks
        objective = Objective(self.replica.model, self._caller(), world=world)
        pipe = self._pipe(objective)
        runner = PipelineRunner(
            objective=objective,
            reduced=objective,
            probe=GradientNoiseProbe(objective, ()),  # no rank sees the gradient of a whole micro-batch
            pipe=pipe,
            shared=self._shared(),
            place=self._placed,
            others=self._placed.others,
            shards=self._shards,
        )
        self._rehearse(runner, feed)
        return runner

    def _rehearse(self, runner: PipelineRunner, feed: Feed) -> None:
        """A step of weight 0 of which nothing is kept."""
        given = [
            (micro, replace(share, batch=copy_batch(share.batch)))
            for micro, share in micro_batches_of(feed, muted=True)
        ]
        with self.replica.attempt(), random_state.preserve_generators(self._device), runner.objective.checking():
            if runner.objective.caller.autocast:
                with self._gathering():
                    runner.pipe.rehearse(given[0][1])
            runner.run(given, feed)
        runner.objective.begin()

    def _pipe(self, objective: Objective) -> StageExecutor:
        assert self._job is not None and self._cut is not None, "build() comes first"
        plan = self._job[1]
        return StageExecutor(
            cut=self._cut,
            links=self._linked,
            stage=self._part.stage,
            stages=self._part.stages,
            chunks=plan.chunks,
            schedule=plan.schedule,
            objective=objective,
            replica=self.replica,
        )

    @property
    def _linked(self) -> StageLinks:
        assert self._links is not None, "form() and build() come first"
        return self._links

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Within, the stage's parameters are whole."""
        if self._shards is None:
            yield
            return
        with self._shards.gathered():
            yield
        self._shards.reshard()

    def _shared(self) -> tuple[tuple[nn.Parameter, distributed.ProcessGroup, bool], ...]:
        """This stage's parameters that others have too. Every rank makes every group."""
        assert self._cut is not None and self._group is not None, "form() and build() come first"
        names = {name: parameter for parameter, name in self.replica.names.items()}
        columns = self._linked.columns
        found = []
        for name, sections in sorted(self._cut.shared.items()):
            stages = sorted({self._holder(section) for section in sections})
            groups = [self._linked.group([column[stage] for stage in stages]) for column in columns]
            if len(stages) > 1 and name in names:
                group = groups[self._group.rank % len(columns)]
                found.append((names[name], group, self._part.stage == stages[0]))
        return tuple(found)

    def _holder(self, section: int) -> int:
        """The stage that holds a section."""
        assert self._job is not None, "build() comes first"
        return stage_of_section(self._job[1].schedule, section=section, stages=self._part.stages)[0]

    def _through(self, feed: Feed) -> evaluation.OutputsOf:
        """Gives a micro-batch's outputs on the stage that ends the model; no step need ever have been taken."""
        assert not self._begun, "the step that was told to follow comes first"
        if isinstance(self._runner, PipelineRunner):
            pipe = self._runner.pipe
        else:
            pipe = self._pipe(Objective(self.replica.model, self._caller(), world=1))
        return lambda batch: pipe.outputs(MicroBatchShare(batch=batch, data_rank=feed.data_ranks[0], rows=feed.rows))


def _sections(plan: Plan, stage: int) -> list[int]:
    """The sections that a stage holds, by chunk."""
    stages = plan.mesh.pipeline
    return [section_of(plan.schedule, stage=stage, stages=stages, chunk=chunk) for chunk in range(plan.chunks)]
