"""What an autoscaler may start, and what is told of those on their way."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support.processes import ROOT
from trainwright.core.errors import ResourceError
from trainwright.core.events import Event, Formed, Noted, RunStarted, Waiting
from trainwright.ray_cluster import discovery
from trainwright.ray_cluster.discovery import (
    HEAD_RESOURCE,
    AutoscalerLimits,
    PendingNodes,
    PendingNodeWatcher,
    parse_autoscaler_report,
    parse_cluster_status,
    read_config,
)

CONFIG: dict[str, Any] = {
    "head_node_type": "head",
    "max_workers": 5,
    "available_node_types": {
        "head": {"resources": {"CPU": 4}, "max_workers": 0},
        "gpu": {"resources": {"CPU": 8, "GPU": 4, "accelerator_type:A10G": 1}, "max_workers": 4},
        "cpu": {"resources": {"CPU": 16}, "max_workers": 3},
        "unknown": {"resources": {}, "max_workers": 9},
    },
}


def running(kind: str, labelled: bool = True) -> dict[str, Any]:
    """A node as Ray lists it."""
    resources = {**CONFIG["available_node_types"][kind]["resources"], "memory": 1e9}
    return {"Resources": resources, "Labels": {"ray.io/node-group": kind} if labelled else {}}


@pytest.mark.parametrize("labelled", [True, False], ids=["newer", "older"])
def test_what_runs_counts_against_the_limits(labelled: bool) -> None:
    nodes = [{"Resources": {HEAD_RESOURCE: 1.0, "CPU": 4}}, running("gpu", labelled), running("cpu", labelled)]
    assert [each.name for each in AutoscalerLimits.of(CONFIG).left(nodes)] == ["gpu", "gpu", "gpu"]


@given(st.lists(st.sampled_from(["gpu", "cpu"]), max_size=9))
def test_no_limit_is_passed(kinds: list[str]) -> None:
    left = [each.name for each in AutoscalerLimits.of(CONFIG).left([running(kind) for kind in kinds])]
    total, there = Counter(left) + Counter(kinds), Counter(kinds)
    assert not left or len(kinds) + len(left) <= CONFIG["max_workers"]
    for kind in ("gpu", "cpu"):
        assert total[kind] <= max(there[kind], CONFIG["available_node_types"][kind]["max_workers"])


def process(folder: Path, number: int, *words: str) -> None:
    """An entry of /proc."""
    (folder / str(number)).mkdir()
    (folder / str(number) / "cmdline").write_bytes("\0".join(words).encode())


def test_the_monitor_of_this_cluster_names_the_file(tmp_path: Path) -> None:
    file, other = tmp_path / "mine.yaml", tmp_path / "other.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    other.write_text("{}")
    process(tmp_path, 7, "python", "monitor.py", "--gcs-address=10.0.0.1:6380", f"--autoscaling-config={other}")
    process(tmp_path, 8, "python", "monitor.py", "--gcs-address=10.0.0.2:6379", f"--autoscaling-config={file}")
    process(tmp_path, 9, "python", "log_monitor.py", "--gcs-address=10.0.0.1:6381")
    assert read_config("10.0.0.2:6379", tmp_path) == read_config("head:6379", tmp_path) == CONFIG
    assert read_config("10.0.0.1:6381", tmp_path) is None


def test_a_head_without_trainwright_can_say_it(tmp_path: Path) -> None:
    from ray import cloudpickle

    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    process(tmp_path, 8, "python", "monitor.py", "--gcs-address=10.0.0.2:6379", f"--autoscaling-config={file}")
    with discovery.pickle_by_value():
        (tmp_path / "function").write_bytes(cloudpickle.dumps(read_config))
    without = f"""
