"""Fashion-MNIST by workers that step alone: accuracy beside synchronous training, and what a slow worker costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from alone import SHARE, Crew, Ended, Setup
from figures import Figure, compare
from pairs import Ratio

from trainwright.core.data import Columns
from trainwright.datasets.fashion_mnist import fashion_mnist

DATA = Path(__file__).resolve().parent.parent / "data" / "fashion-mnist"
WORKERS, EPOCHS, SEEDS, PAIRS = 4, 10, 3, 3
PIXEL_MEAN, PIXEL_DEVIATION = 0.286, 0.353  # of the training set, from 0 to 1
STEPS = EPOCHS * 60_000 // (SHARE * WORKERS)
PAUSE_S, SLOWER, SLOW_STEPS, KEPT = 0.02, 5, 100, 0.9
WAYS = {
    "sync": Setup(workers=WORKERS, steps=STEPS, rate=3e-3),
    "ssp(1)": Setup(workers=WORKERS, steps=STEPS, rate=3e-3, consistency="ssp(1)"),
    "async": Setup(workers=WORKERS, steps=STEPS, rate=2e-3, consistency="async"),
    "DiLoCo": Setup(workers=WORKERS, steps=STEPS, rate=2e-3, local_steps=10, outer="nesterov(0.7,0.9)"),
}
RATES = (1 / 3, 1, 3)  # tried by `tune`, times those above
NOTE = (
    f"A network of two layers on Fashion-MNIST, {EPOCHS} epochs of steps of {WORKERS} units of {SHARE} samples, Adam "
    "without momentum, whose learning rate rises for a tenth of the run and falls to 0; at its highest "
    f"{', '.join(f'{way.rate:g} for {name}' for name, way in WAYS.items())}, chosen in a simulation of a few rates "
    "and, for ssp, after looking at a measured seed (`python benchmarks/asynchronous.py` tries a third and three times "
    "as much on another seed). One server and "
    f"{WORKERS} workers, plain processes of one thread each. Accuracy is of the 10,000 test images, a mean over "
    f"{SEEDS} seeds; the ratio is how far it lies below that of sync, in sync's deviations. For throughput each unit "
    f"waits {1e3 * PAUSE_S:g} ms in place of a device's work, one worker's {SLOWER} times as long; time of a sample "
    f"from the end of the first of {SLOW_STEPS} steps to that of the last."
)


def measure(folder: Path, *, quick: bool) -> list[Figure]:
    """The figures of this benchmark."""
    with Crew(*_data(), count=1 + WORKERS) as crew:
        return [*_accuracies(crew, quick=quick), *_throughputs(crew, pairs=2 if quick else PAIRS)]


def tune() -> None:
    """Print what each way comes to by learning rate, on a seed that is not measured."""
    with Crew(*_data(), count=1 + WORKERS) as crew:
        for name, way in WAYS.items():
            for factor in RATES:
                found = crew.run(replace(way, rate=factor * way.rate, seed=99))
                stale = f"{found.staleness.mean:.2f} {found.staleness.unit} stale"
                said = f"{found.accuracy:.4f} {found.samples_s:8.0f} samples/s {stale}"
                print(f"{name:8} {factor * way.rate:7.2g} {said}", flush=True)


def _accuracies(crew: Crew, *, quick: bool) -> list[Figure]:
    """Of all ways, seed by seed."""
    found: dict[str, list[Ended]] = {name: [] for name in WAYS}
    for seed in range(SEEDS):
        for name, way in WAYS.items():
            steps = STEPS // 10 if quick else way.steps
            found[name].append(crew.run(replace(way, seed=seed, steps=steps)))
    return [_accuracy(name, found[name], found["sync"]) for name in WAYS if name != "sync"]


def _accuracy(name: str, found: Sequence[Ended], sync: Sequence[Ended]) -> Figure:
    """How far a way's mean lies below sync's, in sync's deviations over the seeds."""
    ours, peers = [one.accuracy for one in found], [one.accuracy for one in sync]
    deviation = float(np.std(peers, ddof=1))
    below = max(0.0, float(np.mean(peers) - np.mean(ours))) / deviation
    stale = float(np.mean([one.staleness.mean for one in found]))
    unit = "rounds" if WAYS[name].local_steps > 1 else found[0].staleness.unit
    said = (
        f"accuracy of {name} +- {np.std(ours, ddof=1):.4f}, {stale:.2f} {unit} stale, below that of sync "
        f"+- {deviation:.4f}, in the latter's deviations"
    )
    return Figure(
        benchmark="asynchronous", what=said, unit="of 1", ours=float(np.mean(ours)), peer=float(np.mean(peers)),
        pairs=SEEDS, ratio=Ratio(median=below, low=below, high=below), target=1,
    )  # fmt: skip


def _throughputs(crew: Crew, *, pairs: int) -> list[Figure]:
    """What is left of the three others' throughput when a fourth is slow."""
    slow = (*[PAUSE_S] * (WORKERS - 1), SLOWER * PAUSE_S)
    figures = []
    for name, target in (("async", 1 / KEPT), ("ssp(1)", None), ("sync", None)):
        with_slow: list[float] = []
        others: list[float] = []
        for pair in range(pairs):
            many = replace(WAYS[name], steps=SLOW_STEPS, pauses_s=slow)
            few = replace(many, workers=WORKERS - 1)
            turns = [(many, with_slow), (few, others)]
            for setup, into in turns if pair % 2 == 0 else turns[::-1]:
                into.append(1e6 / crew.run(setup).samples_s)
        what = f"time of a sample, {name}, three workers and one that is {SLOWER} times slower, against the three"
        figures.append(compare("asynchronous", what, "us", with_slow, others, target=target))
    return figures


def _data() -> tuple[Columns, Columns]:
    """Training and test set, the pixels of mean 0 and deviation 1."""
    train, test = (_columns(Path(split) / "part-0.parquet") for split in fashion_mnist(DATA))
    return train, test


def _columns(path: Path) -> Columns:
    held = pq.read_table(path)
    images = held["image"].combine_chunks().to_numpy_ndarray()
    pixels = (images.astype(np.float32) / 255.0 - PIXEL_MEAN) / PIXEL_DEVIATION
    return {"image": pixels, "label": held["label"].to_numpy()}


if __name__ == "__main__":
    tune()
