"""Which way the teachers are asked: the quickest for the whole run, and why.

Offline the teachers' forward passes are paid once, before the first step, and not at all where what they say is kept
already; inline and online they are paid in each epoch, in the step or beside it. What a way takes is measured by a
short run where the whole one is long enough for that, and otherwise estimated from operations. A run that goes on
keeps its way.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Self

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core import formatting
from trainwright.core.cluster import Cluster
from trainwright.core.errors import JobError, PlanError, TrainwrightError
from trainwright.core.job import Job
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Mesh, Plan
from trainwright.datasets.data_source import Index
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.sample_order import steps_per_epoch
from trainwright.distillation.delivery_benchmark import DeliveryTiming, delivery_trials
from trainwright.distillation.distillation_job import (
    build_loss,
    check_compatibility,
    student_builder,
    teachers_with_layers,
    with_teacher_actors,
)
from trainwright.distillation.distillation_spec import DELIVERIES, Delivery, Distillation, Teacher, TeacherRunner
from trainwright.distillation.target_cache import target_request, target_row_bytes
from trainwright.distillation.target_encoding import TargetEncoding
from trainwright.inference.inference_plan import single_replica, trained_plan
from trainwright.planning.decision import Decision, plan_html, plan_table
from trainwright.planning.planner import apply_plan_file, choose
from trainwright.planning.profiler import profile_job
from trainwright.runtime.ray_data_delivery import reserve_for_transforms
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog
from trainwright.strategies.cost_model.estimator import estimate
from trainwright.strategies.search.plan_ranking import USABLE, estimate_of

_SHARE = 0.05  # of the run's predicted time, that trying the ways may take
_TRIAL_S = 20.0  # to try one: assumed
_TIE = 1.05  # times the quickest
_KEPT = "targets/_ways/{}.json"  # beside the run, whose own folder begins with its log


@dataclass(frozen=True, kw_only=True, repr=False)
class DeliveryComparison:
    """What each way would take. Prints as a table, shows as HTML in a notebook.

    Attributes:
        costs: the chosen way's, then the others', those that cannot be last.
        batch_size: of a step.
        steps: of the run.
        tried_rows: on which ways were tried; 0 where all is estimated.
    """

    costs: tuple[DeliveryCost, ...]
    batch_size: int
    steps: int
    tried_rows: int = 0

    @property
    def chosen(self) -> Delivery:
        """The quickest way for the whole run."""
        return self.costs[0].way

    @property
    def decision(self) -> Decision:
        """The students' plan that way."""
        decision = self.costs[0].decision
        assert decision is not None, "a way that can be has a plan"
        return decision

    @property
    def source(self) -> str:
        """Where the figures come from."""
        return (
            f"measured on {formatting.count(self.tried_rows, 'row')}"
            if self.tried_rows
            else "estimated from operations"
        )

    @property
    def line(self) -> str:
        """The choice and why, in a line."""
        own, *others = (self._said(cost) for cost in self.costs)
        return f"teachers are asked {own}; {'; '.join(others)} ({self.source})"

    def _said(self, cost: DeliveryCost) -> str:
        if cost.refused:
            return f"{cost.way} cannot be: {cost.refused}"
        rate, total_s = formatting.throughput(self.batch_size / cost.step_s), cost.total_s(self.steps)
        return f"{cost.way}: {formatting.duration(total_s)} in all, {rate} after {formatting.duration(cost.setup_s)}"

    def __repr__(self) -> str:
        return _table_text(self)

    def _repr_html_(self) -> str:
        return _table_html(self)


def choose_delivery(distillation: Distillation, *, fresh: bool = False, verbose: bool = False) -> Distillation:
    """The distillation with a way: its own, that of the run which goes on, or the quickest, of which a line is said.

    Raises:
        JobError: no way can be; says why none.
        TrainwrightError: as `compare_deliveries`.
    """
    if distillation.way != "auto":
        return distillation
    if not distillation.teachers:
        return distillation.replace(way="inline")  # nobody is asked
    job = distillation.student
    past = open_store(job.storage).find(_KEPT.format(job.name)) if _begun(job, fresh) else None
    if past is not None:
        return distillation.replace(way=json.loads(past)["way"])
    found = compare_deliveries(distillation, verbose=verbose)
    _say(found.line)
    return distillation.replace(way=found.chosen)


