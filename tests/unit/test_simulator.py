"""Workers against servers on a virtual clock: throughput, staleness, bounds, and what the command prints."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.support.sample_run import stepped
from trainwright.cli import plan_commands
from trainwright.cli.main import app
from trainwright.core.errors import PlanError
from trainwright.core.events import Formed, Stale
from trainwright.core.topology import Consistency, GradientCompression, OuterOptimizer, WorkUnit
from trainwright.reporting.html.chart_data import chart_data
from trainwright.reporting.run_history import RunHistory
from trainwright.simulator.event_simulator import (
    ComputedPush,
    QuadraticProblem,
    Scenario,
    Simulation,
    SimulationResult,
)
from trainwright.simulator.simulation_view import as_data, as_page, fewest_servers, staleness_percentile
from trainwright.storage.run_summary import staleness_of, staleness_text


def simulated(consistency: str, *, learn: bool = False, **facts: Any) -> SimulationResult:
    given = {"workers": 10, "servers": 4, "parameter_bytes": 1e6, "steps": 60, **facts}
    return Simulation(Scenario(consistency=Consistency.parse(consistency), **given), learn=learn).run()


def test_of_equal_workers_each_push_is_as_many_updates_old_as_there_are_others() -> None:
    found = simulated("async", spread=0.02, steps=200).staleness
    assert found.unit == "updates" and found.mean == pytest.approx(9, abs=0.3)
    assert sum(found.counts.values()) == 200 * 10, "each unit counts once"


def test_sync_is_never_stale_and_takes_a_whole_step_of_all() -> None:
    found = simulated("sync", spread=0.0)
    assert found.staleness.counts == {0: 600} and found.staleness.mean == 0
    assert found.steps_per_s == pytest.approx(1 / 0.1, rel=0.1) and found.waited < 0.1


def test_one_slow_worker_costs_those_who_wait_for_it() -> None:
    sync, patient, free = (simulated(word, slow=(5.0,), steps=120) for word in ("sync", "ssp(6)", "async"))
    others = (10 - 1) / 10
    assert free.steps_per_s * 0.1 > 0.97 * others, "the others lose nothing"
    assert patient.steps_per_s * 0.1 > 0.9 * others
    assert 0.4 * others < sync.steps_per_s * 0.1 < 0.6 * others, "its units are given to others when these are done"
    assert sync.waited > 0.3 and sync.staleness.dropped > 0


def test_a_backup_worker_stands_in_for_one_that_is_slow_now_and_then() -> None:
    noisy = {"spread": 0.8, "steps": 150, "workers": 8}
    assert simulated("sync(backup=2)", **noisy).seconds < 0.9 * simulated("sync", **noisy).seconds


@settings(max_examples=40)
@given(bound=st.integers(0, 5), seed=st.integers(0, 99), slow=st.floats(1, 20), deaths=st.sampled_from([0.0, 60.0]))
def test_the_bound_is_never_exceeded(bound: int, seed: int, slow: float, deaths: float) -> None:
    found = simulated(
        f"ssp({bound})", seed=seed, slow=(slow,), spread=0.5, failures_per_hour=deaths, recover_s=2.0, steps=25,
        unequal=0.3, workers=6,
    )  # fmt: skip
    assert max(found.staleness.counts) <= bound and sum(found.staleness.counts.values()) == 25 * 6


def test_the_same_seed_is_the_same_run_and_another_is_not() -> None:
    one, same, other = (simulated("async", learn=True, seed=seed, spread=0.3) for seed in (1, 1, 2))
    assert one == same and one.curve != other.curve


def test_more_servers_pay_until_workers_links_are_what_is_slow() -> None:
    large = {"parameter_bytes": 4e8, "server_bytes_per_s": 1.25e9, "worker_bytes_per_s": 1.25e9, "steps": 20}
    found = [simulated("async", servers=count, **large) for count in (1, 4, 16, 64)]
    assert found[0].busy > 0.95 and found[0].steps_per_s < 0.5 * found[1].steps_per_s
    assert fewest_servers(found) == {"async": 16} and found[3].busy < 0.4
    narrow = simulated("async", servers=1, wire=GradientCompression.parse("int8"), **large)
    assert narrow.busiest == "link out", "what is pulled stays as wide"


def test_local_steps_are_sent_once_a_round() -> None:
    large = {"parameter_bytes": 4e8, "steps": 64, "servers": 1}
    each = simulated("sync", **large)
    rounds = simulated("sync", local_steps=16, outer=OuterOptimizer.parse("nesterov(0.7,0.9)"), learn=True, **large)
    assert rounds.steps_per_s > 4 * each.steps_per_s and sum(rounds.staleness.counts.values()) == 4 * 10
    assert rounds.losses[-1][1] < 0.5 * rounds.losses[0][1]


def test_deaths_lose_nothing_that_was_acknowledged_but_what_servers_had_not_copied() -> None:
    found = simulated("async", failures_per_hour=300.0, recover_s=1.0, steps=150, learn=True)
    assert found.lost[0] > 5 and found.staleness.again > 0
    assert sum(found.staleness.counts.values()) == 150 * 10 and math.isfinite(found.losses[-1][1])
    struck = simulated("sync", server_failures_per_hour=100.0, recover_s=5.0, copy_s=2.0, steps=300, learn=True)
    assert struck.lost[1] >= 1
    again = sum(struck.staleness.counts.values()) - 300 * 10
    assert 0 < again <= struck.lost[1] * (2.0 / 0.1 + 2) * 10, "what was done since the last copy is done again"
    whole = simulated("sync", steps=300, learn=True)
    assert struck.losses[-1][1] == whole.losses[-1][1], "the same updates as if nothing had happened"


def test_what_many_learn_at_once_bears_a_smaller_rate_for_each_update() -> None:
    sync, free = (simulated(word, learn=True, steps=200) for word in ("sync", "async"))
    assert free.rates[free.best] < sync.rates[sync.best]
    for one in (sync, free):
        assert one.losses[-1][1] < 0.2 * one.losses[0][1]
    assert simulated("async(scaled)", learn=True).rates == simulated("sync", learn=True).rates


def test_an_update_of_several_pushes_is_as_old_in_samples_and_bears_a_larger_rate() -> None:
    each, some = (simulated(word, spread=0.3, learn=True, steps=201) for word in ("async", "async(pushes=4)"))
    assert some.staleness.mean == pytest.approx(each.staleness.mean / 4, abs=0.3)
    assert sum(some.staleness.counts.values()) == 201 * 10, "2 pushes are left, and count"
    assert some.rates == pytest.approx([4 * rate for rate in each.rates])
    assert some.losses[-1][1] < 0.2 * some.losses[0][1]


@pytest.mark.parametrize(("local_steps", "outer"), [(1, "average"), (4, "average"), (4, "nesterov(0.7,0.9)")])
def test_an_update_is_the_mean_of_its_units_whatever_they_were_computed_on(local_steps: int, outer: str) -> None:
    facts = {"workers": 4, "local_steps": local_steps, "outer": OuterOptimizer.parse(outer)}
    whole, moved = (QuadraticProblem(Scenario(batch_size=256, **facts)) for _ in range(2))  # type: ignore[arg-type]
    units = [WorkUnit(step=0, share=share, steps=local_steps) for share in range(4)]
    begun = [(share + 1.0) * whole.held.x for share in range(4)]
    whole.apply([ComputedPush(unit, x) for unit, x in zip(units, begun, strict=True)])
    went = []
    for unit, x in zip(units, begun, strict=True):
        alone = QuadraticProblem(Scenario(batch_size=256, **{**facts, "outer": OuterOptimizer()}))  # type: ignore[arg-type]
        alone.apply([ComputedPush(unit, x)])
        went.append(alone.held.x - moved.held.x)
    mean, own = np.mean(went, axis=0), OuterOptimizer.parse(outer)
    expected = moved.held.x + own.rate * (1 + own.momentum) * mean
    np.testing.assert_allclose(whole.held.x, expected, rtol=1e-12)


def test_what_makes_no_sense_is_refused() -> None:
    for facts in ({"workers": 0}, {"batch_size": 3}, {"slow": (2.0,) * 11}):
        with pytest.raises(PlanError):
            replace(Scenario(workers=10), **facts)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="waits for none"):
        Scenario(workers=2, consistency=Consistency(backup=2))


def test_the_page_has_all_of_it_and_the_data_is_the_documented_one() -> None:
    found = [simulated(word, learn=True, steps=30) for word in ("sync", "async")]
    page = as_page(found)
    assert page.count("<svg") == 2 and "simulated on a virtual clock" in page and "<script" not in page
    data = json.loads(json.dumps(as_data(found)))
    assert [one["consistency"] for one in data["outcomes"]] == ["sync", "async"]
    assert data["outcomes"][0]["target_s"] > 0 and staleness_percentile(found[0].staleness, 0.95) == 0


def test_the_command_prints_a_table_and_names_what_it_cannot_read() -> None:
    line = ["simulate", "--workers", "6", "--steps", "20", "--slow", "1x5", "--servers", "1,2", "--parameters", "5M"]
    shown = CliRunner().invoke(app, line)
    assert shown.exit_code == 0 and shown.stdout.count("ssp(3)") == 3 and "nothing here was measured" in shown.stdout
    found = json.loads(CliRunner().invoke(app, [*line, "--timing", "--json"]).stdout)
    assert len(found["outcomes"]) == 6 and found["target"] is None and found["outcomes"][0]["loss"] is None
    for wrong in (["--slow", "5"], ["--compute", "3"], ["--servers", "0"], ["--consistency", "ssp"]):
        assert isinstance(CliRunner().invoke(app, ["simulate", *wrong]).exception, PlanError)


@pytest.mark.parametrize(
    ("given", "compute_s"),
    [
        ({}, 0.4),
        ({"workers": 8}, 0.1),
        ({"batch_size": 128}, 0.8),
        ({"workers": 8, "batch_size": 512}, 0.8),
        ({"workers": 8, "compute_s": 0.3}, 0.3),
    ],
)
def test_a_plans_time_is_that_of_a_workers_share_of_the_batch(
    given: dict[str, Any], compute_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = {"workers": 2, "parameter_bytes": 4e6, "compute_s": 0.4, "batch_size": 64}
    monkeypatch.setattr(plan_commands, "_facts_from_plan", lambda file: planned)
    found = plan_commands._scenario_facts("job.py", {"workers": None, "batch_size": None, "compute_s": None, **given})
    assert found == {**planned, **given, "compute_s": pytest.approx(compute_s)}


def test_a_run_tells_how_stale_it_was() -> None:
    told = [
        Stale(step=10, counts=[[0, 4], [3, 12]], dropped=1, again=2), Stale(step=20, counts=[[3, 4], [5, 4]]),
        Stale(step=30, counts=[[9, 100]]), Formed(step=20),
    ]  # fmt: skip
    history = RunHistory.fold(told)
    found = staleness_of(history.summary.stale)
    assert found.counts == {0: 4, 3: 16, 5: 4} and (found.dropped, found.again) == (1, 2), "what was lost is not told"
    text = staleness_text(found)
    assert text == "mean 2.8 updates, at most 5; 1 push dropped, 2 units handed out again"
    history = RunHistory.fold([*told, stepped([21], time_s=1)])
    chart = chart_data(history)["charts"][-1]
    assert "mean 2.8 updates" in chart["title"] and chart["tables"] == [[[0, 3, 5], [16.6667, 66.6667, 16.6667]]]
    assert staleness_text(staleness_of(())) == "" and chart_data(RunHistory())["charts"] == []
