"""The engine of pipelines: stages of a model on one rank each, replicas of them, over gloo or NCCL.

Orders of work are `strategies.orders`'. What torch's own pipelining has no room for is why stages are run here: values
between stages that are no tensors or get no gradient, micro-batches of unequal rows, weighted losses, and memory for
the micro-batches under way alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, distributed, nn
from torch.distributed import Work

from trainwright.core.data import Columns, Feed, Sums
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.group import Group, Move, StateTag
from trainwright.core.plan import Plan
from trainwright.core.sections import misplaced, place_of, section_of
from trainwright.strategies.torch import evaluation, state
from trainwright.strategies.torch.batches import copied
from trainwright.strategies.torch.compiling import compile_blocks
from trainwright.strategies.torch.cutting import Cut, as_it_is
from trainwright.strategies.torch.group import compared, same_start
from trainwright.strategies.torch.links import Links
from trainwright.strategies.torch.member import Member
from trainwright.strategies.torch.noise import Probe
from trainwright.strategies.torch.objective import Caller, Objective, Share
from trainwright.strategies.torch.parts import WHOLE, Box, Part
from trainwright.strategies.torch.pipe import Pipe
from trainwright.strategies.torch.replica import AUTOCAST, Replica
from trainwright.strategies.torch.step import Runner, Totals, shares

PIECE_BYTES = 25 * 2**20  # of gradients in one all-reduce, as in DDP


@dataclass(frozen=True, kw_only=True)
class PipelineRunner(Runner):
    """Runs micro-batches through all stages.

    Attributes:
        pipe: this rank's stage.
        shared: parameters that other stages use too, with the ranks of this pipeline that do, and whether this one is
            the first of them.
        replicas: pipelines.
        telling: what travels in this step, on its way.
    """

    pipe: Pipe
    shared: tuple[tuple[nn.Parameter, distributed.ProcessGroup, bool], ...]
    replicas: int
    telling: list[tuple[Tensor, Work | None]] = field(default_factory=list)
    tells_own: bool = False

    def accumulate(self, replica: Replica, feed: Feed, *, sampled: bool) -> None:
        """Forward and backward of every micro-batch, in the order of the schedule."""
        self.run(shares(feed), feed)

    def run(self, given: Sequence[tuple[int, Share]], feed: Feed) -> None:
        """The same of micro-batches."""
        self.objective.begin()
        self.telling.clear()
        self.pipe.step(given, feed.step, partial(self._tell, feed))

    def _tell(self, feed: Feed) -> None:
        """Begin to add up what travels: it does not wait for the last backwards, nor do stages for each other's."""
        if not self.pipe.last:
            self.objective.tell_wish(feed.wish)
        carried = self.objective.carry.grad
        assert carried is not None, "all losses have been told"
        sums = carried.double()
        self.telling.append((sums, distributed.all_reduce(sums, async_op=True)))

    def settle(self, replica: Replica, *, wants_norm: bool) -> tuple[list[Tensor], Totals]:
        """This stage's gradients, summed over replicas, and the sums over all ranks."""
        if self.pipe.links.replicas is not None:
            _sum_over(replica.trainable, self.pipe.links.replicas)
        for parameter, group, _ in self.shared:  # after the replicas, so that all copies come to the same bits
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce(parameter.grad, group=group)
        gradients = [parameter.grad for parameter in replica.trainable if parameter.grad is not None]
        norm = self._norm(replica) if wants_norm else None
        ((sums, work),) = self.telling
        assert work is not None, "this rank is in the group"
        work.wait()
        weight, loss, wish, *told = sums.tolist()
        replica.laps.wait()
        return gradients, Totals(weight=weight, loss=loss, wish=wish > 0.5, told=tuple(told), norm=norm)

    def _norm(self, replica: Replica) -> float:
        """Of the whole model's gradient."""
        others = {parameter for parameter, _, first in self.shared if not first}
        own = [each.grad for each in replica.trainable if each.grad is not None and each not in others]
        real = [torch.view_as_real(each) if each.is_complex() else each for each in own]
        squares = [torch.linalg.vector_norm(each, dtype=torch.float64) ** 2 for each in real]
        square = torch.stack(squares).sum() if squares else self.objective.carry.new_zeros((), dtype=torch.float64)
        distributed.all_reduce(square)
        return math.sqrt(float(square) / self.replicas)


