"""The layout of a run's log on what there is now, and the rows that its ranks are given and give back."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

import trainwright as tw
from trainwright.core.cluster import Cluster, Node
from trainwright.core.data import Columns, Feed
from trainwright.core.errors import ResourceError
from trainwright.core.events import Probed, RunStarted
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.inference.inference_model import (
    fit_plan,
    gather_outputs,
    serving_plan,
    single_replica,
    split_into_feeds,
    trained_plan,
    trained_steps,
)
from trainwright.storage.event_log import EventLog
from trainwright.storage.object_store import open_store

MESHES = {
    "one": Mesh(),
    "replicas": Mesh(data=3),
    "shards": Mesh(shard=2),
    "stages": Mesh(pipeline=2),
    "all": Mesh(pipeline=2, data=2, shard=2, tensor=2),
}


def plan(mesh: Mesh, **fields: object) -> Plan:
    return Plan(strategy="s", engine="e", mesh=mesh, batch_size=12, placement=WorkerResources(cpus=1), **fields)  # type: ignore[arg-type]


def job(folder: Path) -> tw.Job:
    return tw.Job(name="n", model=dict, optimizer=list, loss=max, inputs="x", targets="y", batch_size=12,
                  train=tw.datasets.table({"x": np.zeros(4), "y": np.zeros(4)}), storage=str(folder))  # fmt: skip


def echoed(plan: Plan, worker: int, feed: Feed) -> Columns:
    """What a rank answers: the last stage's first tensor rank has the outputs, here the rows' numbers."""
    last = plan.mesh.stage_of(worker) == plan.mesh.pipeline - 1 and worker % plan.mesh.tensor == 0
    return {"row": np.concatenate([part[0].samples for part in feed.parts])} if last else {}


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 29])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_row_comes_back_once_and_in_order(mesh: str, rows: int) -> None:
    layout = plan(MESHES[mesh], accumulation=2)
    feeds = split_into_feeds(layout, {"x": np.arange(rows) * 10.0})
    answers = [[echoed(layout, worker, feed) for feed in own] for worker, own in enumerate(feeds)]
    found = np.concatenate([piece["row"] for piece in gather_outputs(layout, answers, feeds[0])])
    assert found.tolist() == list(range(rows))
    batches = [[part[0] for part in feed.parts] for own in feeds for feed in own]
    sizes = [
        {len(batch.samples) for own in feeds for part in own[n].parts for batch in part} for n in range(len(feeds[0]))
    ]
    assert all(len(size) == 1 for size in sizes), "every rank has as many rows"
    assert max(max(size) for size in sizes) <= layout.micro_batches(12)[1]
    inputs = [batch for some in batches for batch in some if batch.columns]
    assert all((batch.columns["x"] == batch.samples * 10).all() for batch in inputs)
    firsts = [own for worker, own in enumerate(feeds) if not MESHES[mesh].stage_of(worker)]
    weight = sum(batch.weights.sum() for own in firsts for feed in own for part in feed.parts for batch in part)
    assert weight == rows * MESHES[mesh].tensor and len(inputs) == sum(len(own) for own in firsts)


def test_the_plan_that_was_told_last_counts(tmp_path: Path) -> None:
    assert trained_plan(job(tmp_path)) is None
    first, last = plan(Mesh(data=2)), plan(Mesh(pipeline=2), cuts=("a",), schedule="1f1b")
    with EventLog(open_store(str(tmp_path)), "n") as journal:
        journal.open(1)
        journal.write(RunStarted(run="n", token=1, plan=asdict(first), total_steps=9))
        journal.write(Probed(plan=asdict(last), name=last.name))
    assert trained_plan(job(tmp_path)) == last and trained_steps(job(tmp_path)) == 9


def test_there_are_fewer_replicas_where_there_is_less_room(tmp_path: Path) -> None:
    layout = plan(MESHES["all"])
    assert single_replica(layout).mesh == Mesh(pipeline=2, shard=2, tensor=2)
    assert single_replica(plan(Mesh(data=4), devices_per_worker=2)).workers == 1
    node = Node(name="n", cpus=8, memory_bytes=0)
    small = fit_plan(Cluster(nodes=(node,) * 2), plan(Mesh(pipeline=2, data=64)), job(tmp_path))
    assert small.mesh.pipeline == 2 and 1 < small.mesh.data < 64 and small.placement.cpus * small.workers <= 16
    accelerated = Node(name="n", cpus=8, memory_bytes=0, accelerators=3, accelerator="GPU", kind="A100-80GB")
    placed = fit_plan(Cluster(nodes=(accelerated,)), plan(Mesh(shard=2)), job(tmp_path))
    assert placed.workers == 2 and (placed.placement.accelerator, placed.placement.accelerators) == ("GPU", 1)
    mixed = Cluster(nodes=(accelerated, replace(accelerated, kind="T4-16GB")))
    asked = fit_plan(mixed, plan(Mesh(shard=2)), job(tmp_path).replace(accelerator="A100-80GB"))
    assert (placed.placement.kind, asked.placement.kind) == ("", "A100-80GB"), "Ray places it where the job asks for"
    with pytest.raises(ResourceError, match="needs 8 workers; the cluster has room for 3") as caught:
        fit_plan(Cluster(nodes=(accelerated,)), layout, job(tmp_path))
    assert "here=True" in caught.value.remedy


@pytest.mark.parametrize(
    ("engine", "strategy", "workers"),
    [
        ("trainwright.strategies.torch.engines.parameter_server:ParameterServer", "data_parallel", 3),
        ("trainwright.strategies.tensorflow.ps.parameter_server:Chief", "tf_one_device", 1),
    ],
)
def test_what_was_trained_against_servers_is_answered_by_replicas(engine: str, strategy: str, workers: int) -> None:
    trained = replace(
        plan(Mesh(data=3), servers=2, topology="independent", consistency="async", wire="fp16"), engine=engine
    )
    found = serving_plan(trained)
    assert found is not None and (found.strategy, found.workers, found.processes) == (strategy, workers, workers)
    assert (found.topology, found.consistency, found.wire, found.placement) == (
        "collective", "", "full", trained.placement,
    )  # fmt: skip


def test_what_was_trained_on_the_chips_of_a_tpu_is_evaluated_in_one_process() -> None:
    trained = plan(Mesh(data=4), devices_per_worker=4, topology="coordinator", tpu="slice")
    found = serving_plan(replace(trained, engine="trainwright.strategies.tensorflow.tpu:NamedTPU"))
    assert found is not None and (found.strategy, found.workers, found.tpu) == ("tf_one_device", 1, "")
