"""A prediction from a step that was timed on this machine, and where the time is kept."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainwright as tw
from tests.support import torch_jobs
from tests.support.planner_cases import GPUS, LAPTOP, PROFILE, decide, job
from trainwright.planning import measured_step
from trainwright.planning.decision import Decision
from trainwright.planning.job_description import describe
from trainwright.planning.job_preparation import prepare
from trainwright.planning.measured_step import predict_by_measuring, predict_from_past
from trainwright.runtime.function_trial import Preflight
from trainwright.storage.object_store import open_store
from trainwright.strategies.search.plan_ranking import estimate_of

HEAVY = replace(PROFILE, layers=(replace(PROFILE.layers[0], flops=1e8),))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr("platform.node", lambda: LAPTOP.nodes[0].name)
    return tmp_path / "steps" / "times.json"


class Clock:
    """Times steps as it is told to, and counts how often it was asked."""

    def __init__(self, step_s: float, busy: bool = False) -> None:
        self.step_s, self.busy = step_s, busy
        self.asked: list[int] = []

    def __call__(self, rows: int, workers: int) -> tuple[float, bool]:
        assert workers == 2
        self.asked.append(rows)
        return self.step_s, self.busy


def predicted(decision: Decision, clock: Clock, **fields: Any) -> Decision:
    asked = job(**fields)
    return predict_by_measuring(decision, asked, describe(asked), clock)


def test_a_step_that_takes_longer_than_assumed_is_predicted_so(cache: Path) -> None:
    before = decide(LAPTOP, profile=HEAVY)
    assert before.chosen.strategy == "data_parallel" and before.chosen.mesh.data == 2
    assumed = estimate_of(before.chosen)
    slow = Clock(3 * assumed.terms["compute"])
    found = predicted(before, slow)
    estimate = estimate_of(found.chosen)
    beside = assumed.step_s - assumed.terms["compute"]
    assert slow.asked == [32] and estimate.step_s == pytest.approx(slow.step_s + beside, rel=0.15)
    assert estimate.high_s / estimate.low_s < assumed.high_s / assumed.low_s
    assert "predicted from a step of 32 rows, which took" in found.chosen.notes[-1]
    drawn = re.search(r"One step of [^<\"]*, ([\d.]+) ms", found.timeline)
    assert drawn is not None and float(drawn[1]) == pytest.approx(1e3 * estimate.step_s, rel=0.02)
    again = Clock(1.0)
    assert estimate_of(predicted(before, again).chosen) == estimate and not again.asked, "it is kept"
    assert len(json.loads(cache.read_text())) == 1
    predicted(before, again, loss=min)
    assert again.asked == [32], "another loss is another step"
    wide = replace(before, profile=replace(HEAVY, layers=(replace(HEAVY.layers[0], flops=8e8),)))
    predicted(wide, again)
    assert again.asked == [32, 32], "and so are longer samples"


def test_what_a_busy_machine_took_is_not_kept(cache: Path) -> None:
    before, busy, idle = decide(LAPTOP, profile=HEAVY), Clock(9.0, busy=True), Clock(1.0)
    assert predicted(before, busy).chosen.notes[-1].endswith("other work on the machine slowed it")
    assert not cache.exists()
    found = predicted(before, idle)
    assert busy.asked == idle.asked == [32] and estimate_of(found.chosen).step_s < 2 and cache.exists()
    assert "other work" not in found.chosen.notes[-1]


class Past:
    """The history of a run of the same job, as `read_history` gives it."""

    def __init__(self, decision: Decision, asked: tw.Job, steps: int = 50) -> None:
        facts = {"plan": asdict(decision.chosen), "cluster": str(decision.cluster), "job": describe(asked)}
        self.summary = SimpleNamespace(start=SimpleNamespace(**facts))
        self.records, self.median_step_s = range(steps), 3 * estimate_of(decision.chosen).step_s


def test_the_next_plan_is_predicted_from_the_runs_own_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, asked, store = decide(LAPTOP, profile=HEAVY), job(), open_store(str(tmp_path))
    past = Past(before, asked)
    monkeypatch.setattr(measured_step, "read_history", lambda store, run: past)
    found = predict_from_past(before, asked, describe(asked), store)
    assert found is not None
    assert estimate_of(found.chosen).step_s == pytest.approx(3 * estimate_of(before.chosen).step_s, rel=0.05)
    assert "predicted from earlier steps of this run, which took" in found.chosen.notes[-1]
    for other in (job(loss=min), job(batch_size=32), job(precision="bf16")):
        assert predict_from_past(before, other, describe(other), store) is None, "it computes something else"
    assert predict_from_past(replace(before, cluster=GPUS), asked, describe(asked), store) is None
    sharded = decide(LAPTOP, profile=HEAVY, plan="dp=2,zero=2")
    assert predict_from_past(sharded, asked, describe(asked), store) is None
    past = Past(before, asked, steps=9)
    assert predict_from_past(before, asked, describe(asked), store) is None, "too few"


def test_a_run_that_never_began_predicts_nothing(tmp_path: Path) -> None:
    asked = job()
    assert predict_from_past(decide(), asked, describe(asked), open_store(str(tmp_path))) is None


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": "b"}'])
def test_a_torn_file_is_measured_again(cache: Path, text: str) -> None:
    cache.parent.mkdir()
    cache.write_text(text)
    clock = Clock(0.5)
    found = predicted(decide(LAPTOP, profile=HEAVY), clock)
    assert clock.asked and estimate_of(found.chosen).step_s > 0.4


def test_a_step_that_could_not_be_timed_changes_nothing(cache: Path) -> None:
    before = decide(LAPTOP, profile=HEAVY)
    assert predicted(before, Clock(0.0)) is before and not cache.exists()


def test_what_this_machine_says_nothing_of_is_not_timed() -> None:
    clock = Clock(1.0)
    for decision in (
        decide(GPUS, profile=HEAVY),
        decide(replace(LAPTOP, nodes=(replace(LAPTOP.nodes[0], name="elsewhere"),)), profile=HEAVY),
        decide(replace(LAPTOP, nodes=(*LAPTOP.nodes, replace(LAPTOP.nodes[0], name="b"))), profile=HEAVY),
        decide(LAPTOP, profile=HEAVY, plan="dp=2,zero=2"),
        decide(replace(LAPTOP, nodes=(replace(LAPTOP.nodes[0], cpus=8),)), profile=HEAVY, workers=2),
    ):
        assert predicted(decision, clock) is decision
    assert not clock.asked


def test_a_jobs_own_step_is_timed_by_the_process_that_tries_it(tmp_path: Path) -> None:
    """In a fresh process: one in which TensorFlow works cannot be forked."""
    program = """
