"""What each way to ask the teachers would take, by estimate, and which of them cannot be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from trainwright.core.cluster import Cluster
from trainwright.core.errors import JobError, TrainwrightError
from trainwright.core.job import Job
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Mesh, Plan
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.index import Index
from trainwright.distillation.compatibility import check
from trainwright.distillation.compose_job import builder_of, loss_of, online, taught_layers
from trainwright.distillation.spec import Distillation, Way
from trainwright.distillation.target_cache import asked, said_bytes
from trainwright.distillation.target_encoding import Form
from trainwright.distillation.teachers import Lecturer, Teacher
from trainwright.inference.trained_plan import replica_of, trained_plan
from trainwright.planning.plan_file import with_plan
from trainwright.planning.planner import Decision, choose
from trainwright.planning.profile_model import profile_job
from trainwright.reporting import formatting
from trainwright.runtime.ray_data_delivery import without_data
from trainwright.strategies.cost_model.estimate import estimate
from trainwright.strategies.search.ranking import USABLE, estimate_of

START_S = 8.0  # of the workers, to their first step: assumed
POOL_S = 6.0  # of the processes that compute targets, to their first row: assumed
_LOOKED = 4  # rows


@dataclass(frozen=True, kw_only=True)
class Cost:
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

    way: Way
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
class Case:
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
    lecturers: Mapping[str, Lecturer]
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
        teachers, job = taught_layers(distillation), distillation.student
        lecturers = {teacher.name: teacher.load() for teacher in teachers}
        loss = loss_of(distillation.replace(way="offline"), teachers, lecturers)
        job, index = job.replace(model=builder_of(distillation, loss)), job.train.index()
        check(distillation, loss, teachers, lecturers)
        guests = [profile_job(teacher.asked(job.train), job.train, index) for teacher in teachers]
        missing, unkept = _missing(distillation, teachers)
        return cls(
            distillation=distillation, teachers=teachers, lecturers=lecturers, job=job, index=index, cluster=cluster,
            profile=profile_job(job, job.train, index), guests=tuple(guests), missing=missing, unkept=unkept,
        )  # fmt: skip

    def cost(self, way: Way) -> Cost:
        """What a way takes, by estimate."""
        costs: dict[Way, Callable[[], Cost]] = {
            "offline": self._offline, "online": self._online, "inline": self._inline,
        }  # fmt: skip
        try:
            return costs[way]()
        except TrainwrightError as error:
            return Cost(way=way, refused=reason_of(error))

    def _offline(self) -> Cost:
        job = self.job
        if self.missing is None:
            raise _cannot(self.unkept)
        for data in (job.train, job.evaluate):
            if data is not None:
                _check_settled(data, self.teachers)
        decision = self._planned(self.profile, job.train)
        pool_s = self._row_s(decision) * self.missing / self.cluster.slots
        setup_s = START_S + (POOL_S + pool_s if self.missing else 0.0)
        note = (
            f"{formatting.count(self.missing, 'row')} of targets to compute first"
            if self.missing
            else "targets are kept"
        )
        form = Form.parse(self.distillation.keep)
        row_bytes = sum(said_bytes(teacher, job.train, self.index, form) for teacher in self.teachers)
        return Cost(
            way="offline", decision=decision, step_s=estimate_of(decision.chosen).step_s, setup_s=setup_s, note=note,
            stored_bytes=float(self.index.rows * row_bytes),
        )  # fmt: skip

    def _inline(self) -> Cost:
        wish = self.distillation.replace(way="inline")
        loss = loss_of(wish, self.teachers, self.lecturers)
        check(wish, loss, self.teachers, self.lecturers)
        job = self.job.replace(loss=loss, targets=loss.targets, metrics={})
        decision = self._planned(profile_job(job, job.train, self.index), job.train)
        found = estimate_of(decision.chosen)
        note = f"the teachers take {formatting.share(found.terms.get('teachers', 0.0) / found.step_s)} of a step"
        return Cost(way="inline", decision=decision, step_s=found.step_s, setup_s=START_S, note=note)

    def _online(self) -> Cost:
        wish = self.distillation
        if not wish.cpus and not wish.gpus:
            raise _cannot("cpus=0 and gpus=0 leave an actor of a teacher nothing to run on")
        data = online(self.job.train, wish, self.lecturers)
        decision = self._planned(self.profile, data)
        self._check_whole(decision)
        actors = self._actors(decision.chosen, data)
        batch, found = self.job.batch_size, estimate_of(decision.chosen)
        ahead_s = batch * self._row_s(decision, None if wish.gpus else wish.cpus) / min(actors)
        shared_s = 0.0 if self.cluster.accelerators else batch * self._row_s(decision) / self.cluster.slots
        step_s = max(ahead_s, found.step_s + shared_s)
        note = f"{formatting.count(sum(actors), 'actor')} ahead of the steps" + (", which wait" * (ahead_s >= step_s))
        return Cost(way="online", decision=decision, step_s=step_s, setup_s=START_S, note=note)

    def _planned(self, profile: ModelProfile, train: Dataset) -> Decision:
        """The students' plan. Raises PlanError, ResourceError."""
        job = self.job.replace(train=train)
        room, _ = without_data(self.cluster, job)
        return replace(choose(profile, room, with_plan(job, profile, self.cluster)), cluster=self.cluster)

    def _actors(self, plan: Plan, data: Dataset) -> list[int]:
        """Of each teacher. Raises ResourceError where there is no room for one each."""
        from trainwright.datasets.ray_data.actor_pools import deal
        from trainwright.datasets.ray_data.fetcher import recipe_of

        there = self.cluster.accelerators if self.cluster.accelerator == "GPU" else 0
        free = {"CPU": plan.placement.data_cpus, "GPU": float(there - plan.workers * plan.placement.accelerators)}
        recipe = recipe_of(data, self.index, columns=self.job.columns, **self.job.ordering())
        return deal([recipe], free)[0]

    def _check_whole(self, decision: Decision) -> None:
        """Raise where one actor cannot hold a teacher."""
        room = USABLE * estimate_of(decision.chosen).device_memory_bytes * min(self.distillation.gpus, 1.0)
        for teacher, guest in zip(self.teachers, self.guests, strict=True):
            plan = trained_plan(teacher.job) if teacher.job is not None else None
            workers = replica_of(plan).workers if plan is not None else 1
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


def reason_of(error: TrainwrightError) -> str:
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
                    question = asked(teacher, data, folder=distillation.folder, keep=distillation.keep)
                    rows += sum(part.rows for part in question.waiting)
    except TrainwrightError as error:
        return None, reason_of(error)
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
