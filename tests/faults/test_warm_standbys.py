"""Warm spares take the ranks of killed workers: the recovered run is bitwise the unbroken one."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trainwright as tw
from tests.support import torch_jobs
from tests.support.finished_runs import State, final_state, told
from trainwright.core import events


def ready(number: int) -> torch_jobs.Awaited:
    """So many spares have been ready so far."""
    return torch_jobs.Awaited(kind=events.Placed, number=number, spare=True)


def test_a_spare_takes_the_rank_of_a_killed_worker_and_is_replaced_itself(
    folder: Path, unbroken: Callable[[int], State]
) -> None:
    workers = 3
    kills = tuple(torch_jobs.Kill(rank=rank, step=step, folder=str(folder.parent)) for rank, step in ((1, 8), (0, 16)))
    tw.fit(torch_jobs.job(folder, kills, workers=workers, spares=1, awaits={7: ready(1), 15: ready(2)}))
    assert all(kill.mark.exists() for kill in kills)
    assert final_state(folder, "faulty") == unbroken(workers)
    placed: Any = told(folder, "faulty", events.Placed)
    promoted: Any = told(folder, "faulty", events.Promoted)
    assert [event.rank for event in promoted] == [1, 0]
    assert [event.worker for event in promoted] == [workers, workers + 1] == [e.worker for e in placed if e.spare][:2]
    assert {event.worker for event in placed if not event.spare} == set(range(workers)), (
        "no process was started for a rank"
    )
    formed: Any = told(folder, "faulty", events.Formed)
    assert [event.source for event in formed] == ["initial", "replica", "replica"]
    assert all((event.survivors, event.steps_lost) == (workers - 1, 0) for event in formed[1:])


def test_a_spare_takes_over_a_single_worker_from_the_checkpoint(folder: Path, unbroken: Callable[[int], State]) -> None:
    kill = torch_jobs.Kill(rank=0, step=13, folder=str(folder.parent))
    tw.fit(torch_jobs.job(folder, (kill,), workers=1, spares=1, awaits={12: ready(1)}, paced=True))
    assert final_state(folder, "faulty") == unbroken(1)
    assert [event.rank for event in told(folder, "faulty", events.Promoted)] == [0]  # type: ignore[attr-defined]
    assert told(folder, "faulty", events.Formed)[-1].source == "checkpoint"  # type: ignore[attr-defined]


def test_a_model_that_cannot_be_built_twice_is_no_failure_of_the_run(
    folder: Path, unbroken: Callable[[int], State]
) -> None:
    """Spares that fail are given up, and that is said; the run itself needs none of them."""

    def build() -> Any:
        (folder.parent / f"built-{uuid.uuid4()}").touch()  # two workers build at once
        if len(list(folder.parent.glob("built-*"))) > 3:
            raise RuntimeError("only so many licences")
        return torch_jobs.Net()

    tw.fit(torch_jobs.job(folder, model=build, spares=1, awaits={10: torch_jobs.Awaited(kind=events.Noted)}))
    notes: Any = told(folder, "faulty", events.Noted)
    assert "continuing without warm standbys" in notes[0].text and "only so many licences" in notes[0].text
    assert not told(folder, "faulty", events.Failed)
    assert final_state(folder, "faulty") == unbroken(2)
