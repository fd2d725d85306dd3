"""Whether distillation helps: the example's student beside the same one alone, on Ray. No time is measured."""

from __future__ import annotations

import contextlib
import importlib
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from figures import Figure
from machine import ray_cluster
from pairs import Ratio

import trainwright as tw
from trainwright.distilling.found import Found

ROOT = Path(__file__).resolve().parent.parent
TIMES = 2  # deviations that a gain must be larger than
NOTE = (
    "`examples/distill_fashion_mnist.py`: three teachers and a student of 16 hidden units on Fashion-MNIST, of which "
    "6,000 training images have labels here, three seeds. Temperature and alpha are searched on 1,000 of them, with "
    "the student alone beside; what was chosen and the student alone are compared once on the 10,000 test images. The "
    f"ratio is {TIMES} of the larger deviation over the seeds, divided by how much better the taught one is: above 1, "
    "it may be chance. No time is measured, so that the machine need not be quiet."
)


def measure(folder: Path, *, quick: bool) -> list[Figure]:
    """The figures of this benchmark, quick or not."""
    with examples(folder), ray_cluster(400 * 2**20):
        found: Found = tw.distill(importlib.import_module("distill_fashion_mnist").search)
    what = f"accuracy of the student with {found.best.text}, which keeps {found.kept:.1%} of its teachers'"
    return [_gain(what, found.test.values, found.test_alone.values)]


@contextlib.contextmanager
def examples(folder: Path) -> Iterator[None]:
    """The examples can be imported, and work in this folder."""
    (folder / "data").symlink_to(ROOT / "data")
    sys.path.insert(0, str(ROOT / "examples"))
    with contextlib.chdir(folder):
        yield
    sys.path.remove(str(ROOT / "examples"))


def _gain(what: str, taught: Sequence[float], alone: Sequence[float]) -> Figure:
    """How much better the taught students are, in deviations over the seeds."""
    mine, theirs = statistics.fmean(taught), statistics.fmean(alone)
    deviation = max(statistics.stdev(taught), statistics.stdev(alone))
    ratio = TIMES * deviation / (mine - theirs) if mine > theirs else math.inf
    said = (
        f"{what}, +- {statistics.stdev(taught):.4f}, against the student alone, +- {statistics.stdev(alone):.4f}; "
        f"{TIMES} deviations over the gain"
    )
    return Figure(
        benchmark="distilled", what=said, unit="of 1", ours=mine, peer=theirs, pairs=len(taught),
        ratio=Ratio(median=ratio, low=ratio, high=ratio), target=1,
    )  # fmt: skip