def record_delivery(asked: Distillation, chosen: Distillation, *, resume: bool = False, fresh: bool = False) -> None:
    """Keep a way that was chosen, or that a run goes on with from now on, for those who go on with it."""
    job = chosen.student
    if chosen.teachers and (resume or (asked.way == "auto" and not _begun(job, fresh))):
        open_store(job.storage).put(_KEPT.format(job.name), json.dumps({"way": chosen.way}).encode())


def _begun(job: Job, fresh: bool) -> bool:
    return not fresh and RunLog(open_store(job.storage), job.name).head() is not None


def compare_deliveries(
    distillation: Distillation, cluster: Cluster | str | None = None, *, always: bool = False, verbose: bool = False
) -> DeliveryComparison:
    """What each way would take on the connected cluster.

    Args:
        cluster: refused: what is measured is not known of one that is not there.
        always: measure, however short the run is.
        verbose: show Ray's own output.

    Raises:
        JobError: no way can be; says why none.
        PlanError: a cluster was given, or teachers are to be trained first.
        TrainwrightError: the teachers, the data, the storage or the cluster is not right.
    """
    from trainwright.ray_cluster.discovery import connect, discover

    if cluster is not None:
        remedy = "leave cluster= out, or plan the student's job by itself"
        raise PlanError("the ways of a distillation are tried where it runs", where="cluster", remedy=remedy)
    if not distillation.teachers:
        raise JobError(["teachers= is empty: there is nobody to ask, whichever way"])
    _check_trained(distillation.teachers)
    connect(verbose)
    case, job = DeliveryEstimator.of(distillation, discover()), distillation.student
    steps = job.epochs * steps_per_epoch(case.index.rows, job.batch_size, job.drop_last, job.epoch_samples)
    found = DeliveryComparison(
        costs=rank_deliveries([case.cost(way) for way in DELIVERIES], steps), batch_size=job.batch_size, steps=steps
    )
    possible = [cost for cost in found.costs if not cost.refused]
    if len(possible) == 1 or not (always or _pays(case, possible, steps)):
        return found
    with delivery_trials(distillation, case.index, verbose=verbose) as trials:
        tried = [_tried(cost, case, trials.of) for cost in possible]
        refused = [cost for cost in found.costs if cost.refused]
        return replace(found, costs=rank_deliveries([*_explained(tried), *refused], steps), tried_rows=trials.rows)


def _check_trained(teachers: Sequence[Teacher]) -> None:
    """Raise PlanError for teachers that are to be trained first and have no checkpoint yet: nobody can ask them."""
    runs = {teacher.name: teacher.job for teacher in teachers if teacher.train and teacher.job is not None}
    heads = {name: RunLog(open_store(job.storage), job.name).head() for name, job in runs.items()}
    missing = [name for name, head in heads.items() if head is None or not head.checkpoints]
    if missing:
        raise PlanError(
            f"teachers are not trained yet: {', '.join(missing)}; ways are compared by what it takes to ask them",
            where=", ".join(f"run {runs[name].name!r}" for name in missing),
            remedy="tw.distill(...) trains them first, side by side, and tells then which way it asks them and why; "
            "tw.plan(teacher.job) plans the run of one",
        )


def rank_deliveries(costs: Sequence[DeliveryCost], steps: int) -> tuple[DeliveryCost, ...]:
    """The quickest first, of those about as quick the simplest. Raises JobError where none can be."""
    possible = sorted((cost for cost in costs if not cost.refused), key=lambda cost: cost.total_s(steps))
    refused = [cost for cost in costs if cost.refused]
    if not possible:
        raise JobError(f"{cost.way} cannot be: {cost.refused}" for cost in refused)
    limit_s = _TIE * possible[0].total_s(steps)
    first = min(
        (cost for cost in possible if cost.total_s(steps) <= limit_s), key=lambda cost: DELIVERIES.index(cost.way)
    )
    return (first, *(cost for cost in possible if cost is not first), *refused)


def _pays(case: DeliveryEstimator, possible: Sequence[DeliveryCost], steps: int) -> bool:
    """Whether trying the ways costs little beside the run, and could tell anything: what is kept is there at once."""
    if any(cost.way == "offline" and not case.missing for cost in possible):
        return False
    return len(possible) * _TRIAL_S <= _SHARE * min(cost.total_s(steps) for cost in possible)


