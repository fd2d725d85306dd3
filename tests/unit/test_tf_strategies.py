"""Which strategies are offered to a Keras model, where, and why not elsewhere. Pure: no TensorFlow."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from tests.support.planner_cases import job
from tests.support.reference import registration as registration
from trainwright.core.cluster import Cluster, Node
from trainwright.core.errors import JobError, PlanError
from trainwright.core.model_profile import LayerCost, ModelProfile
from trainwright.core.plan import SUMMED_BY, InfeasiblePlan, Plan
from trainwright.planning import job_preparation
from trainwright.planning.decision import Decision
from trainwright.planning.planner import choose
from trainwright.ray_cluster.placement_groups import device_names, node_bundles
from trainwright.strategies import engine_class

LAYER = LayerCost(name="dense", parameters=1000, parameter_bytes=4000, flops=2000.0)
KERAS = ModelProfile(framework="tensorflow", layers=(LAYER,))
CPU = Cluster(nodes=(Node(name="one", cpus=4, memory_bytes=2**33),))
GPUS = Cluster(
    nodes=tuple(
        Node(name=name, cpus=16, memory_bytes=2**36, accelerators=4, accelerator="GPU") for name in ("one", "two")
    )
)


def decide(cluster: Cluster = CPU, profile: ModelProfile = KERAS, **fields: Any) -> Decision:
    return choose(profile, cluster, job(**fields))


def planned(decision: Decision) -> dict[str, Plan | InfeasiblePlan]:
    every = [decision.chosen, *(item.plan for item in decision.rejected), *decision.infeasible]
    return {item.strategy: item for item in every}


def test_a_keras_model_is_offered_the_strategies_of_tensorflow_alone() -> None:
    names = {"tf_one_device", "tf_mirrored", "tf_multi_worker_mirrored", "tf_central_storage", "tf_parameter_server"}
    names |= {"tf_tpu"}
    assert set(planned(decide())) == names
    with pytest.raises(PlanError, match=r"is for models of torch.*, and this one is of tensorflow") as caught:
        decide(strategy="data_parallel")
    assert all(name in str(caught.value) for name in names)
    with pytest.raises(PlanError, match="is for models of tensorflow"):
        decide(profile=ModelProfile(framework="torch", layers=(LAYER,)), strategy="tf_mirrored")


def test_one_worker_drives_all_accelerators_of_its_node() -> None:
    found = planned(decide(GPUS))
    for name in ("tf_mirrored", "tf_central_storage"):
        plan = found[name]
        assert isinstance(plan, Plan)
        assert (plan.workers, plan.devices_per_worker, plan.mesh.data_ranks, plan.placement.accelerators) == (
            1,
            4,
            4,
            4,
        )
        assert plan.feed_of(0).data_ranks == range(4)
    several = found["tf_multi_worker_mirrored"]
    assert isinstance(several, Plan)
    assert (several.workers, several.devices_per_worker, several.mesh.data_ranks) == (2, 4, 8)
    assert several.feed_of(1).data_ranks == range(4, 8) and several.placement.accelerators == 4


def test_on_a_cpu_several_devices_are_asked_for() -> None:
    refused = planned(decide())["tf_mirrored"]
    assert isinstance(refused, InfeasiblePlan) and "devices=2" in refused.hint
    plan = decide(devices=2, strategy="tf_central_storage").chosen
    assert (plan.workers, plan.devices_per_worker, plan.placement.accelerators) == (1, 2, 0)
    assert "1 worker x 2 logical devices" in repr(decide(devices=2, strategy="tf_mirrored"))
    with pytest.raises(PlanError, match="one device in each worker of a CPU cluster"):
        decide(devices=2, workers=2, strategy="tf_multi_worker_mirrored")
    with pytest.raises(PlanError, match="workers=2 is pinned"):
        decide(devices=2, workers=2, strategy="tf_mirrored")
    with pytest.raises(PlanError, match="smaller than the 128 data ranks"):
        decide(devices=128, strategy="tf_mirrored")


@pytest.mark.parametrize(
    ("fields", "strategy"),
    [
        ({"cross_device_ops": "hierarchical_copy", "devices": 2}, "tf_mirrored"),
        ({"communication": "ring", "bytes_per_pack": 1 << 20, "workers": 2}, "tf_multi_worker_mirrored"),
    ],
)
def test_the_strategy_that_sums_as_the_job_says_is_chosen(fields: dict[str, Any], strategy: str) -> None:
    sums = {name: value for name, value in fields.items() if name in SUMMED_BY}
    plan = decide(**fields).chosen
    assert plan.strategy == strategy and {name: getattr(plan, name) for name in sums} == sums
    others = {name: item for name, item in planned(decide(**fields)).items() if name != strategy}
    assert all(isinstance(item, InfeasiblePlan) and strategy in item.hint for item in others.values())
    with pytest.raises(PlanError, match=r"it has no .*=.* out, or use"):
        decide(strategy="tf_central_storage", **fields)
    with pytest.raises(PlanError, match="is for models of TensorFlow"):
        decide(profile=ModelProfile(framework="torch", layers=(LAYER,)), **sums)
    alone = job(**fields).on_one_device()
    assert all(alone.get(name) == alone.default(name) for name in SUMMED_BY)


@pytest.mark.parametrize("name", ["cross_device_ops", "communication"])
def test_nccl_needs_gpus(name: str) -> None:
    fields = {name: "nccl", "strategy": SUMMED_BY[name]}
    assert getattr(decide(GPUS, **fields).chosen, name) == "nccl"
    with pytest.raises(PlanError, match=f'{name}="nccl" sums over GPUs, and the cluster has none'):
        decide(**fields, **({"devices": 2} if name == "cross_device_ops" else {"workers": 2}))
    with pytest.raises(JobError, match=f"{name}='ncll': did you mean 'nccl'"):
        job(**{name: "ncll"})


def test_batch_norm_is_refused_but_on_one_device_unless_it_is_accepted() -> None:
    norm = ModelProfile(framework="tensorflow", layers=(LAYER,), inexact=("batch_norm",))
    assert decide(profile=norm).chosen.strategy == "tf_one_device"
    with pytest.raises(PlanError, match="another result than one device"):
        decide(profile=norm, devices=2, strategy="tf_mirrored")
    accepted = decide(profile=norm, devices=2, strategy="tf_mirrored", inexact=("batch_norm",)).chosen
    assert "batch_norm" in accepted.notes[0]


def test_a_worker_with_several_devices_keeps_them_when_the_world_shrinks() -> None:
    plan = decide(GPUS, strategy="tf_multi_worker_mirrored").chosen
    smaller = plan.resized(1)
    assert (smaller.workers, smaller.mesh.data_ranks, smaller.accumulation) == (1, 4, 2)
    mirrored = decide(devices=2, strategy="tf_mirrored").chosen
    assert mirrored.resized(1) == mirrored


def test_the_environments_addresses_are_another_engine() -> None:
    own, given = (
        decide(strategy="tf_multi_worker_mirrored", workers=2, tf_config=where).chosen
        for where in ("own", "environment")
    )
    assert own.engine.endswith(":MultiWorkerMirrored") and given.engine.endswith(":AtGivenAddresses")


def test_a_worker_gives_keras_the_backend_that_the_model_was_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    profile = ModelProfile(framework="torch", layers=(LAYER,), keras_backend="torch")
    plan = decide(profile=profile, strategy="one_device").chosen
    assert plan.keras_backend == "torch"
    engine_class(plan)
    assert os.environ["KERAS_BACKEND"] == "torch"
    engine_class(replace(plan, keras_backend=""))
    assert os.environ["KERAS_BACKEND"] == "torch", "another model says nothing of it"


def test_fit_goes_where_it_is_right() -> None:
    found = planned(decide(run="fit", devices=2, batch_size=24))
    found |= {"tf_multi_worker_mirrored": planned(decide(run="fit", batch_size=25))["tf_multi_worker_mirrored"]}
    engines = {
        "tf_one_device": "keras_fit:FitOneDevice", "tf_mirrored": "keras_fit:FitMirrored",
        "tf_multi_worker_mirrored": "fit_workers:FitMultiWorker",
    }  # fmt: skip
    for name, engine in engines.items():
        plan = found[name]
        assert isinstance(plan, Plan) and plan.engine.endswith(f".{engine}")
    refused = found["tf_central_storage"]
    assert isinstance(refused, InfeasiblePlan) and "wrong metrics" in refused.reason
    assert "leave run= out" in refused.hint
    uneven = planned(decide(run="fit", devices=2, batch_size=25))["tf_mirrored"]
    assert isinstance(uneven, InfeasiblePlan) and "differently on each device" in uneven.reason
    for fields, reason in (({"compile": "xla"}, "XLA has no sums"), ({"devices": 2}, "one in each worker")):
        with pytest.raises(PlanError, match=reason):
            decide(run="fit", strategy="tf_multi_worker_mirrored", workers=2, **fields)
    with pytest.raises(PlanError, match=r'run="fit" is Keras. own, and this model is of torch'):
        decide(profile=ModelProfile(framework="torch", layers=(LAYER,)), run="fit")


@pytest.mark.parametrize(("rows", "fits"), [(48, True), (62, True), (61, False)])
def test_a_last_batch_that_fit_would_weigh_unevenly_is_refused(
    rows: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_preparation, "profile_job", lambda *_: KERAS)
    data = tw.datasets.table({"x": [[1.0]] * rows})
    fields = {"run": "fit", "strategy": "tf_mirrored", "devices": 2, "batch_size": 24, "storage": str(tmp_path)}
    prepared = job_preparation.prepare(job(**{**fields, "train": data}))
    if fits:
        assert job_preparation.plan_for(prepared, CPU).chosen.devices_per_worker == 2
        return
    with pytest.raises(JobError, match="last batch of train has 13 rows"):
        job_preparation.plan_for(prepared, CPU)
    dropped = job_preparation.prepare(job(**{**fields, "train": data, "drop_last": True}))
    assert job_preparation.plan_for(dropped, CPU).chosen.devices_per_worker == 2
    evaluated = job_preparation.prepare(job(**{**fields, "train": data, "drop_last": True, "evaluate": data}))
    assert job_preparation.plan_for(evaluated, CPU).chosen.devices_per_worker == 2


def ready(folder: Path, **fields: Any) -> job_preparation.PreparedJob:
    return job_preparation.prepare(job(storage=str(folder), batch_size=2, workers=1, **fields))


def test_processes_that_all_start_again_cannot_shrink_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_preparation, "profile_job", lambda *_: KERAS)
    data = tw.datasets.table({"x": [[1.0]] * 4, "y": [1.0] * 4})
    fields = {"workers": 2, "min_workers": 1, "on_loss": "shrink", "storage": str(tmp_path), "batch_size": 2}
    prepared = job_preparation.prepare(job(**fields, train=data, targets="y"))
    with pytest.raises(JobError, match='on_loss="shrink" is for torch: after each failure all processes of TensorFlow'):
        job_preparation.plan_for(prepared, CPU)


def test_columns_that_nothing_uses_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_preparation, "profile_job", lambda *_: KERAS)
    data = tw.datasets.table({name: [[1.0]] * 4 for name in ("x", "y", "w", "id")})
    said = "unused columns of train=: {}; inputs=, targets= and sample_weight= name those that the job uses"

    def told(**fields: Any) -> list[str]:
        notes = job_preparation.plan_for(ready(tmp_path, train=data, targets="y", **fields), CPU).chosen.notes
        return [note for note in notes if "unused columns" in note]

    assert told() == [said.format("w, id")]
    assert told(sample_weight="w") == [said.format("id")]
    assert told(loss=None, step=max, inputs=(), optimizer=list) == [], "a step takes what it likes"
    with pytest.raises(JobError) as caught:
        ready(tmp_path, train=data, evaluate=data, sample_weight="v")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "sample_weight='v' is not a column of train", "sample_weight='v' is not a column of evaluate"
    ]  # fmt: skip


def test_a_pipelines_weights_are_used_or_refused(tmp_path: Path) -> None:
    def make() -> Any:
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(([[1.0]] * 4, [1.0] * 4, [2.0] * 4))

    data = tw.datasets.from_tf(make)
    with pytest.raises(JobError, match=r"gives \(x, y, weight\), and nothing uses the weight: set sample_weight="):
        ready(tmp_path, train=data, targets="y")
    assert ready(tmp_path, train=data, targets="y", sample_weight="weight").unused == ()
    assert ready(tmp_path, train=data, targets=("y", "weight")).unused == ()


@pytest.mark.parametrize("fields", [{"sample_weight": "y"}, {"class_weight": {1: 2.0}}])
def test_weights_of_samples_are_for_tensorflow(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_preparation, "profile_job", lambda *_: ModelProfile(framework="torch", layers=(LAYER,)))
    data = tw.datasets.table({"x": [[1.0]] * 4, "y": [1.0] * 4})
    with pytest.raises(JobError, match=r"_weight= is for Keras models on TensorFlow: name the weights in targets="):
        job_preparation.plan_for(ready(tmp_path, train=data, targets="y", **fields), CPU)


def test_a_loss_scale_is_not_for_parameter_servers() -> None:
    scaled = planned(decide(GPUS, replace(KERAS, loss_scale=True)))
    refused = scaled["tf_parameter_server"]
    assert isinstance(refused, InfeasiblePlan) and "mixed_bfloat16" in refused.hint
    assert isinstance(scaled["tf_multi_worker_mirrored"], Plan)


def test_parameter_servers_stand_beside_the_workers_and_are_never_chosen_for_speed() -> None:
    decision = decide(GPUS, strategy="tf_parameter_server")
    plan = decision.chosen
    assert (plan.workers, plan.servers, plan.processes, plan.in_flight, plan.ahead) == (8, 1, 10, 3, 2)
    assert [plan.role_of(rank) for rank in range(4)] == ["chief", "server", "worker", "worker"]
    assert plan.feed_of(0).data_ranks == range(8) and not plan.feed_of(1).data_ranks and not plan.feed_of(9).data_ranks
    assert any("nor twice the same" in note for note in plan.notes) and any(
        "applied twice" in note for note in plan.notes
    )
    assert decide(GPUS).chosen.strategy != "tf_parameter_server"


def test_as_many_servers_as_there_are_links_and_bytes_for() -> None:
    def servers(parameter_bytes: float, **fields: Any) -> int:
        layer = replace(LAYER, parameters=int(parameter_bytes // 4), parameter_bytes=parameter_bytes)
        profile = ModelProfile(framework="tensorflow", layers=(layer,))
        return decide(GPUS, profile, strategy="tf_parameter_server", **fields).chosen.servers

    assert [servers(2.0**19), servers(2.0**20 + 4), servers(2.0**30)] == [1, 2, 2]
    assert servers(2.0**10, plan="servers=4") == 4


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"workers": 1}, "workers=1 is pinned"),
        ({"workers": 2, "devices": 2}, "devices=2 is pinned"),
        ({"workers": 2, "tf_config": "environment"}, "chosen as processes start"),
        ({"workers": 2, "compile": "eager"}, "run compiled functions"),
        ({"workers": 2, "consistency": "ssp(2)"}, "apply each update at once"),
        ({"workers": 2, "wire": "fp16"}, "whole gradients"),
        ({"workers": 2, "run": "fit"}, "makes a data set on each worker"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_parameter_servers_cannot_do_is_said(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        decide(strategy="tf_parameter_server", **fields)


def slice_of(hosts: int, kind: str = "TPU-V4") -> Cluster:
    """A TPU slice as Ray shows it: four chips on each host, the head on the first."""
    shared: dict[str, Any] = {"cpus": 8, "memory_bytes": 2**36, "accelerators": 4, "accelerator": "TPU", "kind": kind}
    heads = [f"TPU-v4-{8 * hosts}-head" if host == 0 else "" for host in range(hosts)]
    return Cluster(nodes=tuple(Node(name=f"host-{host}", head=head, **shared) for host, head in enumerate(heads)))


def test_a_worker_on_each_host_of_a_slice_and_the_first_steps_for_all() -> None:
    alone = decide(slice_of(1)).chosen
    assert (alone.strategy, alone.workers, alone.devices_per_worker, alone.tpu) == ("tf_tpu", 1, 4, "")
    assert alone.engine.endswith("tpu:TPU") and any("not verified on hardware" in note for note in alone.notes)
    plan = decide(slice_of(2), tpu="my-tpu").chosen
    assert plan.engine.endswith("tpu:NamedTPU") and plan.topology == "coordinator"
    assert (plan.workers, plan.processes, plan.servers, plan.mesh.data_ranks) == (2, 2, 0, 8)
    assert plan.feed_of(0).data_ranks == range(8) and not plan.feed_of(1).data_ranks
    assert node_bundles(plan.placement, (1, 1)) == [
        {"CPU": plan.placement.cpus, "TPU": 4.0, "TPU-v4-16-head": 1.0},
        {"CPU": plan.placement.cpus, "TPU": 4.0},
    ]
    assert device_names(plan) == ("tpu:0", "tpu:1", "tpu:2", "tpu:3")


def test_the_name_of_a_tpu_reaches_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_NAME", "of the cluster")
    plan = replace(decide(strategy="tf_one_device").chosen, tpu="my-tpu")
    engine_class(plan)
    assert os.environ["TPU_NAME"] == "my-tpu"


@pytest.mark.parametrize(
    ("cluster", "fields", "reason"),
    [
        (CPU, {}, "the cluster has no TPU"),
        (slice_of(2), {}, "found by the slice's name"),
        (slice_of(4), {"tpu": "my-tpu", "workers": 2}, "the slice has 4 hosts"),
        (slice_of(1, "TPU-V3"), {}, "two devices to TensorFlow"),
        (slice_of(1), {"min_workers": 1}, "the number of hosts of a slice is fixed"),
    ],
    ids=["none", "unnamed", "some", "two-cores", "elastic"],
)
def test_what_a_tpu_needs_is_said(cluster: Cluster, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        decide(cluster, strategy="tf_tpu", **fields)


def test_other_strategies_send_a_keras_model_on_tpus_to_its_own() -> None:
    found = planned(decide(slice_of(1)))
    assert [name for name, item in found.items() if isinstance(item, Plan)] == ["tf_tpu"]
    assert all("own strategy" in found[name].reason for name in ("tf_one_device", "tf_mirrored"))  # type: ignore[union-attr]
