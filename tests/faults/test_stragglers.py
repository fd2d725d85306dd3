"""A rank that dawdles in the middle of a run is named, and replaced where the job says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trainwright as tw
from tests.support import torch_jobs
from tests.support.finished_runs import final_state, told
from trainwright.core import events

SLOW_S = 0.05


def dawdling(folder: Path) -> Callable[[Any, Any], Any]:
    """Return the usual step; the first process that is rank 1 is slow, whatever its rank is later."""
    inner = torch_jobs.make_step(
        (), awaits={7: torch_jobs.Awaited(kind=events.Placed, spare=True)}, storage=str(folder)
    )
    slow: list[bool] = []

    def step(model: Any, batch: Any) -> Any:
        if not slow and model.training and torch_jobs.rank() == 1:
            mark = folder.parent / "slow"
            slow.append(not mark.exists())
            mark.touch()
        if any(slow):
            threading.Event().wait(SLOW_S)
        return inner(model, batch)

    return step


def test_a_straggler_is_named_and_its_rank_goes_to_a_spare(folder: Path, ray_cluster: None) -> None:
    """14 epochs of 9 steps: time for medians of 20 steps, and a report at the end of each epoch."""
    folder.mkdir(parents=True)
    job = torch_jobs.job(folder, step=dawdling(folder), spares=1, failures=0, epochs=14, replace_stragglers=1.5)
    tw.fit(job)
    assert not told(folder, "faulty", events.Failed)
    found: Any = told(folder, "faulty", events.Straggling)
    assert (found[0].rank, found[0].own_s > SLOW_S, found[0].ratio > 1.5) == (1, True, True)
    leaving: Any = told(folder, "faulty", events.Leaving)
    assert [event.rank for event in leaving] == [1] and "times as long" in leaving[0].why
    promoted: Any = told(folder, "faulty", events.Promoted)
    assert [event.rank for event in promoted] == [1]
    formed: Any = told(folder, "faulty", events.Formed)
    assert [(event.source, event.steps_lost) for event in formed] == [("initial", 0), ("replica", 0)]
    plain = folder.parent / "plain"
    tw.fit(torch_jobs.job(plain, epochs=14))
    assert final_state(folder, "faulty") == final_state(plain, "faulty")