def _tried(cost: DeliveryCost, case: DeliveryEstimator, trial: Callable[[Delivery], DeliveryTiming]) -> DeliveryCost:
    """The same as it is measured."""
    try:
        found = trial(cost.way)
    except TrainwrightError as error:
        return replace(cost, refused=f"a trial of it failed: {_reason_of(error)}")
    missing, note = case.missing or 0, cost.note
    setup_s = found.start_s
    if cost.way == "offline" and missing:
        setup_s += found.pool_s + missing * found.row_s
        note = f"{note}, at {formatting.throughput(1 / found.row_s)}" if found.row_s else note
    if cost.way == "online":
        note = f"steps wait for the teachers {formatting.percent(found.wait_s / found.step_s)} of their time"
    return replace(cost, step_s=found.step_s, setup_s=setup_s, note=note)


def _explained(costs: Sequence[DeliveryCost]) -> list[DeliveryCost]:
    """With what the teachers take of a step, where it was measured with and without them."""
    step_s = {cost.way: cost.step_s for cost in costs if not cost.refused}
    if not {"offline", "inline"} <= step_s.keys():
        return list(costs)
    part = max(0.0, 1 - step_s["offline"] / step_s["inline"])
    note = f"the teachers take {formatting.percent(part)} of a step"
    return [replace(cost, note=note) if cost.way == "inline" else cost for cost in costs]


def _say(line: str) -> None:
    """On stderr, where progress is shown."""
    from rich.console import Console

    Console(file=sys.stderr).print(line, markup=False, highlight=False, soft_wrap=True)


# --- What each way to ask the teachers would take, as people read it --------------------------------------------------


_HEADINGS = ("way", "samples/s", "first step after", "whole run", "memory", "kept", "why")
_NUMBERS = _HEADINGS[1:6]


def _table_rows(weighed: DeliveryComparison) -> list[tuple[str, ...]]:
    """A row for each way, under `_HEADINGS`."""
    return [_row(weighed, cost) for cost in weighed.costs]


def _row(weighed: DeliveryComparison, cost: DeliveryCost) -> tuple[str, ...]:
    if cost.refused:
        return (cost.way, "-", "-", "-", "-", "-", f"cannot be: {cost.refused}")
    rate = formatting.throughput(weighed.batch_size / cost.step_s).removesuffix(" samples/s")
    memory = max(estimate_of(cost.decision.chosen).stage_memory_bytes) if cost.decision else 0
    why = f"chosen; {cost.note}" if cost is weighed.costs[0] else cost.note
    return (
        cost.way, rate, formatting.duration(cost.setup_s), formatting.duration(cost.total_s(weighed.steps)),
        formatting.size(memory), formatting.size(cost.stored_bytes) if cost.stored_bytes else "-", why,
    )  # fmt: skip


