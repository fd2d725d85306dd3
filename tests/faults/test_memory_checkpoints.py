"""All workers die: the run goes on from the copy of the state that a node's memory holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from tests.support import torch_jobs
from tests.support.checkpoint_jobs import kept_job
from tests.support.finished_runs import State, final_state, told
from trainwright.core import events
from trainwright.storage.memory_checkpoints import FOLDER_PREFIX, SHARED_MEMORY, MemoryCheckpointStore
from trainwright.storage.object_store import open_store


def shelves(folder: Path) -> list[Path]:
    """What the memory of this machine holds of the run."""
    uri = open_store(str(folder)).uri_of("faulty")
    return [path for path in SHARED_MEMORY.glob(f"{FOLDER_PREFIX}*") if path == MemoryCheckpointStore(uri).folder]


def test_when_all_die_at_once_the_state_comes_from_memory(folder: Path, unbroken: Callable[[int], State]) -> None:
    kills = tuple(torch_jobs.Kill(rank=rank, step=21, folder=str(folder.parent)) for rank in range(3))
    tw.fit(kept_job(folder, kills, 3))
    assert all(kill.mark.exists() for kill in kills)
    assert final_state(folder, "faulty") == unbroken(3)
    formed: Any = told(folder, "faulty", events.Formed)
    kept: Any = told(folder, "faulty", events.Kept)
    assert formed[-1].source == "keeper" and formed[-1].step in {event.step for event in kept}
    assert formed[-1].step + formed[-1].steps_lost <= 21 and not shelves(folder)


@pytest.mark.soak
def test_without_keepers_the_same_costs_all_steps(folder: Path, unbroken: Callable[[int], State]) -> None:
    kill = torch_jobs.Kill(rank=0, step=21, folder=str(folder.parent))
    tw.fit(torch_jobs.job(folder, (kill,), workers=1, checkpoint_steps=100))
    formed: Any = told(folder, "faulty", events.Formed)
    assert formed[-1].source == "initial" and not told(folder, "faulty", events.Kept)
    assert final_state(folder, "faulty") == unbroken(1)
