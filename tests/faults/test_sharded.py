"""A divided model loses a part with its worker: it comes from a node's memory, and the run is the unbroken one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import trainwright as tw
from tests import jobs
from tests.faults.test_keepers import kept_job
from tests.runs import final_state, told
from trainwright.core import events
from trainwright.strategies.torch import files


def test_a_part_that_died_with_its_worker_comes_from_memory(folder: Path) -> None:
    unbroken = jobs.job(folder.parent / "unbroken", strategy="sharded")
    tw.fit(unbroken)
    kill = jobs.Kill(rank=1, step=21, folder=str(folder.parent))
    broken = kept_job(folder, (kill,), 2, strategy="sharded")
    tw.fit(broken)
    assert kill.mark.exists()
    assert final_state(folder, "faulty") == final_state(folder.parent / "unbroken", "faulty")
    formed: Any = told(folder, "faulty", events.Formed)
    assert [event.source for event in formed] == ["initial", "keeper"] and formed[-1].survivors == 1

    class Whole:
        """The files of the last checkpoint."""

        held = final_state(folder, "faulty").files

        def names(self) -> tuple[str, ...]:
            return tuple(self.held)

        def read(self, name: str) -> bytes:
            return self.held[name]

    weights = files.load_weights(Whole())
    alone: Any = tw.load_model(broken)
    assert all(torch.equal(value, weights[name]) for name, value in alone.state_dict().items())
    parallel = jobs.job(folder.parent / "parallel")
    tw.fit(parallel)
    seen: Any = tw.load_model(parallel)
    assert torch.allclose(alone.seen, seen.seen, rtol=1e-9), "the samples counted otherwise than in data parallelism"
