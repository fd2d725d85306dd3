"""Fashion-MNIST by workers that step alone: accuracy beside synchronous training, and what a slow worker costs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from fashion_table import Splits, fashion_mnist, write_splits
from figures import Figure, compare, deviation, shortfall
from local_servers import RunMeasurement, RunServers, RunSettings, server_processes
from processes import Rounds, run_interleaved
from stale_gradients import measure_accuracy

from trainwright.core.data import Columns

DATA = Path(__file__).resolve().parent.parent / "data" / "fashion-mnist"
TRIED = Path(__file__).resolve().parent / "results" / "asynchronous_rates.json"  # written by `tune`
WORKERS, SHARE, EPOCHS, SEEDS, PAIRS = 4, 16, 10, 3, 3
PIXEL_MEAN, PIXEL_DEVIATION = 0.286, 0.353  # of the training set, from 0 to 1
IMAGES, HELD_OUT = 60_000, 10_000  # of the training set, and those of them that rates are chosen on
RATES, TUNED_SEED = (1e-3, 2e-3, 4e-3), 99
DELAYS = {"sync": 0, "ssp(1)": 1}  # in steps, of the loops that these are held against
PAUSE_S, SLOWER, SLOW_STEPS, KEPT = 0.02, 5, 100, 0.9
SMOKE_STEPS = 20
_SETTINGS = RunSettings(workers=WORKERS, share=SHARE, steps=EPOCHS * IMAGES // (SHARE * WORKERS))
WAYS = {
    "sync": _SETTINGS,
    "ssp(1)": replace(_SETTINGS, consistency="ssp(1)"),
    "async": replace(_SETTINGS, consistency="async"),
    "DiLoCo": replace(_SETTINGS, local_steps=10, outer="nesterov(0.7,0.9)"),
}


def _tried() -> dict[str, dict[str, float]]:
    """What `tune` found: accuracy on the images held out, by way and learning rate."""
    return json.loads(TRIED.read_text(encoding="utf-8")) if TRIED.exists() else {}


def _rated() -> dict[str, RunSettings]:
    """Each way at the best of the rates that were tried."""
    return {name: replace(WAYS[name], rate=_best(found)) for name, found in _tried().items()}


def _best(found: Mapping[str, float]) -> float:
    """The rate of the highest accuracy."""
    return float(max(found, key=found.__getitem__))


def _told(name: str, found: Mapping[str, float]) -> str:
    """A way's rate, and what it was chosen from."""
    rates = ", ".join(f"{accuracy:.4f} at {rate}" for rate, accuracy in found.items())
    return f"{_best(found):g} for {name} ({rates})"


