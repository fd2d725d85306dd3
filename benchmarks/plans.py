"""The planner on two CPU workers: what it predicts of each plan of six models, and what its choice costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from figures import Figure, apart, compare
from local_ranks import LocalRank, choose_plan, run_ranks_for_each, worker_config_of
from problem import ROWS, job
from six_models import MODELS, Case

import trainwright as tw
from trainwright.core.cluster import Cluster, Node
from trainwright.core.errors import PlanError
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Plan
from trainwright.driver.messages import RunRequest
from trainwright.reporting.plan_view import plan_name
from trainwright.strategies.cost_model.estimator import Measurement
from trainwright.strategies.search.plan_ranking import estimate_of, simplest_plan
from trainwright.worker.worker_config import WorkerConfig

PLANS = (  # beside one device
    "dp=2", "dp=2,zero=2", "fsdp=2", "pp=2,schedule=1f1b,accumulation=4", "pp=2,schedule=gpipe,accumulation=4",
)  # fmt: skip
FREE = {"workers": None}  # of a job that leaves everything to the planner
ROUNDS, STEPS = 8, 8  # every other round is calibrated on, the others are compared; steps of each
SMOKE_MODELS = ("three layers", "fat embedding")
RIGHT, GOOD = 1.15, 1.05
NOTE = (
    f"Six models (`six_models.py`) under each of {1 + len(PLANS)} plans as far as they fit: one device, data parallel, "
    "ZeRO-2, ZeRO-3, a pipeline in the orders 1F1B and GPipe with four micro-batches; AdamW, two processes on one "
    "machine with one thread each, gloo, trainwright's worker without Ray around it. The planner plans for a cluster "
    f"of two nodes of one CPU. In each of {ROUNDS} rounds every plan of every model takes {STEPS} steps, of "
    "which the slowest rank's median counts. Every other round is calibrated on (`trainwright.calibrate`), the others "
    "are the column trainwright. The peer is the calibrated prediction, and the ratio is the larger over the "
    "smaller, with the range of the rounds; of a model never seen, it is calibrated on the other five alone, and the "
    "plan that is furthest off is shown. Of a choice, the measured step of the plan that is chosen stands beside that "
    "of the best plan of all: what the planner decides without a measurement and without `plan=`, which is measured "
    "too where it is none of the plans, and what has the best prediction calibrated on the other five models, and on "
    "all six."
)


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A plan of a model, and its measured seconds a step; `decided` is what the planner chose itself.

    Attributes:
        probed_s: in the rounds that are calibrated on.
        steps_s: in each of the others.
    """

    model: str
    profile: ModelProfile
    cluster: Cluster
    plan: Plan
    config: WorkerConfig
    decided: bool = False
    probed_s: float = 0.0
    steps_s: tuple[float, ...] = ()

    @property
    def step_s(self) -> float:
        """Of the rounds that are compared, the median."""
        return median(self.steps_s)

    @property
    def measurement(self) -> Measurement:
        """To calibrate on."""
        return Measurement(
            profile=self.profile, cluster=self.cluster, plan=self.plan, batch_size=self.plan.batch_size,
            precision=self.plan.precision, step_s=self.probed_s,
        )  # fmt: skip

    def predicted(self, calibration: tw.Calibration) -> Plan:
        """The plan with what a calibration predicts of it."""
        found = tw.estimate(
            self.profile, self.cluster, self.plan, batch_size=self.plan.batch_size, precision=self.plan.precision,
            calibration=calibration,
        )  # fmt: skip
        return replace(self.plan, estimate=found)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    names = SMOKE_MODELS if smoke else tuple(MODELS)
    asked = [tried for name in names for tried in _asked(folder, name, MODELS[name])]
    rounds, steps = (2, 1) if smoke else (ROUNDS, STEPS)
    measured = zip(*(_measured(asked, steps) for _ in range(rounds)), strict=True)
    found = [
        replace(one, probed_s=median(each[::2]), steps_s=each[1::2]) for one, each in zip(asked, measured, strict=True)
    ]
    calibration = tw.calibrate([one.measurement for one in found])
    return [figure for name in names for figure in _figures(name, found, calibration)]


