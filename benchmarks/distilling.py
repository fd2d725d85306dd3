"""Distillation: samples a second of each way to ask a teacher, as planned and as run, and what an actor stage adds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import turns
from feeds import ONE_RANK, epochs_of
from figures import Figure, apart, compare
from machine import ray_cluster, settle
from problem import CLASSES, FEATURES, data, job
from torch import nn
from turns import Pass, Rounds, Timed, host, interleaved

import trainwright as tw
from trainwright.core.events import Steps
from trainwright.datasets.loading.batch_loader import BatchLoader
from trainwright.datasets.ray_data.ray_fetcher import start_dataset_delivery
from trainwright.distillation import delivery_benchmark
from trainwright.distillation.distillation_job import TeacherActor
from trainwright.distillation.distillation_spec import DELIVERIES, Delivery
from trainwright.distillation.teacher_delivery import DeliveryComparison, compare_deliveries
from trainwright.storage.event_files import read_events
from trainwright.storage.object_store import open_store

ROWS, WIDE, BATCH_SIZE = 16_384, 2048, 64
ROUNDS, SECONDS = 3, 6.0  # of plans and runs; of each run's steps, by prediction
EDGE_ROWS = 12 * 1024  # of each run, at both ends: while actors get ahead, and when they are done
RIGHT = 1.1
NOTE = (
    f"A student of 0.8 million parameters (that of `step_time`) and a teacher of {WIDE} units a layer, 4.7 million, on "
    f"{ROWS:,} rows in memory, batches of {BATCH_SIZE}, on a Ray cluster of 2 CPUs that is up; all else is left to "
    f"trainwright. {ROUNDS} times in turn `tw.plan(distillation)` tries the three ways, and then `tw.distill` runs "
    f"each for about {SECONDS:g} s of steps. Under trainwright stands what the run came to, from the seconds of its "
    f"steps but those of the first and last {EDGE_ROWS:,} rows; under peer what the plan predicted; the ratio is the "
    "larger over the smaller, with the range of the rounds. `first step` is from the call to it, targets included. "
    "`estimated` is the same without a trial, from operations alone. `stage` is the teacher alone, in an actor of one "
    "CPU behind Ray Data, and as a plain function in the reading thread of the process that takes the rows, of as many "
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


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        rows: of the data.
        edge_rows: left out at both ends of a run: while actors get ahead, and when they are done.
        rounds: of plans and runs.
        seconds: of each run's steps, by prediction.
        stage: rounds of the teacher alone.
        ways: that are run; the plan tries all of them.
    """

    rows: int
    edge_rows: int
    rounds: int
    seconds: float
    stage: Rounds
    ways: tuple[Delivery, ...]


FULL = Size(rows=ROWS, edge_rows=EDGE_ROWS, rounds=ROUNDS, seconds=SECONDS, stage=Rounds(counted=2), ways=DELIVERIES)
SMOKE = Size(rows=2048, edge_rows=512, rounds=1, seconds=0.5, stage=turns.SMOKE, ways=("inline",))