import sys
sys.modules["trainwright"] = None
import json, pathlib, pickle
there = pathlib.Path({str(tmp_path)!r})
print(json.dumps(pickle.loads((there / "function").read_bytes())("10.0.0.2:6379", there)))
"""
    said = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(said.stdout) == CONFIG


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A pod of KubeRay's: what the server answers is put into the list."""
    from ray.autoscaler._private.kuberay import node_provider

    (tmp_path / "namespace").write_text("team\n")
    monkeypatch.setattr(discovery, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("RAY_CLUSTER_NAME", "mine")
    answers: list[Any] = []

    class Client:
        def __init__(self, namespace: str) -> None:
            assert namespace == "team"

        def get(self, path: str) -> Any:
            assert path == "rayclusters/mine"
            if isinstance(answers[0], Exception):
                raise answers[0]
            return answers[0]

    monkeypatch.setattr(node_provider, "KubernetesHttpApiClient", Client)
    yield answers


def test_on_kubernetes_the_cluster_itself_says_it(kubernetes: list[Any]) -> None:
    """With our own manifest."""
    manifests = list(yaml.safe_load_all((ROOT / "clusters" / "kuberay-cluster.yaml").read_text()))
    cluster = next(each for each in manifests if each["kind"] == "RayCluster")
    cluster["metadata"]["namespace"] = "team"
    kubernetes.append(cluster)
    found = AutoscalerLimits.of(read_config("10.0.0.1:6379") or {})
    (kind,) = found.types
    group = cluster["spec"]["workerGroupSpecs"][0]
    assert (kind.name, kind.most) == (group["groupName"], group["maxReplicas"]) and kind.resources["GPU"] > 0
    cluster["spec"]["enableInTreeAutoscaling"] = False
    assert read_config("10.0.0.1:6379") is None


def test_a_cluster_that_may_not_be_read_starts_nothing(kubernetes: list[Any]) -> None:
    import requests

    kubernetes.append(requests.HTTPError(response=SimpleNamespace(status_code=403)))  # type: ignore[arg-type]
    assert read_config("10.0.0.1:6379") is None
    kubernetes[0] = requests.HTTPError(response=SimpleNamespace(status_code=500))  # type: ignore[arg-type]
    with pytest.raises(requests.HTTPError):
        read_config("10.0.0.1:6379")


def test_the_newer_autoscaler_is_understood() -> None:
    of = SimpleNamespace
    status = of(
        pending_launches=[of(ray_node_type_name="gpu", count=2)],
        pending_nodes=[of(ray_node_type_name="gpu"), of(ray_node_type_name="cpu")],
        failed_launches=[of(ray_node_type_name="big", count=1, details=""), of(ray_node_type_name="big", details="")],
    )
    assert str(parse_cluster_status(status)) == (
        "4 nodes (2 gpu asked for, 1 cpu booting, 1 gpu booting); "
        "none came for big: the provider refused (monitor.log on the head says why)"
    )


def test_the_older_autoscaler_is_understood() -> None:
    """As Ray 2.60 wrote it."""
    report = {
        "pending_launches": {"gpu": 1},
        "pending_nodes": [["10.0.0.7", "cpu", "setting-up"]],
        "failed_nodes": [["10.0.0.9", "cpu"]],
        "node_availability_summary": {
            "node_availabilities": {
                "cpu": {"is_available": True, "unavailable_node_information": None},
                "rare": {
                    "is_available": False,
                    "unavailable_node_information": {"category": "InsufficientCapacity", "description": "no rare"},
                },
            }
        },
    }
    told = parse_autoscaler_report(json.loads(json.dumps({"autoscaler_report": report})))
    assert str(told) == (
        "2 nodes (1 gpu asked for, 1 cpu booting); none came for 1 cpu: its set-up failed on 10.0.0.9; "
        "none came for rare: InsufficientCapacity no rare"
    )
    assert parse_autoscaler_report({}) == PendingNodes()


class Scene:
    """A run with a lookout that sees what it is given, one thing after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(discovery, "LOOK_S", 0.001)
        self.seen: queue.SimpleQueue[PendingNodes | Exception] = queue.SimpleQueue()
        self.told: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.lookout = PendingNodeWatcher(self.hear, self.see)
        self.lookout.on(RunStarted())

    def hear(self, event: Event) -> None:
        self.lookout.on(event)
        self.told.put(event)

    def see(self) -> PendingNodes:
        found = self.seen.get(timeout=10)
        if isinstance(found, Exception):
            raise found
        return found

    def after(self, found: PendingNodes | Exception) -> Event:
        self.seen.put(found)
        return self.told.get(timeout=10)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """A query that failed is reported; the next one may succeed."""
    made = Scene(monkeypatch)
    yield made
    assert made.after(RuntimeError("no head")) == Noted(text="cannot read which nodes the cluster is starting: no head")
    made.seen.put(RuntimeError("no head"))  # reported once
    made.lookout.on(Formed())
    assert made.after(PendingNodes(asked={"more": 3})) == Noted(text="the cluster starts 3 nodes (3 more asked for)")
    made.lookout.close()


def test_before_the_first_step_a_run_waits_for_nodes(scene: Scene) -> None:
    scene.lookout.on(Waiting(what="2 workers to start", deadline_s=100))
    coming = scene.after(PendingNodes(asked={"gpu": 2}))
    assert isinstance(coming, Waiting) and coming.what == "2 nodes (2 gpu asked for)" and 90 < coming.deadline_s <= 100
    scene.seen.put(PendingNodes(asked={"gpu": 2}))  # nothing new
    booting = scene.after(PendingNodes(booting={"gpu": 2}))
    assert isinstance(booting, Waiting) and booting.what == "2 nodes (2 gpu booting)"
    there = scene.after(PendingNodes())
    assert isinstance(there, Waiting) and there.what == "2 workers to start" and there.deadline_s <= booting.deadline_s


def test_later_it_is_a_note(scene: Scene) -> None:
    scene.lookout.on(Waiting(what="2 workers to start", deadline_s=100))
    scene.lookout.on(Formed())
    assert scene.after(PendingNodes(asked={"gpu": 1})) == Noted(text="the cluster starts 1 node (1 gpu asked for)")
    scene.seen.put(PendingNodes())


@pytest.mark.parametrize("cpus", [4.0, 0.0], ids=["fits", "nothing runs"])
def test_what_cannot_be_read_refuses_only_a_run_that_needs_it(monkeypatch: pytest.MonkeyPatch, cpus: float) -> None:
    import ray

    def unreadable(nodes: Any) -> None:
        raise ResourceError("permission denied", where="the head")

    alive = {"Alive": True, "NodeID": "1", "NodeManagerHostname": "a", "Resources": {"CPU": cpus}, "Labels": {}}
    monkeypatch.setattr(ray, "nodes", lambda: [alive])
    monkeypatch.setattr(discovery, "autoscaler_limits", unreadable)
    if cpus:
        assert discovery.discover(possible=True).unseen == "permission denied (the head)"
    else:
        with pytest.raises(ResourceError, match="permission denied"):
            discovery.discover(possible=True)