def _asked(folder: Path, name: str, case: Case) -> list[Tried]:
    """The plans of a model that fit its workers, and what the planner decides where the job leaves it to it."""
    nodes = tuple(Node(name=f"node-{number}", cpus=1, memory_bytes=case.memory_bytes) for number in range(2))
    cluster, found = Cluster(nodes=nodes), []
    pinned: list[dict[str, Any]] = [{"plan": plan, "workers": 2} for plan in PLANS]
    for number, fields in enumerate([{"strategy": "one_device", "workers": 1}, *pinned, FREE]):
        place = folder / f"{name}-{number}"
        rows = ROWS if case.batch_size > 64 else ROWS // 2
        wanted = job(place, model=case.build, batch_size=case.batch_size, rows=rows, epochs=4, **fields)
        try:
            decision = choose_plan(wanted, cluster)
        except PlanError:
            continue  # it does not fit
        tried = Tried(
            model=name, profile=decision.profile, cluster=cluster, plan=decision.chosen, decided=fields is FREE,
            config=worker_config_of(wanted, decision),
        )  # fmt: skip
        if tried.decided:
            found = [one for one in found if one.plan.name != tried.plan.name]
        found.append(tried)
    return found


def _measured(asked: Sequence[Tried], steps: int) -> list[float]:
    """Median seconds of a step of each, on the slowest rank."""
    return [max(ranks) for ranks in run_ranks_for_each([one.config for one in asked], partial(_stepped, steps=steps))]


def _stepped(local_rank: LocalRank, steps: int) -> float:
    """One rank's median step, without the first one."""
    local_rank.wait_for_others()
    local_rank.worker.run(RunRequest(steps=range(1 + steps)))
    return median(local_rank.worker.watch(1, 0.0).step_s)


def _figures(name: str, found: Sequence[Tried], calibration: tw.Calibration) -> list[Figure]:
    """Each plan of a model as predicted and as measured, and the choice."""
    own = [one for one in found if one.model == name]
    figures = [
        apart(
            "plans", f"{name}: {plan_name(one.plan)}", "ms", _ms(one), [1e3 * seconds] * len(one.steps_s), target=RIGHT
        )
        for one, seconds in zip(own, _seconds(own, calibration), strict=True)
    ]
    unseen = tw.calibrate([one.measurement for one in found if one.model != name])
    pairs = zip(own, _seconds(own, unseen), strict=True)
    far, seconds = max(pairs, key=lambda pair: max(pair[1] / pair[0].step_s, pair[0].step_s / pair[1]))
    foreign = [1e3 * seconds] * len(far.steps_s)
    figures.append(apart("plans", f"{name}, never seen: {plan_name(far.plan)}", "ms", _ms(far), foreign))
    choices: list[tuple[str, Tried, float | None]] = [
        *((f"the planner's choice, {plan_name(one.plan)}", one, GOOD) for one in own if one.decided),
        *((f"the choice by the others, {plan_name(one.plan)}", one, GOOD) for one in [_chosen(own, unseen)]),
        *((f"the choice by all, {plan_name(one.plan)}", one, GOOD) for one in [_chosen(own, calibration)]),
        *((f"always {label}", one, None) for one in own for label in [_plain(one.plan)] if label),
    ]
    best = min(own, key=lambda one: one.step_s)
    return figures + [
        compare("plans", f"{name}: {what}, beside the best", "ms", _ms(one), _ms(best), target=target)
        for what, one, target in choices
    ]


def _ms(tried: Tried) -> list[float]:
    return [1e3 * step_s for step_s in tried.steps_s]


def _chosen(tried: Sequence[Tried], calibration: tw.Calibration) -> Tried:
    """What the planner would choose of these with a calibration."""
    plans = sorted((one.predicted(calibration) for one in tried), key=lambda plan: estimate_of(plan).step_s)
    label = simplest_plan(plans).name
    return next(one for one in tried if one.plan.name == label)


def _seconds(tried: Sequence[Tried], calibration: tw.Calibration) -> list[float]:
    plans = [one.predicted(calibration) for one in tried]
    return [plan.estimate.step_s for plan in plans if plan.estimate is not None]


def _plain(plan: Plan) -> str:
    """What one would always do without a planner."""
    return {"one_device": "one device", "data_parallel": "data parallel"}.get(plan.strategy, "")
