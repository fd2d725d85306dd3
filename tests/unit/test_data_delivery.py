"""Who reads and transforms the training rows, where the job leaves it open: measured against the step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import trainwright as tw
from tests.support.planner_cases import PROFILE, job
from trainwright.core.cluster import Cluster, Node
from trainwright.core.model_profile import ModelProfile
from trainwright.datasets.row_reader import RowReader
from trainwright.planning import data_delivery
from trainwright.planning.data_delivery import deliver_by_measuring
from trainwright.planning.decision import Decision
from trainwright.planning.planner import choose
from trainwright.strategies.search.plan_request import placement_for

BESIDE = Cluster(  # two GPUs beside few CPUs, and a node of CPUs alone
    nodes=(
        Node(name="a", cpus=4, memory_bytes=0, accelerators=2, accelerator="GPU", kind="A100-80GB"),
        Node(name="b", cpus=16, memory_bytes=0),
    )
)
LONG = replace(PROFILE, layers=(replace(PROFILE.layers[0], flops=1e11),))  # on an A100 a step of about a second


def slowly(seconds: float) -> Callable[[dict[str, Any], np.random.Generator], dict[str, Any]]:
    def slow(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        time.sleep(seconds)
        return row

    return slow


def same(columns: dict[str, Any]) -> dict[str, Any]:
    return columns


def delivered(
    data: tw.datasets.Dataset, cluster: Cluster = BESIDE, profile: ModelProfile = LONG, **fields: Any
) -> tuple[str, tuple[str, ...]]:
    own = job(train=data, strategy="data_parallel", workers=2, **fields)
    found: Decision = deliver_by_measuring(choose(profile, cluster, own), own, data.index())
    return found.delivery, tuple(note for note in found.chosen.notes if "Ray Data" in note)


def rows(count: int = 256) -> tw.datasets.Dataset:
    return tw.datasets.table({"x": np.zeros((count, 1), np.float32)})


def test_cpus_of_other_nodes_transform_what_the_workers_could_not_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]  # a machine that is busy does not change it

    def slow(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        clock[0] += 0.2
        return row

    monkeypatch.setattr(data_delivery, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    way, (note,) = delivered(rows().map(slow))
    assert way == "ray_data"
    assert note.startswith("train= is delivered by Ray Data: transforming the rows of a step takes a worker 6.4 s,")
    assert "17 CPUs are free" in note and "delivery='direct'" in note


@pytest.mark.parametrize(
    ("data", "more"),
    [
        pytest.param(rows().map(slowly(0.0)), {}, id="quick transforms"),
        pytest.param(rows(), {}, id="no transforms"),
        pytest.param(rows().map(slowly(0.2)), {"delivery": "direct"}, id="as the job says"),
        pytest.param(rows().map(slowly(0.2)), {"cluster": Cluster(nodes=BESIDE.nodes[:1])}, id="no CPUs elsewhere"),
    ],
)
def test_otherwise_the_workers_read(data: tw.datasets.Dataset, more: dict[str, Any]) -> None:
    assert delivered(data, **more) == ("direct", ())


def test_rows_that_cannot_be_transformed_are_left_to_the_workers_who_tell_of_them() -> None:
    def broken(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        raise ValueError("no picture")

    assert delivered(rows().map(broken)) == ("direct", ())


def test_few_rows_tell_how_long_all_take() -> None:
    data, begun = rows(100_000).map(slowly(0.2)), time.monotonic()
    assert delivered(data)[0] == "ray_data"
    assert time.monotonic() - begun < 10, "64 rows would take 12.8 s"


def test_large_rows_are_not_all_read_to_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    gather = RowReader.gather

    def noting(self: RowReader, wanted: Any, *more: Any) -> Any:
        read.append(len(wanted))
        return gather(self, wanted, *more)

    monkeypatch.setattr(RowReader, "gather", noting)
    monkeypatch.setattr(data_delivery, "_BYTES", 12)
    assert delivered(rows().map(slowly(0.2)))[0] == "ray_data"
    assert read == [3], "of 4 bytes each"


def test_workers_with_accelerators_leave_their_cpus_to_ray_data_where_it_has_work() -> None:
    """As those of Ray Train, they keep one each."""
    cluster = Cluster(nodes=(replace(BESIDE.nodes[0], cpus=64),))
    heavy = rows().map_batches(same, cpus=4)
    for data, how, cpus, left in (
        (heavy, "auto", 1.0, 62.0), (heavy, "direct", 31.5, 1.0), (rows(), "auto", 31.5, 1.0),
        (rows(), "ray_data", 1.0, 62.0),
    ):  # fmt: skip
        own = job(train=data, strategy="data_parallel", workers=2, delivery=how)
        placement = choose(LONG, cluster, own).chosen.placement
        assert (placement.cpus, placement.data_cpus, placement.threads) == (cpus, left, 32)
    poor = placement_for(Cluster(nodes=(replace(BESIDE.nodes[0], cpus=2),)), 2, 1, data_cpus=float("inf"))
    assert (poor.cpus, poor.data_cpus) == (0.5, 1.0)
    assert choose(LONG, BESIDE, job(train=heavy, workers=2)).data_cpus == 2 + 16, "the other node's are Ray Data's"