import os, subprocess, sys
from tests.support import torch_jobs
from trainwright.planning.job_preparation import prepare
from trainwright.runtime.function_trial import Preflight

with Preflight(prepare(torch_jobs.job(sys.argv[1], preflight=True))) as trial:
    print(*(trial.time_step(*each)[0] for each in ((8, 1), (4096, 1), (4096, 3), (8, 1000))))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
try:
    with Preflight(prepare(torch_jobs.job(sys.argv[1], preflight=True))) as trial:
        print(trial.time_step(4096, 1)[1])
finally:
    other.kill()
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *spent, busy = done.stdout.split()
    few, many, together, too_many = map(float, spent)
    assert busy == "True", "another process has half of the only CPU"
    assert 0 < few < min(many, together) and too_many == 0.0, "a thousand processes would take much memory"


def test_a_job_that_fails_is_not_timed(tmp_path: Path) -> None:
    def broken(model: object, batch: object) -> object:
        raise RuntimeError("no loss")

    with Preflight(prepare(torch_jobs.job(tmp_path, step=broken, preflight=True))) as trial:
        assert trial.time_step(8, 1) == (0.0, False)
        with pytest.raises(tw.TrainwrightError, match="no loss"):
            trial.settle(decide(LAPTOP, profile=HEAVY))