NOTE = (
    f"A network of two layers on Fashion-MNIST, {EPOCHS} epochs of steps of {WORKERS} units of {SHARE} samples, Adam "
    "without momentum, whose learning rate rises for a tenth of the run and falls to 0. Its highest value was chosen "
    "blind, for all ways alike (`python benchmarks/asynchronous.py`): the best of "
    f"{len(RATES)} by accuracy on {HELD_OUT:,} of the training images after training on the others, with a seed that "
    f"is not measured: {'; '.join(_told(name, found) for name, found in _tried().items())}. Measured runs train on "
    f"all {IMAGES:,}. One server and {WORKERS} workers, plain processes of one thread each. Accuracy is of the 10,000 "
    f"test images, a mean over {SEEDS} seeds; the ratio is how far it lies below that of sync, in sync's deviations. "
    "The machine's load changes it only through the order in which pushes come, and so how stale they are. For "
    f"throughput each unit waits {1e3 * PAUSE_S:g} ms in place of a device's work, one worker's {SLOWER} times as "
    f"long; time of a sample from the end of the first of {SLOW_STEPS} steps to that of the last."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    splits = write_splits(folder / "data", 512, 256) if smoke else fashion_mnist(DATA)
    data = _data(splits)
    seeds, pairs, slow_steps = (1, 1, 4) if smoke else (SEEDS, PAIRS, SLOW_STEPS)
    rated = {name: replace(way, steps=SMOKE_STEPS) if smoke else way for name, way in _rated().items()}
    if missing := sorted(WAYS.keys() - rated.keys()):
        raise SystemExit(f"no rate was chosen for {', '.join(missing)}: run python {__file__} first")
    with server_processes(*data, count=1 + WORKERS) as run:
        found = _accuracies(run, rated, seeds)
        figures = [_accuracy(name, found[name], found["sync"]) for name in rated if name != "sync"]
        for name, delay in DELAYS.items():
            peers = [measure_accuracy(*data, way, delay) for way in _seeded(rated[name], seeds)]
            figures.append(_plain(name, found[name], peers))
        return [*figures, *_throughputs(run, rated, pairs, slow_steps)]


def tune(names: Sequence[str]) -> None:
    """Try all rates for these ways on images and a seed that are not measured, and keep what they come to."""
    fit, held_out = _parted(_data(fashion_mnist(DATA))[0])
    steps = EPOCHS * (IMAGES - HELD_OUT) // (SHARE * WORKERS)
    with server_processes(fit, held_out, count=1 + WORKERS) as run:
        for name in names:
            ended = {rate: run(replace(WAYS[name], steps=steps, seed=TUNED_SEED, rate=rate)) for rate in RATES}
            found = _tried() | {name: {f"{rate:g}": round(one.accuracy, 4) for rate, one in ended.items()}}
            ordered = {way: found[way] for way in WAYS if way in found}
            TRIED.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
            print(_told(name, found[name]), flush=True)


def _parted(train: Columns) -> tuple[Columns, Columns]:
    """The training images but those held out, and these."""
    order = np.random.default_rng(TUNED_SEED).permutation(IMAGES)
    fit, held_out = order[HELD_OUT:], order[:HELD_OUT]
    return {name: train[name][fit] for name in train}, {name: train[name][held_out] for name in train}


def _seeded(way: RunSettings, seeds: int) -> list[RunSettings]:
    """The measured runs of a way."""
    return [replace(way, seed=seed) for seed in range(seeds)]


def _accuracies(run: RunServers, rated: Mapping[str, RunSettings], seeds: int) -> dict[str, list[RunMeasurement]]:
    """Of all ways, seed by seed."""
    found: dict[str, list[RunMeasurement]] = {name: [] for name in rated}
    for turn in zip(*(_seeded(way, seeds) for way in rated.values()), strict=True):
        for name, settings in zip(rated, turn, strict=True):
            found[name].append(run(settings))
    return found


def _accuracy(name: str, found: Sequence[RunMeasurement], sync: Sequence[RunMeasurement]) -> Figure:
    """How far a way's mean lies below sync's, in sync's deviations over the seeds."""
    ours, peers = [one.accuracy for one in found], [one.accuracy for one in sync]
    stale = float(np.mean([one.staleness.mean for one in found]))
    unit = "rounds" if WAYS[name].local_steps > 1 else found[0].staleness.unit
    said = (
        f"accuracy of {name} +- {deviation(ours):.4f}, {stale:.2f} {unit} stale, below that of sync "
        f"+- {deviation(peers):.4f}, in the latter's deviations"
    )
    return Figure(
        benchmark="asynchronous", what=said, unit="of 1", ours=float(np.mean(ours)), peer=float(np.mean(peers)),
        pairs=len(ours), ratio=shortfall(ours, peers), target=1, count=True,
    )  # fmt: skip


def _plain(name: str, found: Sequence[RunMeasurement], peers: Sequence[float]) -> Figure:
    """A way beside a plain loop with gradients as old as its bound lets them be, at the same rate."""
    ours = [one.accuracy for one in found]
    said = (
        f"accuracy of {name} +- {deviation(ours):.4f}, beside a plain loop of torch whose gradients are all "
        f"{DELAYS[name]} steps old +- {deviation(peers):.4f}"
    )
    return Figure(
        benchmark="asynchronous", what=said, unit="of 1", ours=float(np.mean(ours)), peer=float(np.mean(peers)),
        pairs=len(ours), count=True,
    )  # fmt: skip


def _throughputs(run: RunServers, rated: Mapping[str, RunSettings], pairs: int, slow_steps: int) -> list[Figure]:
    """What is left of the three others' throughput when a fourth is slow."""
    slow = (*[PAUSE_S] * (WORKERS - 1), SLOWER * PAUSE_S)
    figures = []
    for name, target in (("async", 1 / KEPT), ("ssp(1)", None), ("sync", None)):
        many = replace(rated[name], steps=slow_steps, pauses_s=slow)
        turns = {"many": partial(run, many), "few": partial(run, replace(many, workers=WORKERS - 1))}
        found = run_interleaved(turns, Rounds(counted=pairs, uncounted=0))
        times = ([1e6 / one.samples_s for one in found[each]] for each in turns)
        what = f"time of a sample, {name}, three workers and one that is {SLOWER} times slower, against the three"
        figures.append(compare("asynchronous", what, "us", *times, target=target))
    return figures


def _data(splits: Splits) -> tuple[Columns, Columns]:
    """Training and test set, the pixels of mean 0 and deviation 1."""
    train, test = (_columns(Path(split) / "part-0.parquet") for split in splits)
    return train, test


def _columns(path: Path) -> Columns:
    held = pq.read_table(path)
    images = held["image"].combine_chunks().to_numpy_ndarray()
    pixels = (images.astype(np.float32) / 255.0 - PIXEL_MEAN) / PIXEL_DEVIATION
    return {"image": pixels, "label": held["label"].to_numpy()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Choose the learning rates that the benchmark measures.")
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"of {', '.join(WAYS)}; all by default")
    tune(parser.parse_args().ways or list(WAYS))
