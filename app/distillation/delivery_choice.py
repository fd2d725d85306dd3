"""Which way the teachers are asked: the quickest for the whole run, and why.

Offline the teachers' forward passes are paid once, before the first step, and not at all where what they say is kept
already; inline and online they are paid in each epoch, in the step or beside it. What a way takes is measured by a
short run where the whole one is long enough for that, and otherwise estimated from operations. A run that goes on
keeps its way.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainwright.core.cluster import Cluster
from trainwright.core.errors import JobError, PlanError, TrainwrightError
from trainwright.core.job import Job
from trainwright.datasets.sampling.step_schedule import steps_per_epoch
from trainwright.distillation.delivery_benchmark import Rehearsed, rehearsals
from trainwright.distillation.delivery_cost import Case, Cost, reason_of
from trainwright.distillation.delivery_view import ways_html, ways_text
from trainwright.distillation.spec import WAYS, Distillation, Way
from trainwright.distillation.teachers import Teacher
from trainwright.planning.planner import Decision
from trainwright.reporting import formatting
from trainwright.storage.run_log import RunLog
from trainwright.storage.store import open_store

SHARE = 0.05  # of the run's predicted time, that trying the ways may take
TRIAL_S = 20.0  # to try one: assumed
TIE = 1.05  # times the quickest
_KEPT = "targets/_ways/{}.json"  # beside the run, whose own folder begins with its log


@dataclass(frozen=True, kw_only=True, repr=False)
class Weighed:
    """What each way would take. Prints as a table, shows as HTML in a notebook.

    Attributes:
        costs: the chosen way's, then the others', those that cannot be last.
        batch_size: of a step.
        steps: of the run.
        tried_rows: on which ways were tried; 0 where all is estimated.
    """

    costs: tuple[Cost, ...]
    batch_size: int
    steps: int
    tried_rows: int = 0

    @property
    def chosen(self) -> Way:
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

    def _said(self, cost: Cost) -> str:
        if cost.refused:
            return f"{cost.way} cannot be: {cost.refused}"
        rate, total_s = formatting.rate(self.batch_size / cost.step_s), cost.total_s(self.steps)
        return f"{cost.way}: {formatting.duration(total_s)} in all, {rate} after {formatting.duration(cost.setup_s)}"

    def __repr__(self) -> str:
        return ways_text(self)

    def _repr_html_(self) -> str:
        return ways_html(self)


def settled(distillation: Distillation, *, fresh: bool = False, verbose: bool = False) -> Distillation:
    """The distillation with a way: its own, that of the run which goes on, or the quickest, of which a line is said.

    Raises:
        JobError: no way can be; says why none.
        TrainwrightError: as `weigh`.
    """
    if distillation.way != "auto":
        return distillation
    if not distillation.teachers:
        return distillation.replace(way="inline")  # nobody is asked
    job = distillation.student
    past = open_store(job.storage).find(_KEPT.format(job.name)) if _begun(job, fresh) else None
    if past is not None:
        return distillation.replace(way=json.loads(past)["way"])
    found = weigh(distillation, verbose=verbose)
    _say(found.line)
    return distillation.replace(way=found.chosen)


def remember(asked: Distillation, chosen: Distillation, *, resume: bool = False, fresh: bool = False) -> None:
    """Keep a way that was chosen, or that a run goes on with from now on, for those who go on with it."""
    job = chosen.student
    if chosen.teachers and (resume or (asked.way == "auto" and not _begun(job, fresh))):
        open_store(job.storage).put(_KEPT.format(job.name), json.dumps({"way": chosen.way}).encode())


def _begun(job: Job, fresh: bool) -> bool:
    return not fresh and RunLog(open_store(job.storage), job.name).head() is not None


def weigh(
    distillation: Distillation, cluster: Cluster | str | None = None, *, always: bool = False, verbose: bool = False
) -> Weighed:
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
    from trainwright.runtime.cluster_discovery import connect, discover

    if cluster is not None:
        remedy = "leave cluster= out, or plan the student's job by itself"
        raise PlanError("the ways of a distillation are tried where it runs", where="cluster", remedy=remedy)
    if not distillation.teachers:
        raise JobError(["teachers= is empty: there is nobody to ask, whichever way"])
    _check_trained(distillation.teachers)
    connect(verbose)
    case, job = Case.of(distillation, discover()), distillation.student
    steps = job.epochs * steps_per_epoch(case.index.rows, job.batch_size, job.drop_last, job.epoch_samples)
    found = Weighed(costs=ordered([case.cost(way) for way in WAYS], steps), batch_size=job.batch_size, steps=steps)
    possible = [cost for cost in found.costs if not cost.refused]
    if len(possible) == 1 or not (always or _pays(case, possible, steps)):
        return found
    with rehearsals(distillation, case.index, verbose=verbose) as trials:
        tried = [_tried(cost, case, trials.of) for cost in possible]
        refused = [cost for cost in found.costs if cost.refused]
        return replace(found, costs=ordered([*_explained(tried), *refused], steps), tried_rows=trials.rows)


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


def ordered(costs: Sequence[Cost], steps: int) -> tuple[Cost, ...]:
    """The quickest first, of those about as quick the simplest. Raises JobError where none can be."""
    possible = sorted((cost for cost in costs if not cost.refused), key=lambda cost: cost.total_s(steps))
    refused = [cost for cost in costs if cost.refused]
    if not possible:
        raise JobError(f"{cost.way} cannot be: {cost.refused}" for cost in refused)
    limit_s = TIE * possible[0].total_s(steps)
    first = min((cost for cost in possible if cost.total_s(steps) <= limit_s), key=lambda cost: WAYS.index(cost.way))
    return (first, *(cost for cost in possible if cost is not first), *refused)


def _pays(case: Case, possible: Sequence[Cost], steps: int) -> bool:
    """Whether trying the ways costs little beside the run, and could tell anything: what is kept is there at once."""
    if any(cost.way == "offline" and not case.missing for cost in possible):
        return False
    return len(possible) * TRIAL_S <= SHARE * min(cost.total_s(steps) for cost in possible)


def _tried(cost: Cost, case: Case, trial: Callable[[Way], Rehearsed]) -> Cost:
    """The same as it is measured."""
    try:
        found = trial(cost.way)
    except TrainwrightError as error:
        return replace(cost, refused=f"a trial of it failed: {reason_of(error)}")
    missing, note = case.missing or 0, cost.note
    setup_s = found.start_s
    if cost.way == "offline" and missing:
        setup_s += found.pool_s + missing * found.row_s
        note = f"{note}, at {formatting.rate(1 / found.row_s)}" if found.row_s else note
    if cost.way == "online":
        note = f"steps wait for the teachers {formatting.share(found.wait_s / found.step_s)} of their time"
    return replace(cost, step_s=found.step_s, setup_s=setup_s, note=note)


def _explained(costs: Sequence[Cost]) -> list[Cost]:
    """With what the teachers take of a step, where it was measured with and without them."""
    step_s = {cost.way: cost.step_s for cost in costs if not cost.refused}
    if not {"offline", "inline"} <= step_s.keys():
        return list(costs)
    part = max(0.0, 1 - step_s["offline"] / step_s["inline"])
    note = f"the teachers take {formatting.share(part)} of a step"
    return [replace(cost, note=note) if cost.way == "inline" else cost for cost in costs]


def _say(line: str) -> None:
    """On stderr, where progress is shown."""
    from rich.console import Console

    Console(file=sys.stderr).print(line, markup=False, highlight=False, soft_wrap=True)
