"""What a later epoch's start adds to the wait for a batch, and how much memory the light path takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from figures import Figure, compare
from float_table import GROUP_ROWS, ROW_BYTES, write_table
from images import shrink, write_images
from processes import run_alone, start_process
from rank_streams import HeavyStream, LightStream

from trainwright.core.data import Feed
from trainwright.datasets.sample_order import MEMORY_BYTES

LIMIT_MS = 50.0
GROUPS, LARGE_GROUPS = 25, 90
LIGHT_STEP_S, HEAVY_STEP_S = 0.004, 0.1
IN_FLIGHT_BYTES = 6 * GROUP_ROWS * ROW_BYTES
NOTE = (
    "`start` is the wait for the first batch of a later epoch, less the median wait inside epochs, against a limit of "
    f"{LIMIT_MS:g} ms; one pair for each later epoch. A consumer asks for a batch, then sleeps as a step would: "
    f"{1e3 * LIGHT_STEP_S:g} ms over the table of `data_light` (batches of 512) and over its `large` one, "
    f"{1e3 * HEAVY_STEP_S:g} ms over 2,048 of the images of `data_heavy` (batches of 64, both CPUs). `memory` is the "
    "most anonymous memory of a new process while it streams one epoch of "
    f"{LARGE_GROUPS * GROUP_ROWS:,} rows ({LARGE_GROUPS * GROUP_ROWS * ROW_BYTES >> 20} MiB decoded, more than a "
    "reader keeps), less what it had before; the bound is what a reader may keep decoded "
    f"({MEMORY_BYTES >> 20} MiB) and {IN_FLIGHT_BYTES >> 20} MiB for row groups and batches on their way."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    groups, large_groups, images, files = (1, 2, 128, 2) if smoke else (GROUPS, LARGE_GROUPS, 2048, 8)
    write_table(folder / "table", groups)
    write_table(folder / "large", large_groups)
    write_images(folder / "images", images, files)
    light = LightStream(path=str(folder / "table"), batch_size=512)
    large = LightStream(path=str(folder / "large"), batch_size=512)
    heavy = HeavyStream(path=str(folder / "images"), batch_size=64, function=shrink, cpus=2)
    memory = run_alone(partial(peak_mib, large))
    figures = [
        _start("light path", run_alone(partial(light_waits, light, 2 if smoke else 8))),
        _start("light path, large", run_alone(partial(light_waits, large, 2 if smoke else 5))),
    ]
    with start_process(cluster=True) as run:
        figures.append(_start("heavy path", run(partial(heavy_waits, heavy, 2 if smoke else 5))))
    bound = (MEMORY_BYTES + IN_FLIGHT_BYTES) / 2**20
    what = "memory, light path, against its bound"
    return [*figures, compare("data_start", what, "MiB", [memory], [bound], target=1.0)]


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Seconds of waiting for a batch: the first of each later epoch, and all others, without the first epoch's."""

    starts_s: list[float]
    others_s: list[float]


def light_waits(loader: LightStream, epochs: int) -> Waits:
    """Return the waits over a light stream."""
    stream = loader.stream(epochs)
    with stream.feeds() as feeds:
        return _waits(feeds, stream.schedule.steps_per_epoch, LIGHT_STEP_S)


def heavy_waits(loader: HeavyStream, epochs: int) -> Waits:
    """Return the waits over a heavy stream."""
    stream, fetcher = loader.stream(epochs)
    with closing(fetcher), stream.feeds() as feeds:
        return _waits(feeds, stream.schedule.steps_per_epoch, HEAVY_STEP_S)


def peak_mib(loader: LightStream) -> float:
    """Stream one epoch, and return the most anonymous memory beyond that of before.

    The pages of mapped files are not in it: they are the system's cache.
    """
    stream = loader.stream(1)
    before, done = _anonymous_mib(), threading.Event()
    peak = before

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, _anonymous_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with stream.feeds() as feeds:
        for _ in feeds:
            pass
        done.set()
        watcher.join()
        return max(peak, _anonymous_mib()) - before  # a short epoch may end between two looks of the watcher


def _waits(feeds: Iterator[Feed], epoch_steps: int, step_s: float) -> Waits:
    waits = []
    begun = time.perf_counter()
    for _ in feeds:
        waits.append(time.perf_counter() - begun)
        time.sleep(step_s)
        begun = time.perf_counter()
    later = range(epoch_steps, len(waits))
    return Waits(
        starts_s=[waits[step] for step in later if step % epoch_steps == 0],
        others_s=[waits[step] for step in later if step % epoch_steps],
    )


def _start(path: str, waits: Waits) -> Figure:
    usual = median(waits.others_s)
    added = [max(1e3 * (wait - usual), 0.001) for wait in waits.starts_s]
    what = f"start of a later epoch, {path}, against the limit"
    return compare("data_start", what, "ms", added, [LIMIT_MS] * len(added), target=1.0, strict=True)


def _anonymous_mib() -> float:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon"))
