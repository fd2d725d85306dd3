"""Plans beside the chosen one: what it is measured against, what that leads to, and what fewer workers do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.planner_cases import DEEP, LAPTOP, decide, job
from trainwright.core.cluster import Cluster, Node
from trainwright.core.events import Probed, RunStarted
from trainwright.core.plan import Estimate, Mesh, Plan
from trainwright.planning import job_preparation
from trainwright.planning.alternative_layouts import (
    MOST_CANDIDATES,
    AlternativePlans,
    alternative_plans,
    candidate_plans,
    is_worth_measuring,
)
from trainwright.planning.decision import Decision
from trainwright.reporting.run_history import RunHistory
from trainwright.strategies.search.plan_request import PlanRequest

FAT = replace(
    DEEP, layers=tuple(replace(layer, parameters=4_000_000, parameter_bytes=16_000_000) for layer in DEEP.layers)
)
FOUR = Cluster(nodes=tuple(Node(name=name, cpus=2, memory_bytes=0) for name in "abcd"))


def alternatives(cluster: Cluster = LAPTOP, profile: Any = DEEP, **fields: Any) -> AlternativePlans:
    decision = decide(cluster, profile=profile, **fields)
    given = job(**fields)
    found = alternative_plans(
        given, PlanRequest.of(given, profile, decision.used), decision.contenders or (decision.chosen,)
    )
    assert found is not None
    return found


def estimated(plan: Plan, step_s: float, high_s: float) -> Plan:
    figures = Estimate(step_s=step_s, low_s=step_s / 2, high_s=high_s, terms={}, stage_memory_bytes=(0,))
    return replace(plan, estimate=figures)


def test_what_is_within_the_interval_of_the_chosen_plan_is_measured_the_best_of_each_strategy() -> None:
    first = estimated(decide(profile=DEEP, workers=2).chosen, 1.0, 1.5)
    others = {
        name: estimated(decide(profile=DEEP, strategy=name).chosen, step_s, step_s)
        for name, step_s in (("pipeline", 1.4), ("sharded", 0.5), ("model_parallel", 1.6))
    }
    worse = replace(others["pipeline"], estimate=replace(others["pipeline"].estimate, step_s=1.45))
    eligible = [others["sharded"], first, others["pipeline"], worse, others["model_parallel"]]
    assert candidate_plans(first, eligible, job()) == (first, others["sharded"], others["pipeline"])
    assert len(candidate_plans(first, eligible, job())) <= MOST_CANDIDATES
    assert candidate_plans(first, [first, others["model_parallel"]], job()) == (), "far apart"
    assert candidate_plans(first, [first], job()) == ()
    alone = replace(first, mesh=Mesh())
    assert candidate_plans(alone, [replace(plan, mesh=Mesh()) for plan in eligible], job()) == ()


@pytest.mark.parametrize(
    "fields", [{"probe": False}, {"strategy": "pipeline"}, {"plan": "dp=2"}, {"compile": "inductor"}]
)
def test_nothing_is_measured_where_it_is_pinned_or_not_wanted(fields: dict[str, Any]) -> None:
    assert decide(profile=FAT, workers=2).contenders
    assert decide(profile=FAT, workers=2, **fields).contenders == ()


def test_a_process_builds_a_model_of_keras_once() -> None:
    given, decision = job(workers=2), decide(profile=FAT, workers=2)
    question, first = PlanRequest.of(given, FAT, decision.used), replace(decision.chosen, keras_backend="torch")
    found = alternative_plans(given, question, [first])
    assert found is not None and found.on(3, 1) == first.resized(3), "more or fewer replicas are no other build"
    divided = alternative_plans(given, question, [replace(first, mesh=Mesh(pipeline=2))])
    assert divided is not None and divided.on(1, 1) is None and "Keras" in divided.lacking(1)
    assert candidate_plans(first, [replace(plan, keras_backend="torch") for plan in decision.contenders], given) == ()


def test_measuring_must_pay() -> None:
    plans = [estimated(decide(profile=DEEP, workers=2).chosen, 0.1, 0.2)] * 2
    assert not is_worth_measuring(plans, 1000) and is_worth_measuring(plans, 20_000)
    slow = [estimated(plan, 10.0, 20.0) for plan in plans]
    assert not is_worth_measuring(slow, 100) and is_worth_measuring(slow, 500)


def test_the_best_measured_goes_on_with_a_calibration_that_knows_what_was_measured() -> None:
    before = alternatives(profile=FAT, workers=2)
    assert before.plans[0].strategy == "data_parallel" and len(before.plans) > 1
    after, event = before.measured({0: 0.5, 1: 0.1}, {2: "out of memory"})
    assert after.plans == (replace(before.plans[1], estimate=after.plans[0].estimate, notes=after.plans[0].notes),)
    assert [row["name"] for row in event.rows][:2] == [before.plans[1].name, before.plans[0].name]
    for row, measured in zip(event.rows, (0.1, 0.5), strict=False):
        assert abs(row["refitted_s"] - measured) < abs(row["predicted_s"] - measured)
    assert "goes on" in event.text and event.name == before.plans[1].name
    if len(before.plans) > 2:
        assert "set aside: out of memory" in event.text
    close, _ = before.measured({0: 0.101, 1: 0.1}, {})
    assert close.plans[0].strategy == "data_parallel", "as good, and the simpler"


def plan_of(monkeypatch: pytest.MonkeyPatch, *, probe: bool = True, **past: Any) -> Decision:
    """What a long run with such a past is planned to do."""
    monkeypatch.setattr(job_preparation, "profile_job", lambda *_: FAT)
    given = job(workers=2, probe=probe, epochs=10**6)
    about: dict[str, Any] = {"store": None, "train": given.train.index(), "evaluate": None, "description": {}}
    return job_preparation.plan_for(
        job_preparation.PreparedJob(job=given, steps_per_epoch=1000, **about, **past), LAPTOP
    )


@pytest.mark.parametrize("probe", [True, False])
def test_a_resumed_run_keeps_the_plan_that_was_measured(monkeypatch: pytest.MonkeyPatch, probe: bool) -> None:
    first = plan_of(monkeypatch)
    best = first.contenders[1]
    found = plan_of(monkeypatch, probe=probe, measured=best.name)
    assert found.chosen.name == best.name and found.contenders == ()
    said = {item.plan.strategy: item.reason for item in found.rejected}
    assert best.strategy not in said and "was quicker when plans were measured" in said[first.chosen.strategy]
    same = plan_of(monkeypatch, probe=probe, measured=first.chosen.name)
    assert same.chosen.name == first.chosen.name and first.chosen.strategy not in {
        item.plan.strategy for item in same.rejected
    }


def test_a_run_says_that_plans_are_measured_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "both are measured before the first step"
    first, begun = plan_of(monkeypatch), plan_of(monkeypatch, begun=True)
    assert any(words in item.reason for item in first.rejected)
    for found in (begun, plan_of(monkeypatch, probe=False), plan_of(monkeypatch, probe=False, measured="no such")):
        assert found.contenders == () and not any(words in item.reason for item in found.rejected)


def test_what_was_measured_is_shown_in_the_place_of_what_was_predicted() -> None:
    before = alternatives(profile=FAT, workers=2)
    _, event = before.measured({0: 0.5, 1: 0.1}, {})
    start = RunStarted(run="r", token=1, rejected=[{"strategy": before.plans[1].strategy, "reason": "predicted"}])
    history = RunHistory.fold([start, event])
    assert history.summary.start.plan["strategy"] == before.plans[1].strategy
    assert [item["plan"] for item in history.summary.start.rejected if "takes 500 ms" in item["reason"]] == [
        before.plans[0].name
    ]
    assert isinstance(event, Probed) and history.summary.notes[0].text == event.text


def test_the_first_plan_is_kept_as_long_as_it_can_be() -> None:
    found = alternatives(FOUR, plan="pp=2,dp=2,accumulation=4")
    for room, workers in ((4, 4), (3, 2), (2, 2)):
        plan = found.on(room, 1)
        assert plan is not None and (plan.workers, plan.mesh.pipeline) == (workers, 2)
    assert found.on(6, 1) == found.plans[0].resized(6)
    alone, three = found.on(1, 1), found.on(3, 3)
    assert alone is not None and alone.strategy == "one_device" and alone.placement == found.plans[0].placement
    assert three is not None and three.strategy == "data_parallel" and three.workers == 3
    assert "so that plan='pp=2,dp=2,accumulation=4' cannot hold" in found.lacking(1)
    pinned = alternatives(FOUR, strategy="pipeline", plan="pp=2,dp=2").on(3, 3)
    assert pinned is not None and pinned.mesh == Mesh(pipeline=3), "what can hold of what is pinned does"


def test_where_nothing_fits_it_says_what_is_missing() -> None:
    small = Cluster(nodes=tuple(Node(name=name, cpus=2, memory_bytes=400 * 2**20) for name in "ab"))
    found = alternatives(small, FAT, workers=2, min_workers=1)
    assert found.plans[0].workers == 2 and found.on(1, 1) is None
    assert "one_device: out of memory by" in found.lacking(1)