def _table(weighed: DeliveryComparison) -> RenderableType:
    """The ways for the terminal, and the students' plan under the chosen one."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in _HEADINGS:
        justify = "right" if heading in _NUMBERS else "left"
        table.add_column(heading, header_style="dim", overflow="fold", justify=justify)  # type: ignore[arg-type]
    for row in _table_rows(weighed):
        table.add_row(*map(Text, row))
    head = Text.assemble(("Teachers  ", "bold"), (f"{weighed.chosen}, {weighed.source}", "bold green"))
    return Group(head, Padding(table, (1, 0, 1, 2)), plan_table(weighed.decision))


def _table_text(weighed: DeliveryComparison, *, width: int = 110) -> str:
    """The table as plain text without colours."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, force_jupyter=False)
    console.print(_table(weighed))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _table_html(weighed: DeliveryComparison) -> str:
    """The same as HTML that inherits the colours of the page around it."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in _HEADINGS)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in _table_rows(weighed)
    )
    said = escape(f"Teachers: {weighed.chosen}, {weighed.source}")
    ways = f"<div class='tw-plan'><p class='tw-head'>{said}</p><table><tr>{head}</tr>{body}</table></div>"
    return plan_html(weighed.decision) + ways


# --- What each way to ask the teachers would take, by estimate, and which of them cannot be ---------------------------


START_S = 8.0  # of the workers, to their first step: assumed
_POOL_S = 6.0  # of the processes that compute targets, to their first row: assumed
_LOOKED = 4  # rows


@dataclass(frozen=True, kw_only=True)
class DeliveryCost:
    """What a way takes, or why it cannot be.

    Attributes:
        way: which.
        decision: the students' plan; None where there is none.
        step_s: of a step.
        setup_s: until the first step.
        stored_bytes: of the targets that are kept.
        note: where the time goes.
        refused: why it cannot be; empty where it can.
    """

    way: Delivery
    decision: Decision | None = None
    step_s: float = math.nan
    setup_s: float = math.nan
    stored_bytes: float = 0.0
    note: str = ""
    refused: str = ""

    def total_s(self, steps: int) -> float:
        """Of a run of so many steps."""
        return self.setup_s + steps * self.step_s


@dataclass(frozen=True, kw_only=True)
class DeliveryEstimator:
    """A distillation on a cluster, looked at once.

    Attributes:
        job: the student's, with the model of all students.
        profile: of that model.
        guests: of the teachers' models.
        index: of the training set.
        missing: rows of which the teachers' outputs are not kept yet, over teachers and data sets; None where they
            cannot be kept, for the reason `unkept`.
    """

    distillation: Distillation
    teachers: tuple[Teacher, ...]
    lecturers: Mapping[str, TeacherRunner]
    job: Job
    profile: ModelProfile
    guests: tuple[ModelProfile, ...]
    index: Index
    cluster: Cluster
    missing: int | None
    unkept: str = ""

    @classmethod
    def of(cls, distillation: Distillation, cluster: Cluster) -> Self:
        """Look at models, data and what is kept. Raises TrainwrightError for what no way can do without."""
        teachers, job = teachers_with_layers(distillation), distillation.student
        lecturers = {teacher.name: teacher.load() for teacher in teachers}
        loss = build_loss(distillation.replace(way="offline"), teachers, lecturers)
        job, index = job.replace(model=student_builder(distillation, loss)), job.train.index()
        check_compatibility(distillation, loss, teachers, lecturers)
        guests = [profile_job(teacher.asked(job.train), job.train, index) for teacher in teachers]
        missing, unkept = _missing(distillation, teachers)
        return cls(
            distillation=distillation, teachers=teachers, lecturers=lecturers, job=job, index=index, cluster=cluster,
            profile=profile_job(job, job.train, index), guests=tuple(guests), missing=missing, unkept=unkept,
        )  # fmt: skip

    def cost(self, way: Delivery) -> DeliveryCost:
        """What a way takes, by estimate."""
        costs: dict[Delivery, Callable[[], DeliveryCost]] = {
            "offline": self._offline, "online": self._online, "inline": self._inline,
        }  # fmt: skip
        try:
            return costs[way]()
        except TrainwrightError as error:
            return DeliveryCost(way=way, refused=_reason_of(error))

    def _offline(self) -> DeliveryCost:
        job = self.job
        if self.missing is None:
            raise _cannot(self.unkept)
        for data in (job.train, job.evaluate):
            if data is not None:
                _check_settled(data, self.teachers)
        decision = self._planned(self.profile, job.train)
        pool_s = self._row_s(decision) * self.missing / self.cluster.slots
        setup_s = START_S + (_POOL_S + pool_s if self.missing else 0.0)
        note = (
            f"{formatting.count(self.missing, 'row')} of targets to compute first"
            if self.missing
            else "targets are kept"
        )
        form = TargetEncoding.parse(self.distillation.keep)
        row_bytes = sum(target_row_bytes(teacher, job.train, self.index, form) for teacher in self.teachers)
        return DeliveryCost(
            way="offline", decision=decision, step_s=estimate_of(decision.chosen).step_s, setup_s=setup_s, note=note,
            stored_bytes=float(self.index.rows * row_bytes),
        )  # fmt: skip

    def _inline(self) -> DeliveryCost:
        wish = self.distillation.replace(way="inline")
        loss = build_loss(wish, self.teachers, self.lecturers)
        check_compatibility(wish, loss, self.teachers, self.lecturers)
        job = self.job.replace(loss=loss, targets=loss.targets, metrics={})
        decision = self._planned(profile_job(job, job.train, self.index), job.train)
        found = estimate_of(decision.chosen)
        note = f"the teachers take {formatting.percent(found.terms.get('teachers', 0.0) / found.step_s)} of a step"
        return DeliveryCost(way="inline", decision=decision, step_s=found.step_s, setup_s=START_S, note=note)

    def _online(self) -> DeliveryCost:
        wish = self.distillation
        if not wish.cpus and not wish.gpus:
            raise _cannot("cpus=0 and gpus=0 leave an actor of a teacher nothing to run on")
        data = with_teacher_actors(self.job.train, wish, self.lecturers)
        decision = self._planned(self.profile, data)
        self._check_whole(decision)
        actors = self._actors(decision.chosen, data)
        batch, found = self.job.batch_size, estimate_of(decision.chosen)
        ahead_s = batch * self._row_s(decision, None if wish.gpus else wish.cpus) / min(actors)
        shared_s = 0.0 if self.cluster.accelerators else batch * self._row_s(decision) / self.cluster.slots
        step_s = max(ahead_s, found.step_s + shared_s)
        note = f"{formatting.count(sum(actors), 'actor')} ahead of the steps" + (", which wait" * (ahead_s >= step_s))
        return DeliveryCost(way="online", decision=decision, step_s=step_s, setup_s=START_S, note=note)

    def _planned(self, profile: ModelProfile, train: Dataset) -> Decision:
        """The students' plan. Raises PlanError, ResourceError."""
        job = self.job.replace(train=train)
        room, _ = reserve_for_transforms(self.cluster, job)
        return replace(choose(profile, room, apply_plan_file(job, profile, self.cluster)), cluster=self.cluster)

    def _actors(self, plan: Plan, data: Dataset) -> list[int]:
        """Of each teacher. Raises ResourceError where there is no room for one each."""
        from trainwright.datasets.ray_data.actor_pools import allocate_actors
        from trainwright.datasets.ray_data.ray_fetcher import make_pipeline_spec

        there = self.cluster.accelerators if self.cluster.accelerator == "GPU" else 0
        free = {"CPU": plan.placement.data_cpus, "GPU": float(there - plan.workers * plan.placement.accelerators)}
        recipe = make_pipeline_spec(data, self.index, columns=self.job.columns, **self.job.ordering())
        return allocate_actors([recipe], free)[0]

    def _check_whole(self, decision: Decision) -> None:
        """Raise where one actor cannot hold a teacher."""
        room = USABLE * estimate_of(decision.chosen).device_memory_bytes * min(self.distillation.gpus, 1.0)
        for teacher, guest in zip(self.teachers, self.guests, strict=True):
            plan = trained_plan(teacher.job) if teacher.job is not None else None
            workers = single_replica(plan).workers if plan is not None else 1
            if workers > 1:
                raise _cannot(f"{teacher!r} was divided over {workers} workers, and an actor holds all of it")
            need = guest.parameter_bytes + 4 * teacher.batch_size * guest.working_numbers
            if room and need > room:
                raise _cannot(f"{teacher!r} takes {formatting.size(need)}, and an actor has {formatting.size(room)}")

    def _row_s(self, decision: Decision, cpus: float | None = None) -> float:
        """Seconds in which all teachers say what they have to of a row, on a worker's device or on so many CPUs."""
        taught, plan, cluster = replace(self.profile, guests=self.guests), decision.chosen, decision.used
        alone = replace(plan, mesh=Mesh(), stages=(), cuts=(), zero=0, accumulation=1, chunks=1, schedule="")
        if cpus is not None:
            cluster = cluster.without_accelerators()
        found = estimate(taught, cluster, alone, batch_size=plan.batch_size, precision=plan.precision)
        row_s = found.terms.get("teachers", 0.0) / plan.batch_size
        if cluster.accelerators:
            return row_s
        return row_s * cluster.nodes[0].cpus / (plan.placement.threads if cpus is None else cpus)