class Pipeline(Member):
    """A stage of the model on each worker, `mesh.data` times."""

    def __init__(self) -> None:
        super().__init__()
        self._part = WHOLE
        self._job: tuple[ModelSpec, Plan] | None = None
        self._cut: Cut | None = None
        self._links: Links | None = None
        self._checksum = 0

    # --- the group and the state --------------------------------------------------------------------------

    def form(self, group: Group) -> StateTag:
        """Join the process group; what is held of another stage than this rank's in it is dropped.

        Raises:
            PeerLost: it does not form by the group's deadline.
            JobError: the plan's stages do not divide the group.
        """
        super().form(group)
        self._links = None
        if self._job is not None and self._place(self._job[1]) != self._part:
            self._replica = self._guarded(partial(self._made, *self._job))
        return self._tag()

    def leave(self) -> None:
        """Drop what holds the process group, end it and close its sockets; the state stays."""
        self._links = None
        super().leave()

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """Make the model as one device would, and keep this rank's stage of it.

        Raises:
            JobError: the model cannot be trained or cut, or not over this group.
            UserCodeError: the user's code raised.
        """
        self._job = (spec, plan)
        return super().build(spec, plan)

    def transfer(self, moves: Sequence[Move]) -> StateTag:
        """Make this rank equal to the one that its stage comes from, bit by bit. Raises PeerLost."""
        source = {move.piece: move.source for move in moves}.get(self._part.name)
        if self._part != WHOLE and moves:
            self._linked()
        if source is not None:
            group = self._linked().replicas
            self._guarded(lambda: state.broadcast(self._built, source, self._rank, self._device, group))
        return super().transfer(moves)

    # --- steps --------------------------------------------------------------------------------------------

    def evaluate_step(self, feed: Feed) -> Sums:
        """Local sums of `loss` and the metrics, on the stage with the loss; nothing on the others, which call it."""
        if self._part == WHOLE:
            return super().evaluate_step(feed)
        through = self._through(feed)
        return self._guarded(lambda: evaluation.evaluate(self._built.model, self._caller(), feed, through))

    def predict_step(self, feed: Feed) -> Columns:
        """The model's outputs for the feed's rows, on the stage with the loss; nothing on the others, which call it."""
        if self._part == WHOLE:
            return super().predict_step(feed)
        through = self._through(feed)
        return self._guarded(lambda: evaluation.predict(self._built.model, self._caller(), feed, through))

    # --- inside -------------------------------------------------------------------------------------------

    def _tag(self) -> StateTag:
        plain = super()._tag()
        if self._part == WHOLE or self._job is None:
            return plain
        plan = self._job[1]
        order = [section for stage in range(self._part.stages) for section in _sections(plan, stage)]
        cuts = hashlib.sha256("\n".join((*plan.cuts, str(order))).encode()).hexdigest()[:8]
        names, layout = frozenset({self._part.name}), f"{self._part.layout}-{cuts}"
        return StateTag(step=plain.step, layout=layout, pieces=names, whole=self._part.whole, sound=plain.sound)

    def _place(self, plan: Plan) -> Part:
        """This rank's stage; alone it rehearses with the whole model."""
        assert self._group is not None, "form() comes first"
        stages, size = plan.mesh.pipeline, self._group.size
        if size == 1:
            return WHOLE
        if size % stages:
            raise JobError(
                [f"{size} ranks cannot hold a model in {stages} stages: use a multiple of {stages} workers"],
                where=self._where,
            )
        return Part(stage=self._group.rank // (size // stages), stages=stages)

    def _made(self, spec: ModelSpec, plan: Plan) -> Replica:
        self._part = self._place(plan)
        self._cut = None
        if self._part == WHOLE:
            return super()._made(spec, plan)
        problems = [*_problems(spec, plan)]
        if problems:
            raise JobError(problems, where=self._where)
        return Replica(spec, plan, self._device, self._where, part=self._part, place=partial(self._stage, spec, plan))

    def _stage(self, spec: ModelSpec, plan: Plan, model: nn.Module) -> dict[str, Box]:
        """Keep this rank's stage of a whole model, and bring it to the device."""
        assert spec.sample is not None, "a job brings a sample"
        self._checksum = state.checksum(model)
        part = self._part
        caller = Caller(spec=spec, device=torch.device("cpu"), autocast=AUTOCAST.get(plan.precision), where=self._where)
        columns = caller.inputs(spec.sample())
        own, compiled = _sections(plan, part.stage), spec.compile == "inductor"
        prepare = partial(compile_blocks, device=self._device, cuts=plan.cuts) if compiled else as_it_is
        given = [columns[name] for name in spec.inputs]
        self._cut = Cut(model, plan.cuts, own, given, caller.precisely, self._where, prepare)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise JobError(
                [f"stage {part.stage} has no parameter to train: cut the model elsewhere, or into fewer stages"],
                where=self._where,
            )
        model.to(self._device)
        return {}

    def _warmed(self, feed: Feed) -> Runner:
        """A runner that has run once on all ranks."""
        if self._part == WHOLE:
            return super()._warmed(feed)
        assert self._group is not None and self._job is not None and self._cut is not None, "build() comes first"
        replica, plan = self._built, self._job[1]
        answers = compared([0 if replica.step else self._checksum], self._device)
        same_start([checksum for (checksum,) in answers], self._where)
        objective = Objective(replica.model, self._caller(), world=1)
        pipe = self._pipe(objective)
        runner = PipelineRunner(
            objective=objective,
            reduced=objective,
            probe=Probe(objective, ()),  # no rank sees the gradient of a whole micro-batch
            pipe=pipe,
            shared=self._shared(),
            replicas=self._group.size // plan.mesh.pipeline,
        )
        self._rehearse(runner, feed)
        return runner

    def _rehearse(self, runner: PipelineRunner, feed: Feed) -> None:
        """A step of weight 0 of which nothing is kept."""
        given = [(micro, replace(share, batch=copied(share.batch))) for micro, share in shares(feed, muted=True)]
        devices = [self._device] if self._device.type == "cuda" else []
        with self._built.attempt(), torch.random.fork_rng(devices=devices):
            if runner.objective.caller.autocast:
                runner.pipe.rehearse(given[0][1])
            runner.run(given, feed)
        runner.objective.begin()

    def _pipe(self, objective: Objective) -> Pipe:
        assert self._job is not None and self._cut is not None, "build() comes first"
        plan = self._job[1]
        return Pipe(
            cut=self._cut,
            links=self._linked(),
            stage=self._part.stage,
            stages=self._part.stages,
            chunks=plan.chunks,
            schedule=plan.schedule,
            objective=objective,
            replica=self._built,
        )

    def _linked(self) -> Links:
        """This rank's links in the group; every rank asks for them at the same moment of a formation."""
        assert self._group is not None and self._job is not None, "build() comes first"
        if self._links is None:
            plan = self._job[1].resized(self._group.size)
            self._links = Links.of(plan, self._group.rank, self._device, self._group.deadline_s)
        return self._links

    def _shared(self) -> tuple[tuple[nn.Parameter, distributed.ProcessGroup, bool], ...]:
        """This stage's parameters that others have too. Every rank makes every group."""
        assert self._cut is not None and self._group is not None, "form() and build() come first"
        names = {name: parameter for parameter, name in self._built.names.items()}
        columns = self._linked().columns
        found = []
        for name, sections in sorted(self._cut.shared.items()):
            stages = sorted({self._holder(section) for section in sections})
            groups = [self._linked().group([column[stage] for stage in stages]) for column in columns]
            if len(stages) > 1 and name in names:
                group = groups[self._group.rank % len(columns)]
                found.append((names[name], group, self._part.stage == stages[0]))
        return tuple(found)

    def _holder(self, section: int) -> int:
        """The stage that holds a section."""
        assert self._job is not None, "build() comes first"
        return place_of(self._job[1].schedule, section=section, stages=self._part.stages)[0]

    def _through(self, feed: Feed) -> evaluation.Through:
        """Gives a micro-batch's outputs on the stage that ends the model."""
        if not isinstance(self._runner, PipelineRunner):
            self.warm(feed)
        assert isinstance(self._runner, PipelineRunner), "it is warm"
        pipe = self._runner.pipe
        return lambda batch: pipe.outputs(Share(batch=batch, data_rank=feed.data_ranks[0], rows=feed.rows))


def _sum_over(parameters: Sequence[nn.Parameter], group: distributed.ProcessGroup) -> None:
    """Add the gradients of all ranks of a group, in a few pieces; one that no rank has stays none."""
    given = [parameter.grad is not None for parameter in parameters]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    used = torch.tensor(given, dtype=torch.float32, device=parameters[0].device)
    pieces = _pieces([parameter.grad for parameter in parameters if parameter.grad is not None])
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


def _pieces(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Runs of gradients of one type and not much more than PIECE_BYTES."""
    pieces: list[list[Tensor]] = []
    size = 0
    for gradient in gradients:
        if not pieces or size >= PIECE_BYTES or pieces[-1][0].dtype != gradient.dtype:
            pieces.append([])
            size = 0
        pieces[-1].append(gradient)
        size += gradient.nbytes
    return pieces


def _sections(plan: Plan, stage: int) -> list[int]:
    """The sections that a stage holds, by chunk."""
    stages = plan.mesh.pipeline
    return [section_of(plan.schedule, stage=stage, stages=stages, chunk=chunk) for chunk in range(plan.chunks)]


def _problems(spec: ModelSpec, plan: Plan) -> Iterator[str]:
    """What of a job a pipeline cannot do."""
    if spec.step is not None or not spec.inputs:
        yield "a pipeline runs the model stage by stage, so that step= cannot: give the job inputs=, targets= and loss="
    if misplaced(plan.schedule, plan.chunks):
        yield misplaced(plan.schedule, plan.chunks)
    if len(plan.cuts) + 1 != plan.sections:
        found = f"{len(plan.cuts)} cuts for {plan.sections} sections"
        yield f"the plan has {found}: it needs one less than there are sections"
    yield from spec.collation.static_problems()
