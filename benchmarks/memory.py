"""Peak memory of each rank beside the plan's estimate."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from figures import Figure, versus
from local_ranks import LocalRank, choose_plan, one_node_cluster, run_ranks_for_each, worker_config_of
from problem import CLASSES, FEATURES, WIDE, job
from torch import nn

from trainwright.driver.messages import RunRequest

LAYERS, BATCH, STEPS = 8, 1024, 6
EVERY_S = 0.0005
TARGET = 1.15
CASES: Mapping[str, dict[str, Any]] = {
    "one device": {"workers": 1, "strategy": "one_device"},
    "one device, all recomputed": {"workers": 1, "strategy": "one_device", "plan": "recompute=full"},
    "data parallel": {"strategy": "data_parallel"},
    "sharded, ZeRO-2": {"plan": "dp=2,zero=2"},
    "sharded, ZeRO-3": {"plan": "fsdp=2"},
    "pipeline, 1F1B": {"plan": "pp=2,schedule=1f1b,accumulation=4"},
    "pipeline, all recomputed": {"plan": "pp=2,schedule=1f1b,accumulation=4,recompute=full"},
}
SMOKE_BATCH, SMOKE_CASES = 64, ("one device", "pipeline, all recomputed")
NOTE = (
    f"{LAYERS} blocks of a linear layer and a ReLU, {WIDE} wide, AdamW, batch {BATCH}, two processes on one machine "
    f"(one where it says one device), gloo. Measured: the most bytes that glibc's allocator had given out at once in "
    f"any of {STEPS} steps (`mallinfo2`, looked at every {1e3 * EVERY_S:g} ms), less what it had given out before the "
    "worker was made: tensors, gloo's buffers and the batches. Each process does all of it twice, and the second time "
    "counts, so that imports and what libraries keep are not among it. torch's own count of its CPU allocator "
    "(`profile_memory`) is exact on one device, but does not see what gloo's threads give back. The peer is the "
    "plan's estimate for the stage of the rank; the ratio is the larger over the smaller."
)
_INFO = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


def build() -> nn.Module:
    """Blocks between two linear layers, 8.7 million parameters."""
    blocks = [nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(nn.Linear(FEATURES, WIDE), *blocks, nn.Linear(WIDE, CLASSES))


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    cases, batch = ({name: CASES[name] for name in SMOKE_CASES}, SMOKE_BATCH) if smoke else (CASES, BATCH)
    return [figure for name, fields in cases.items() for figure in _case(folder / name, name, fields, batch)]


def _case(folder: Path, name: str, fields: Mapping[str, Any], batch: int) -> list[Figure]:
    """Each rank of one plan."""
    wanted = job(folder, rows=batch, epochs=STEPS, batch_size=batch, model=build, **fields)
    decision = choose_plan(wanted, one_node_cluster(fields.get("workers", 2)))
    plan = decision.chosen
    assert plan.estimate is not None, "every plan of torch's has one"
    _, peaks = run_ranks_for_each([worker_config_of(wanted, decision)] * 2, _steps, context=Allocations)
    stages = [plan.mesh.stage_of(rank) for rank in range(len(peaks))]
    return [
        versus("memory", f"{name}, rank {rank}", "MiB", peak / 2**20, estimated / 2**20, target=TARGET)
        for rank, peak in enumerate(peaks)
        for estimated in [plan.estimate.stage_memory_bytes[stages[rank]]]
    ]


def _steps(local_rank: LocalRank) -> int:
    """Run the steps of one rank, and return the most bytes that it held in them."""
    most: int = local_rank.context_value.most(lambda: local_rank.worker.run(RunRequest(steps=range(STEPS))))
    return most


class Info(ctypes.Structure):
    """What glibc's `mallinfo2` gives."""

    _fields_ = [(name, ctypes.c_size_t) for name in _INFO]


class Allocations:
    """What this process has got from glibc's allocator since the context was entered."""

    def __enter__(self) -> Allocations:
        gc.collect()
        self._library = ctypes.CDLL("libc.so.6")
        self._library.mallinfo2.restype = Info
        self._before, self._most, self._over = self._now(), 0, threading.Event()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _now(self) -> int:
        info = self._library.mallinfo2()
        found: int = info.uordblks + info.hblkhd
        return found

    def _look(self) -> None:
        while not self._over.wait(EVERY_S):
            self._most = max(self._most, self._now())

    def most(self, action: Callable[[], object]) -> int:
        """Bytes that were held at once, at most, while something is done."""
        looking = threading.Thread(target=self._look)
        looking.start()
        try:
            action()
        finally:
            self._over.set()
            looking.join()
        return self._most - self._before