def distillation_of(folder: Path, size: Size, *, epochs: int = 1, **fields: Any) -> tw.Distillation:
    """The distillation; `epochs` is the student's."""
    student = job(folder, epochs=epochs, rows=size.rows, workers=None, batch_size=BATCH_SIZE)
    return tw.Distillation(student=student, teachers=(TEACHER,), **fields)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a run came to, or is to: samples a second, and seconds to its first step."""

    rate: float
    first_s: float


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    """The figures of this benchmark."""
    size = SMOKE if smoke else FULL
    if smoke:
        delivery_benchmark.SECONDS, delivery_benchmark.STEPS = 0.2, 2
    planned: dict[str, list[Ran]] = {way: [] for way in DELIVERIES}
    ran: dict[str, list[Ran]] = {way: [] for way in DELIVERIES}
    guessed: dict[str, Ran] = {}
    with ray_cluster():
        for number in range(size.rounds):
            place = folder / f"round-{number}"
            guessed = _predicted(compare_deliveries(distillation_of(place, size)))
            for way, told in _predicted(tw.plan(distillation_of(place, size))).items():
                planned[way].append(told)
            settle()
            for way in size.ways:
                ran[way].append(_ran(place / way, way, planned[way][-1].rate, size))
                settle()
    figures = [figure for way in size.ways for figure in _figures(way, ran[way], planned[way], guessed[way])]
    return [*figures, _stage(size)]


def _predicted(weighed: DeliveryComparison) -> dict[str, Ran]:
    """Of each way. Raises SystemExit where one cannot be."""
    refused = [f"{cost.way}: {cost.refused}" for cost in weighed.costs if cost.refused]
    if refused:
        raise SystemExit("; ".join(refused))
    return {cost.way: Ran(rate=weighed.batch_size / cost.step_s, first_s=cost.setup_s) for cost in weighed.costs}


def _ran(folder: Path, way: str, rate: float, size: Size) -> Ran:
    """One way as it is run, for as many steps as are predicted to take so long."""
    epochs = math.ceil((2 * size.edge_rows + size.seconds * rate) / size.rows)
    begun_s, asked = time.time(), distillation_of(folder, size, way=way, epochs=epochs)
    tw.distill(asked)
    told = [event for event in read_events(open_store(str(folder)), asked.student.name) if isinstance(event, Steps)]
    counted = [
        (rows, step_s)
        for event in told
        for step, rows, step_s in zip(event.step, event.samples, event.step_s, strict=True)
        if size.edge_rows < step * BATCH_SIZE <= epochs * size.rows - size.edge_rows
    ]
    first_s = told[0].time_s - sum(told[0].step_s[1:]) - begun_s
    return Ran(rate=sum(rows for rows, _ in counted) / sum(step_s for _, step_s in counted), first_s=first_s)


def _figures(way: str, ran: Sequence[Ran], planned: Sequence[Ran], guessed: Ran) -> list[Figure]:
    """A way's throughput and its start, each as it came beside what was told of it."""
    rates, firsts = [one.rate for one in ran], [one.first_s for one in ran]
    what, unit = f"{way}, beside what the plan measured before", "samples/s"
    return [
        apart("distilling", what, unit, rates, [one.rate for one in planned], target=RIGHT),
        apart("distilling", f"{way}, estimated", unit, rates, [guessed.rate] * len(ran)),
        apart("distilling", f"{way}, first step", "s", firsts, [one.first_s for one in planned]),
    ]


@dataclass(frozen=True, kw_only=True)
class Taught:
    """The rows and the teacher's outputs, to one consumer; `cpus` of an actor, or 0 for its own process."""

    rows: int
    cpus: float

    def epochs(self, count: int) -> Iterator[Iterator[int]]:
        """One stream over all epochs."""
        torch.set_num_threads(1)  # as an actor of one CPU has
        rows = tw.datasets.table(data(self.rows))
        taught = rows.map_batches(TeacherActor, cpus=self.cpus, fn_constructor_args=(TEACHER.load(),))
        index = taught.index()
        shared: dict[str, Any] = {"batch_size": BATCH_SIZE, "epochs": count}
        fetcher = start_dataset_delivery(taught, index, cpus=self.cpus, **shared) if self.cpus else None
        try:
            yield from epochs_of(BatchLoader(taught, index, feeding=ONE_RANK, fetcher=fetcher, **shared), count)
        finally:
            if fetcher is not None:
                fetcher.close()


def _stage(size: Size) -> Figure:
    """A row through the teacher in an actor, beside the same in the process that takes it."""
    with host(cluster=True) as cluster, host() as alone:
        passes = interleaved(
            {
                "actor": lambda: cluster(_timed(size, cpus=1.0)),
                "plain": lambda: alone(_timed(size, cpus=0.0)),
            },
            size.stage,
        )
    what = "stage: the teacher in an actor, against a plain function"
    return compare(
        "distilling", what, "ms/row", *([_row_ms(one) for one in passes[name]] for name in ("actor", "plain"))
    )


def _timed(size: Size, cpus: float) -> Timed:
    loader = Taught(rows=size.rows, cpus=cpus)
    return Timed(loader=loader, epochs=2, touched_bytes=size.stage.touched_bytes)


def _row_ms(passes: list[Pass]) -> float:
    return 1e3 * passes[-1].wall_s / passes[-1].rows
