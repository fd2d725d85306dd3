"""What of a cluster is kept for heavy transforms, and when steps are said to wait for one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import trainwright as tw
from trainwright.core.cluster import Cluster
from trainwright.core.errors import ResourceError
from trainwright.core.events import Steps
from trainwright.datasets import table
from trainwright.datasets.ray_data.delivery_actor import StageProgress
from trainwright.planning.job_description import describe
from trainwright.planning.job_preparation import reserve_for_transforms
from trainwright.runtime.run_setup import RayDataFeeder

GPUS = "2x4xA100-80GB@100Gb"


class Teacher:
    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        return columns


def judge(columns: dict[str, Any]) -> dict[str, Any]:
    return columns


def job(**more: Any) -> Any:
    rows = table({"x": np.arange(3)})
    data = rows.map_batches(judge, gpus=0.5).map_batches(Teacher, gpus=1)
    scaling = SimpleNamespace(workers=more.pop("workers", None), accelerator=more.pop("accelerator", "auto"))
    fields = {"train": data, "evaluate": data, **more}
    how = SimpleNamespace(delivery=fields.pop("delivery", "auto"))
    return SimpleNamespace(ordering=lambda **_: {}, scaling=scaling, data=how, **fields)


def test_gpus_are_kept_for_the_transforms_that_ask_for_them() -> None:
    """One for each class, whichever data sets have it, and the most of any function."""
    cluster = Cluster.parse(GPUS)
    left, notes = reserve_for_transforms(cluster, job())
    assert [node.accelerators for node in left.nodes] == [4, 2]
    assert notes == ("2 GPUs are kept for Teacher, judge",)
    assert reserve_for_transforms(cluster, job(accelerator="cpu")) == (cluster, ())
    assert reserve_for_transforms(cluster, job(delivery="direct")) == (cluster, ())
    plain = table({"x": np.arange(3)}).map_batches(judge, cpus=1)
    assert reserve_for_transforms(cluster, job(train=plain, evaluate=None)) == (cluster, ())
    two = plain.map_batches(Teacher, gpus=1).map_batches(Teacher, gpus=1, fn_constructor_args=(2,))
    assert reserve_for_transforms(cluster, job(train=two, evaluate=two))[1] == ("2 GPUs are kept for Teacher",), (
        "one each"
    )
    with pytest.raises(ResourceError, match="ask for 2 GPUs and the workers for 7; the cluster has 8"):
        reserve_for_transforms(cluster, job(workers=7))


def steps(count: int, wait_s: float) -> Steps:
    return Steps(step=list(range(count)), step_s=[1.0] * count, wait_s=[wait_s] * count)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ((9.0, 40.0, 90.0), "for Teacher: 2 processes, 45% busy; give it more"),
        ((60.0, 40.0, 90.0), "for reading: 1 process, 60% busy; make the functions before"),
    ],
)
def test_where_steps_wait_the_stage_is_named_once(seconds: tuple[float, ...], said: str) -> None:
    names, slots = ("reading", "judge", "Teacher"), (1, 1, 2)
    stages = [
        StageProgress(name=name, slots=slot, seconds=spent, elapsed_s=100.0)
        for name, slot, spent in zip(names, slots, seconds, strict=True)
    ]
    light = table({"x": np.arange(3)})
    feeding = RayDataFeeder(job(train=light, evaluate=None), light.index(), None, cpus=1.0, gpus=0.0)
    feeding._fetchers["train"] = SimpleNamespace(stages=lambda: stages)
    feeding.on(steps(10, 1.0))  # the first ones wait for the teacher to open
    feeding.on(steps(40, 0.1))
    assert feeding.verdict() == ""
    feeding.on(steps(40, 0.5))
    text = feeding.verdict()
    assert text.startswith("steps wait for data 30% of their time") and said in text
    assert feeding.verdict() == ""


@pytest.mark.parametrize(
    ("cpus", "streamed", "said"),
    [
        (6.0, False, "steps wait for data 50% of their time, which the workers read and transform themselves; "
         "delivery='ray_data' would do that with the 6 CPUs that they leave free"),
        (0.5, False, ""),
        (6.0, True, "steps wait for data 50% of their time, which Ray Data delivers with 6 CPUs; leave it more"),
    ],
)  # fmt: skip
def test_where_steps_wait_for_light_data_another_way_is_named(cpus: float, streamed: bool, said: str) -> None:
    light = table({"x": np.arange(3)})
    feeding = RayDataFeeder(job(train=light, evaluate=None), light.index(), None, cpus=cpus, gpus=0.0)
    feeding.rows |= {"train": None} if streamed else {}
    feeding.on(steps(60, 0.5))
    found = feeding.verdict()
    assert found.startswith(said) and bool(found) == bool(said)
    assert feeding.verdict() == ""


def words(kind: type, *given: int) -> str:
    """A job's training set in words."""
    data = table({"x": np.arange(3)}).map_batches(kind, cpus=1, fn_constructor_args=given)
    made = tw.Job(name="a", model=judge, optimizer=judge, loss=judge, inputs="x", train=data, batch_size=1)
    return describe(made)["train"]


def test_another_teacher_is_another_job() -> None:
    """By what it is made with, and by its code alone."""
    before = words(Teacher, 1)
    assert words(Teacher, 1) == before != words(Teacher, 2)

    def changed(self: Teacher, columns: dict[str, Any]) -> dict[str, Any]:
        return {**columns, "more": columns["x"]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Teacher, "__call__", changed)
        assert words(Teacher, 1) != before
