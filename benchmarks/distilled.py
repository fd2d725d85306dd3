"""Whether distillation helps: the example's student beside the same one alone, on Ray. No time is measured."""

from __future__ import annotations

import contextlib
import importlib
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from fashion_table import write_splits
from figures import Figure, Ratio, deviation
from machine import ray_cluster

import trainwright as tw
from trainwright.distillation.hyperparameter_search import SearchResult

ROOT = Path(__file__).resolve().parent.parent
SMOKE_ROWS = 6400  # of which the example labels 6,000
TIMES = 2  # deviations that a gain must be larger than
NOTE = (
    "`examples/distill_fashion_mnist.py`: three teachers and a student of 16 hidden units on Fashion-MNIST, of which "
    "6,000 training images have labels here, three seeds. Temperature and alpha are searched on 1,000 of them, with "
    "the student alone beside; what was chosen and the student alone are compared once on the 10,000 test images. The "
    f"ratio is {TIMES} of the larger deviation over the seeds, divided by the gain of the student with teachers: above "
    "1, it may be chance. No time is measured, so that the machine need not be quiet."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    if smoke:
        write_splits(folder / "data" / "fashion-mnist", SMOKE_ROWS, SMOKE_ROWS // 4)
    else:
        (ROOT / "data").mkdir(exist_ok=True)
        (folder / "data").symlink_to(ROOT / "data")
    with contextlib.chdir(folder), ray_cluster(400 * 2**20):
        search = importlib.import_module("distill_fashion_mnist").search
        found: SearchResult = tw.distill(_smallest(search) if smoke else search)
    kept = min(pair.kept for pair in found.scorecard.pairs if pair.kept is not None)
    what = f"accuracy of the student with {found.best.text}, which keeps {kept:.1%} of its best teacher's"
    return [_gain(what, found.test.values, found.test_alone.values)]


def _smallest(search: tw.Search) -> tw.Search:
    """One teacher, one setting and one seed, an epoch each."""
    whole, (*_, teacher) = search.distillation, search.distillation.teachers
    short = {"epochs": 1, "evaluate_epochs": 1}
    taught = whole.replace(
        student=whole.student.replace(**short), teachers=(teacher.replace(job=teacher.job.replace(**short)),)
    )
    return search.replace(distillation=taught, temperatures=(1.0,), alphas=(0.1,), seeds=1)


def _gain(what: str, taught: Sequence[float], alone: Sequence[float]) -> Figure:
    """How much better the taught students are, in deviations over the seeds."""
    mine, theirs = statistics.fmean(taught), statistics.fmean(alone)
    spread = max(deviation(taught), deviation(alone))
    ratio = TIMES * spread / (mine - theirs) if mine > theirs else math.inf
    said = (
        f"{what}, +- {deviation(taught):.4f}, against the student alone, +- {deviation(alone):.4f}; "
        f"{TIMES} deviations over the gain"
    )
    return Figure(
        benchmark="distilled", what=said, unit="of 1", ours=mine, peer=theirs, pairs=len(taught),
        ratio=Ratio(median=ratio, low=ratio, high=ratio), target=1, count=True,
    )  # fmt: skip
