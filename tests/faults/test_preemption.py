"""SIGTERM to workers' processes in the middle of a run: no failure, no step lost, and the result of an unbroken run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from tests.support import torch_jobs
from tests.support.finished_runs import State, final_state, told
from trainwright.core import events


def notices(folder: Path, *ranks: int) -> tuple[torch_jobs.Kill, ...]:
    """A notice to each of the ranks in step 8."""
    return tuple(torch_jobs.Kill(rank=rank, step=8, folder=str(folder.parent), number=signal.SIGTERM) for rank in ranks)


@pytest.mark.parametrize("ranks", [(1,), pytest.param((0, 1), marks=pytest.mark.soak)], ids=str)
def test_workers_that_are_told_to_go_hand_their_ranks_over(
    ranks: tuple[int, ...], folder: Path, unbroken: Callable[[int], State]
) -> None:
    spare = torch_jobs.Awaited(kind=events.Placed, number=1, spare=True)
    left = torch_jobs.Awaited(kind=events.Leaving, number=len(ranks))
    kills = notices(folder, *ranks)
    tw.fit(torch_jobs.job(folder, kills, spares=1, failures=0, awaits={7: spare, 10: left}))
    assert final_state(folder, "faulty") == unbroken(2)
    assert not told(folder, "faulty", events.Failed)
    leaving: Any = told(folder, "faulty", events.Leaving)
    assert sorted(event.rank for event in leaving) == list(ranks) and all(20 < event.left_s <= 25 for event in leaving)
    formed: Any = told(folder, "faulty", events.Formed)
    assert formed[0].source == "initial" and all(event.steps_lost == 0 for event in formed)
    assert formed[-1].source == ("replica" if len(ranks) == 1 else "checkpoint")
    for kill in kills:
        with pytest.raises(ProcessLookupError):
            os.kill(int(kill.mark.read_text()), 0)


def test_a_process_that_nobody_relieves_ends_by_itself_when_its_time_is_over(
    folder: Path, unbroken: Callable[[int], State]
) -> None:
    """The step under way lasts longer than the notice, as far as the process is concerned."""
    (notice,) = kills = notices(folder, 1)
    made = torch_jobs.make_step(kills)

    def step(model: Any, batch: Any) -> Any:
        losses = made(model, batch)
        if notice.mark.exists() and notice.mark.read_text() == str(os.getpid()):
            torch_jobs.await_told(str(folder), torch_jobs.Awaited(kind=events.Failed))
        return losses

    tw.fit(torch_jobs.job(folder, kills, spares=1, failures=0, preemption_s=1.0, step=step))
    assert final_state(folder, "faulty") == unbroken(2)
    formed: Any = told(folder, "faulty", events.Formed)
    assert [(event.source, event.steps_lost) for event in formed] == [("initial", 0), ("replica", 0)]
