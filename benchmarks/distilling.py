"""What it costs to run a teacher in an actor of its own, against a plain function in the reading process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from figures import Figure, compare
from loader_processes import EpochTimes, time_loaders
from problem import CLASSES, FEATURES, data
from processes import SMOKE_ROUNDS, Rounds
from rank_streams import ONE_RANK, iterate_epochs
from torch import nn

import trainwright as tw
from trainwright.datasets.loading.batch_loader import BatchLoader
from trainwright.datasets.ray_data.ray_fetcher import make_pipeline_spec, start_delivery
from trainwright.distillation.distillation_job import TeacherActor
from trainwright.distillation.teacher_runner import load_teacher

ROWS, WIDE, BATCH_SIZE = 16_384, 2048, 64
NOTE = (
    f"A teacher of {WIDE} units a layer, 4.7 million parameters, on {ROWS:,} rows in memory, in an actor of one CPU "
    "behind Ray Data, and as a plain function in the reading thread of the process that takes the rows, of as many "
    "threads: milliseconds a row of the second of two epochs."
)


def build_teacher() -> nn.Module:
    """Three linear layers, 4.7 million parameters, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(FEATURES, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, CLASSES)
        )


TEACHER = tw.Teacher(name="big", model=build_teacher, inputs="x")


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    rows, rounds = (2048, SMOKE_ROUNDS) if smoke else (ROWS, Rounds(counted=2))
    loaders = {"actor": Taught(rows=rows, cpus=1.0), "plain": Taught(rows=rows, cpus=0.0)}
    times = time_loaders(loaders, rounds, on_cluster=["actor"])
    what = "stage: the teacher in an actor, against a plain function"
    return [compare("distilling", what, "ms/row", *([_row_ms(one) for one in times[name]] for name in loaders))]


@dataclass(frozen=True, kw_only=True)
class Taught:
    """The rows and the teacher's outputs, to one consumer; `cpus` of an actor, or 0 for its own process."""

    rows: int
    cpus: float

    def epochs(self, count: int) -> Iterator[Iterator[int]]:
        """One stream over all epochs."""
        torch.set_num_threads(1)  # as an actor of one CPU has
        rows = tw.datasets.table(data(self.rows))
        taught = rows.map_batches(TeacherActor, cpus=self.cpus, fn_constructor_args=(load_teacher(TEACHER),))
        index = taught.index()
        shared: dict[str, Any] = {"batch_size": BATCH_SIZE, "epochs": count}
        recipes = [make_pipeline_spec(taught, index, **shared)] if self.cpus else []
        fetcher = start_delivery(recipes, cpus=self.cpus)[0] if recipes else None
        try:
            yield from iterate_epochs(BatchLoader(taught, index, feeding=ONE_RANK, fetcher=fetcher, **shared), count)
        finally:
            if fetcher is not None:
                fetcher.close()


def _row_ms(times: list[EpochTimes]) -> float:
    return 1e3 * times[-1].wall_s / times[-1].rows
