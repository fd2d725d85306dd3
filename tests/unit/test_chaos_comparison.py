"""The comparison of two runs, and what each fault has cost."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from trainwright.chaos_testing.chaos_report import (
    ChaosReport,
    FaultCost,
    FinalCheckpoint,
    as_data,
    as_table,
    compare_runs,
    fault_costs,
)
from trainwright.chaos_testing.experiment import ScratchStorage
from trainwright.chaos_testing.run_observer import InjectedFault, ObservedRun
from trainwright.core import events
from trainwright.core.errors import CheckpointError

FINAL = FinalCheckpoint(step=4, files={"model": "aa", "optimizer": "bb"})


def steps(*pairs: tuple[int, float], time_s: float = 0.0) -> events.Steps:
    return events.Steps(time_s=time_s, step=[step for step, _ in pairs], loss=[loss for _, loss in pairs])


def given(fault: str, time_s: float, step: int = 0) -> InjectedFault:
    return InjectedFault(fault=fault, time_s=time_s, step=step, targets=("worker 1",))


UNBROKEN = ObservedRun(events=(steps((1, 0.5), (2, 0.4), (3, math.nan), (4, 0.2)),))


def test_runs_that_agree_differ_in_nothing() -> None:
    broken = ObservedRun(events=(steps((1, 0.5), (2, 0.4)), steps((2, 0.4), (3, math.nan), (4, 0.2))))
    assert compare_runs(UNBROKEN, FINAL, broken, FINAL) == ((), None)


def test_the_first_step_whose_loss_differs_is_named_even_where_it_was_done_again() -> None:
    broken = ObservedRun(events=(steps((1, 0.5), (2, 0.41), (3, math.nan)), steps((2, 0.4), (3, math.nan), (4, 0.2))))
    found, since = compare_runs(UNBROKEN, FINAL, broken, FINAL)
    assert since == 2 and found == ("the loss differs in 1 step, first in step 2",)


def test_every_kind_of_difference_is_said() -> None:
    sizes = tuple(events.Formed(workers=workers) for workers in (2, 1))
    broken = ObservedRun(events=(*sizes, steps((1, 0.5), (2, 0.4))))
    found, since = compare_runs(
        UNBROKEN, FINAL, broken, FinalCheckpoint(step=4, files={"model": "aa", "optimizer": "cc"})
    )
    assert since is None
    assert found == (
        "2 steps are missing, first step 3",
        "files of the last checkpoint differ: optimizer",
        "it ran with 1 and 2 workers, whose sums round differently",
    )
    found, _ = compare_runs(UNBROKEN, FINAL, UNBROKEN, FinalCheckpoint(step=2))
    assert found == ("the newest checkpoint is of step 2, not 4",)
    found, _ = compare_runs(UNBROKEN, FINAL, replace(UNBROKEN, error="it broke"), FinalCheckpoint())
    assert found == ("the run failed: it broke",)


def test_the_cost_of_a_fault_is_what_happened_until_the_next() -> None:
    told = (
        events.RunStarted(time_s=0.0),
        events.Formed(time_s=5.0, source="initial"),
        steps((1, 0.5), (2, 0.4), time_s=9.0),
        events.Failed(time_s=10.3, worker=1),
        events.Failed(time_s=10.9, worker=0),
        events.Formed(time_s=12.0, step=1, source="checkpoint", steps_lost=1),
        steps((2, 0.4), (3, 0.3), (4, 0.2), time_s=15.0),
        events.CheckpointSkipped(time_s=21.0, step=4),
        events.RunStarted(time_s=33.0),
        events.Formed(time_s=36.0, step=2, source="checkpoint"),
    )
    course = ObservedRun(events=told, injected=(given("kill", 10.0), given("storage", 20.0), given("driver", 30.0)))
    kill, storage, driver = fault_costs(course)
    assert math.isclose(kill.detection_s or 0, 0.3) and math.isclose(kill.recovery_s or 0, 1.7)
    assert (kill.steps_lost, kill.source) == (1, "checkpoint")
    assert (storage.detection_s, storage.recovery_s, storage.checkpoints_skipped) == (None, None, 1)
    assert driver.detection_s is None and driver.recovery_s == 6.0 and driver.steps_lost == 2


def test_the_start_that_a_killed_driver_brings_about_counts_for_both_even_where_it_is_struck() -> None:
    told = (
        events.RunStarted(time_s=31.0),
        events.Failed(time_s=33.0, worker=0),
        events.Formed(time_s=36.0, source="checkpoint"),
    )
    driver, start = fault_costs(ObservedRun(events=told, injected=(given("driver", 30.0), given("start", 32.0))))
    assert (driver.detection_s, driver.recovery_s) == (None, 6.0)
    assert (start.detection_s, start.recovery_s) == (1.0, 3.0)


def verdict(**fields: object) -> ChaosReport:
    one = FaultCost(injected=given("kill", 10.0, 7), detection_s=0.3, recovery_s=1.7, source="replica")
    fields = {"job": "net", "seed": 3, "steps": 27, "costs": (one,), "goodput": 0.5, **fields}
    return ChaosReport(**fields)  # type: ignore[arg-type]


def test_it_passes_only_where_a_fault_was_given_and_nothing_differs_or_is_left() -> None:
    assert verdict() and verdict().summary == "after 1 fault the run agrees bitwise with the uninterrupted one"
    assert not verdict(costs=()) and "no fault was injected" in verdict(costs=()).summary
    left = verdict(leaks=("process 7",))
    assert not left and left.agrees and "leaked resources" in left.summary
    wrong = verdict(differences=("loss",), since_step=9)
    assert not wrong and wrong.summary.endswith("differs from the uninterrupted one since step 9")
    unsteady = verdict(differences=("loss",), since_step=9, repeatable=False)
    assert not unsteady and "the job itself is not repeatable" in unsteady.summary


def test_it_is_shown_as_a_table_and_as_json() -> None:
    shown = verdict(missed=("spare",), changed=("failures=20",), differences=("the loss differs",))
    data = json.loads(json.dumps(as_data(shown), allow_nan=False))
    assert data["passed"] is False and data["seconds"] == 0 and data["unbroken_goodput"] is None
    assert data["faults"][0]["fault"] == "kill" and data["faults"][0]["recovery_s"] == 1.7
    console = Console(width=120, record=True, file=None, quiet=True)
    console.print(as_table(shown))
    console = Console(width=120)
    with console.capture() as caught:
        console.print(as_table(shown))
    text = caught.get()
    for part in ("kill", "300 ms", "1.7 s", "replica", "the loss differs", "spare", "failures=20", "50%"):
        assert part in text, text


def test_a_final_checkpoint_that_is_missing_says_where_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the final checkpoint of the run 'job-chaos' is missing") as caught:
        ScratchStorage(storage=str(tmp_path), folder=tmp_path).final("job-chaos")
    assert caught.value.where == f"{tmp_path}/job-chaos" and f"doctor --storage {tmp_path}" in caught.value.remedy
