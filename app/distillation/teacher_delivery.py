"""Choose where the teachers of a distillation run (`way="auto"`): offline, inline or online. Say why.

The choice follows a rule, not a measurement: offline computes the teachers' outputs once, inline and online compute
them in each epoch. A run that continues keeps its way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from trainwright.core import formatting
from trainwright.core.errors import JobError, PlanError, TrainwrightError
from trainwright.distillation.distillation_job import LoadedDistillation, check_actor_resources
from trainwright.distillation.distillation_spec import Delivery, Distillation, Teacher
from trainwright.distillation.target_cache import check_repeated_inputs, count_missing_rows, stored_bytes
from trainwright.inference.inference_model import single_replica, trained_plan
from trainwright.planning.decision import Decision
from trainwright.planning.job_preparation import reserve_for_transforms
from trainwright.planning.planner import apply_plan_file, choose
from trainwright.planning.profiler import profile_job
from trainwright.ray_cluster.discovery import connect, discover
from trainwright.reporting.progress_bar import print_status
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog
from trainwright.strategies.search.plan_ranking import USABLE, estimate_of

if TYPE_CHECKING:
    from trainwright.core.cluster import Cluster
    from trainwright.core.job import Job
    from trainwright.core.model_profile import ModelProfile
    from trainwright.datasets import Dataset
    from trainwright.datasets.data_source import Index

_MAX_STORED_BYTES, _MAX_STORED_RATIO = 50e9, 4.0  # targets up to the larger of this and this times the training set
_WAY_FILE = "targets/_ways/{}.json"  # outside the run's own folder, which starts with its log


def choose_delivery(distillation: Distillation, *, fresh: bool = False, verbose: bool = False) -> Distillation:
    """Return the distillation with a way: its own, that of the run that continues, or the one that the rule gives.

    Raises:
        JobError: no way is possible; gives the reason of each.
        TrainwrightError: the teachers, the data, the storage or the cluster is not right.
    """
    if distillation.way != "auto":
        return distillation
    way = _known_way(distillation, fresh)
    if way is None:
        connect(verbose)
        way, _, reasons = DeliveryPlans.of(distillation, discover()).choose()
        print_status("; ".join(reasons))
    return distillation.replace(way=way)


def record_delivery(asked: Distillation, chosen: Distillation, *, resume: bool = False, fresh: bool = False) -> None:
    """Store the way of a run, for calls that continue it."""
    job = chosen.student
    if chosen.teachers and (resume or (asked.way == "auto" and not _has_started(job, fresh))):
        open_store(job.storage).put(_WAY_FILE.format(job.name), json.dumps({"way": chosen.way}).encode())


def plan_distillation(distillation: Distillation, cluster: Cluster | str | None = None) -> Decision:
    """Return the students' plan on the connected cluster; its notes say where the teachers run, and why.

    Args:
        distillation: to plan.
        cluster: not supported: whether an actor can hold a teacher depends on the connected cluster.

    Raises:
        JobError: no way is possible; gives the reason of each.
        PlanError: `cluster` was given, or teachers must be trained first.
        TrainwrightError: the teachers, the data, the storage or the cluster is not right.
    """
    if cluster is not None:
        remedy = "leave cluster= out, or plan the student's job by itself"
        raise PlanError("a distillation is planned on the cluster where it runs", where="cluster", remedy=remedy)
    _check_trained(distillation.teachers)
    connect()
    plans, way = DeliveryPlans.of(distillation, discover()), _known_way(distillation, fresh=False)
    if way is not None:
        return plans.plan(way)
    _, decision, reasons = plans.choose()
    return replace(decision, chosen=replace(decision.chosen, notes=(*decision.chosen.notes, *reasons)))


def _known_way(distillation: Distillation, fresh: bool) -> Delivery | None:
    """Return the given way, or the way of the run that continues; None if the rule must choose."""
    if distillation.way != "auto":
        return distillation.way
    if not distillation.teachers:
        return "inline"  # students teach each other in their own step
    job = distillation.student
    stored = open_store(job.storage).find(_WAY_FILE.format(job.name)) if _has_started(job, fresh) else None
    if stored is None:
        return None
    way: Delivery = json.loads(stored)["way"]
    return way


def _has_started(job: Job, fresh: bool) -> bool:
    return not fresh and RunLog(open_store(job.storage), job.name).head() is not None


def _check_trained(teachers: Sequence[Teacher]) -> None:
    """Raise PlanError for teachers with `train=True` whose run has no checkpoint yet."""
    runs = {teacher.name: teacher.job for teacher in teachers if teacher.train and teacher.job is not None}
    heads = {name: RunLog(open_store(job.storage), job.name).head() for name, job in runs.items()}
    missing = [name for name, head in heads.items() if head is None or not head.checkpoints]
    if missing:
        raise PlanError(
            f"teachers are not trained yet: {', '.join(missing)}; the plan of a distillation depends on them",
            where=", ".join(f"run {runs[name].name!r}" for name in missing),
            remedy="tw.distill(...) trains them first, side by side; tw.plan(teacher.job) plans the run of one",
        )


@dataclass(frozen=True, kw_only=True)
class DeliveryPlans:
    """The students' plan under each way to run their teachers, on one cluster."""

    loaded: LoadedDistillation  # what is planned, with its teachers
    job: Job  # the student's job, with the model of all students
    profile: ModelProfile  # cost of that model
    guests: tuple[ModelProfile, ...]  # cost of each teacher's model
    index: Index  # of the training set
    cluster: Cluster
    missing: int | None  # rows without stored targets, over teachers and data sets; None if targets cannot be stored
    unstorable: str = ""  # why targets cannot be stored; empty if they can

    @classmethod
    def of(cls, distillation: Distillation, cluster: Cluster) -> Self:
        """Profile the models and look for stored targets. Raises TrainwrightError for a problem of every way."""
        loaded, job = LoadedDistillation.of(distillation, "offline"), distillation.student
        loaded.check()
        job, index = job.replace(model=loaded.model), job.train.index()
        guests = [profile_job(teacher.inference_job(job.train), job.train, index) for teacher in loaded.teachers]
        missing: int | None = None
        unstorable = ""
        try:
            missing = count_missing_rows(loaded.teachers, job, folder=distillation.folder, keep=distillation.keep)
        except TrainwrightError as error:
            unstorable = _reason_of(error)
        return cls(
            loaded=loaded, job=job, index=index, cluster=cluster, profile=profile_job(job, job.train, index),
            guests=tuple(guests), missing=missing, unstorable=unstorable,
        )  # fmt: skip

    def choose(self) -> tuple[Delivery, Decision, tuple[str, ...]]:
        """Return the first possible way of the rule, the students' plan under it, and the reasons.

        Raises:
            JobError: no way is possible; gives the reason of each.
        """
        refused: dict[Delivery, str] = {}
        for way, reason in self._preferences():
            if way in refused:
                continue
            try:
                decision = self.plan(way)
            except TrainwrightError as error:
                refused[way] = _reason_of(error)
            else:
                impossible = [f"{other} is not possible: {why}" for other, why in refused.items()]
                return way, decision, (f"teachers run {way}: {reason}", *impossible)
        raise JobError(f"{way} is not possible: {why}" for way, why in refused.items())

    def _preferences(self) -> Iterator[tuple[Delivery, str]]:
        """Yield the ways in order of preference, each with its reason. This is the rule; a way can come twice."""
        against = self._against_storing()
        if self.missing == 0:
            yield "offline", "all their outputs are stored already"
        elif not against:
            size, passes = formatting.size(self._stored_bytes()), f"{self._passes():.3g}"
            yield "offline", f"they compute each row once for {passes} passes over the data, and {size} are stored"
        if self.loaded.asked.gpus:
            yield "online", "gpus= reserves accelerators for them"
        yield "inline", f"{against or 'their outputs cannot be stored'}, and they fit beside the student"
        yield "online", f"{against or 'their outputs cannot be stored'}, and an actor can hold each"
        yield "offline", "no other way is possible"

    def _against_storing(self) -> str:
        """Return why targets should not be stored; empty if they should."""
        size, rows_bytes = self._stored_bytes(), self.index.rows * self.index.row_bytes
        if self._passes() <= 1:
            return "the run reads no row twice"
        if size > max(_MAX_STORED_BYTES, _MAX_STORED_RATIO * rows_bytes):
            return f"stored targets would take {formatting.size(size)}"
        return ""

    def _passes(self) -> float:
        """Return how often the run reads the training set."""
        job = self.job
        return job.epochs * (job.data.epoch_samples or self.index.rows) / max(self.index.rows, 1)

    def _stored_bytes(self) -> float:
        return float(stored_bytes(self.loaded.teachers, self.job.train, self.index, keep=self.loaded.asked.keep))

    def plan(self, way: Delivery) -> Decision:
        """Return the students' plan under a way. Raises TrainwrightError if the way is not possible."""
        if way == "offline":
            return self._plan_offline()
        return self._plan_inline() if way == "inline" else self._plan_online()

    def _plan_offline(self) -> Decision:
        job = self.job
        if self.missing is None:
            raise JobError([self.unstorable])
        for data in (job.train, job.evaluate):
            if data is not None:
                check_repeated_inputs(data, self.loaded.teachers)
        return self._planned(self.profile, job.train)

    def _plan_inline(self) -> Decision:
        inline = self.loaded.under("inline")
        inline.check()
        job = self.job.replace(loss=inline.loss, targets=inline.loss.targets, metrics={})
        return self._planned(profile_job(job, job.train, self.index), job.train)

    def _plan_online(self) -> Decision:
        if not self.loaded.asked.cpus and not self.loaded.asked.gpus:
            raise JobError(["cpus=0 and gpus=0 leave an actor of a teacher nothing to run on"])
        data = self.loaded.with_actors(self.job.train)
        decision = self._planned(self.profile, data)
        check_actor_resources(data, self.index, self.job, decision)
        self._check_actor_memory(decision)
        return decision

    def _planned(self, profile: ModelProfile, train: Dataset) -> Decision:
        """Return the students' plan. Raises PlanError, ResourceError."""
        job = self.job.replace(train=train)
        usable, _ = reserve_for_transforms(self.cluster, job)
        return replace(choose(profile, usable, apply_plan_file(job, profile, self.cluster)), cluster=self.cluster)

    def _check_actor_memory(self, decision: Decision) -> None:
        """Raise JobError if one actor cannot hold a teacher."""
        usable = USABLE * estimate_of(decision.chosen).device_memory_bytes * min(self.loaded.asked.gpus, 1.0)
        for teacher, guest in zip(self.loaded.teachers, self.guests, strict=True):
            plan = trained_plan(teacher.job) if teacher.job is not None else None
            workers = single_replica(plan).workers if plan is not None else 1
            if workers > 1:
                raise JobError([f"{teacher!r} was divided over {workers} workers, and an actor holds all of it"])
            need = guest.parameter_bytes + 4 * teacher.batch_size * guest.working_numbers
            if usable and need > usable:
                problem = f"{teacher!r} takes {formatting.size(need)}, and an actor has {formatting.size(usable)}"
                raise JobError([problem])


def _reason_of(error: TrainwrightError) -> str:
    """Return what happened, in a line."""
    if isinstance(error, JobError):
        return "; ".join(error.problems)
    return f"{error.what} ({error.where})" if error.where else error.what
