"""How long a checkpoint blocks the steps, and how quickly it is written: ours beside torch.distributed.checkpoint."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from figures import Figure, compare
from local_ranks import LocalRank, choose_plan, one_node_cluster, run_ranks, worker_config_of
from peers.plain_saving import PlainSaving
from problem import CLASSES, FEATURES, THREADS, WORKERS, job
from processes import Rounds, run_interleaved
from torch import nn

from trainwright.driver.messages import RunRequest, SnapshotRequest

WIDE, LAYERS, SMOKE_WIDTH = 2048, 8, 64
GIB = 2**30
NOTE = (
    f"{LAYERS} linear layers, {WIDE} wide, 30 million parameters with AdamW's state (0.33 GiB in all), divided by "
    f"FSDP2 (ZeRO-3) over two processes on one machine with {THREADS} thread each, gloo, written into a folder on the "
    "local disk, each file forced onto it. The same two processes hold both models and take turns behind a barrier, "
    "in another order each round: trainwright's worker (`snapshot`, then `upload`, which also sums what it writes by "
    "SHA-256), `dcp.save` and `dcp.async_save` of `get_state_dict`, the latter with one stager for all rounds, whose "
    "memory is used again as ours is. Blocked is until the call comes back, written until all files of the rank are "
    "there, in seconds for each GiB of the whole checkpoint; the slower rank counts. Not in it is the manifest, a "
    "small file that trainwright's driver writes when all ranks are done."
)
Turn = tuple[float, float]  # seconds blocked, seconds until all is written


def build(width: int) -> nn.Module:
    """Eight linear layers; 30 million parameters at the measured width."""
    hidden = [layer for _ in range(LAYERS - 1) for layer in (nn.ReLU(), nn.Linear(width, width))]
    return nn.Sequential(nn.Linear(FEATURES, width), *hidden, nn.ReLU(), nn.Linear(width, CLASSES))


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    model = partial(build, SMOKE_WIDTH if smoke else WIDE)
    wanted = job(folder / "runs", rows=1024, model=model, plan="fsdp=2")
    config = worker_config_of(wanted, choose_plan(wanted, one_node_cluster(WORKERS)))
    ranks = run_ranks(config, partial(_turns, folder=folder, model=model, rounds=1 if smoke else 20))
    size = sum(size_bytes for size_bytes, _ in ranks) / GIB
    ours, saved, saved_async = (
        [tuple(map(max, *rounds)) for rounds in zip(*(turns[which] for _, turns in ranks), strict=True)]
        for which in ("ours", "save", "async_save")
    )
    name = "checkpoint_stall"
    return [
        compare(name, "blocked, against dcp.async_save", "ms", _ms(ours), _ms(saved_async), target=1.05),
        compare(name, "blocked, against dcp.save", "ms", _ms(ours), _ms(saved), target=1.0),
        compare(name, "written, against dcp.async_save", "s/GiB", _each(ours, size), _each(saved_async, size)),
        compare(name, "written, against dcp.save", "s/GiB", _each(ours, size), _each(saved, size)),
    ]


def _ms(turns: list[tuple[float, ...]]) -> list[float]:
    return [1e3 * blocked_s for blocked_s, _ in turns]


def _each(turns: list[tuple[float, ...]], size: float) -> list[float]:
    return [written_s / size for _, written_s in turns]


def _turns(
    local_rank: LocalRank, folder: Path, model: Callable[[], nn.Module], rounds: int
) -> tuple[int, dict[str, list[Turn]]]:
    """One rank: the size of its files in bytes, and what each way took in each round."""
    local_rank.worker.run(RunRequest(steps=range(1)))
    ours, plain = OurSaving(local_rank, folder), PlainSaving(local_rank.rank, folder / "plain", model)

    def turn(save: Callable[[], Turn]) -> Turn:
        local_rank.wait_for_others()
        return save()

    ways = {"ours": ours.save, "save": plain.save, "async_save": plain.save_async}
    turns = {name: partial(turn, save) for name, save in ways.items()}
    found = run_interleaved(turns, Rounds(counted=rounds))
    return ours.size_bytes, found


class OurSaving:
    """What the driver has a worker do for a checkpoint."""

    def __init__(self, local_rank: LocalRank, folder: Path) -> None:
        self._local_rank, self._folder, self._count = local_rank, folder, 0
        self.size_bytes = 0

    def save(self) -> Turn:
        """Seconds for which steps wait, and until this rank's files are stored."""
        shutil.rmtree(self._folder / "runs" / "benchmark" / self._path, ignore_errors=True)
        self._local_rank.wait_for_others()
        self._count += 1
        begun = time.perf_counter()
        self._local_rank.worker.snapshot(SnapshotRequest(step=1, verbs=("upload",)))
        blocked_s = time.perf_counter() - begun
        entries = self._local_rank.worker.upload(self._path)
        self.size_bytes = sum(entry.size_bytes for entry in entries)
        return blocked_s, time.perf_counter() - begun

    @property
    def _path(self) -> str:
        return f"checkpoints/{self._count:08d}-1"