def _reason_of(error: TrainwrightError) -> str:
    """What happened, in a line."""
    if isinstance(error, JobError):
        return "; ".join(error.problems)
    return f"{error.what} ({error.where})" if error.where else error.what


def _cannot(reason: str) -> JobError:
    return JobError([reason])


def _missing(distillation: Distillation, teachers: tuple[Teacher, ...]) -> tuple[int | None, str]:
    """Rows of which what the teachers say is not kept yet; or why it cannot be."""
    job, rows = distillation.student, 0
    try:
        for teacher in teachers:
            for data in (job.train, job.evaluate):
                if data is not None:
                    question = target_request(teacher, data, folder=distillation.folder, keep=distillation.keep)
                    rows += sum(part.rows for part in question.waiting)
    except TrainwrightError as error:
        return None, _reason_of(error)
    return rows, ""


def _check_settled(data: Dataset, teachers: tuple[Teacher, ...]) -> None:
    """Raise where a teacher's inputs are not the same in each epoch, as what it says of them is when it is kept."""
    index = data.index()
    if not data.transforms or index.in_order:
        return
    rows = range(min(_LOOKED, index.rows))
    for teacher in teachers:
        names = teacher.input_columns or None
        one, other = (data.read(index, rows, names, epoch=epoch) for epoch in (0, 1))
        for name, column in one.items():
            if not _same(column, other[name]):
                raise _cannot(
                    f"{name!r}, which {teacher!r} is given, differs from epoch to epoch: what is kept is of epoch 0"
                )


def _same(one: Any, other: Any) -> bool:
    if one.dtype == object:
        return all(map(np.array_equal, one, other))
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
