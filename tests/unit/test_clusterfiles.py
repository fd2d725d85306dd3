"""Cluster files are looked over: those that come with the package are right, and each mistake is found where it is."""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import yaml

from trainwright.cluster_files.placeholders import ClusterFileError
from trainwright.cluster_files.ray_up import instance_types, parse_tpu_slice
from trainwright.cluster_files.validation import check, check_text
from trainwright.cluster_files.yaml_checks import read_yaml
from trainwright.core.cluster import ACCELERATORS
from trainwright.core.errors import Finding

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "clusters"
RAY_UP = ("aws.yaml", "spot.yaml", "gcp.yaml", "tpu.yaml")
KUBERNETES = ("kuberay-cluster.yaml", "kuberay-job.yaml")
LOCAL = """
cluster_name: here
provider:
  type: local
  head_ip: 10.0.0.1
  worker_ips: [10.0.0.2, 10.0.0.3]
auth:
  ssh_user: me
  ssh_private_key: ~/.ssh/key
file_mounts:
  ~/.ray/auth_token: ~/.ray/auth_token
head_start_ray_commands:
  - >-
    RAY_enable_autoscaler_v2=0 RAY_AUTH_MODE=token RAY_health_check_initial_delay_ms=1000
    RAY_health_check_period_ms=1000 RAY_health_check_timeout_ms=2000 RAY_health_check_failure_threshold=3
    ray start --head --port=6379
worker_start_ray_commands:
  - RAY_AUTH_MODE=token ray start --address=$RAY_HEAD_IP:6379
"""
BATCH = """#!/bin/bash
#SBATCH --nodes=3
#SBATCH --time=01:00:00
#SBATCH --gpus-per-node=2
export RAY_AUTH_MODE=token
export RAY_health_check_initial_delay_ms=1000 RAY_health_check_period_ms=1000
export RAY_health_check_timeout_ms=2000 RAY_health_check_failure_threshold=3
srun --nodes=3 ray symmetric-run --address "$head:6379" --min-nodes 3 -- \\
    python -m trainwright fit job.py
"""


@cache
def text_of(name: str) -> str:
    own = {"local": LOCAL, "batch": BATCH}
    return own[name] if name in own else (CLUSTERS / name).read_text(encoding="utf-8")


def wrong(found: list[Finding]) -> list[Finding]:
    return [one for one in found if one.verdict == "bad"]


@pytest.mark.parametrize("path", sorted(p.name for p in CLUSTERS.iterdir() if p.suffix in (".yaml", ".sbatch")))
def test_files_that_come_along_are_right(path: str) -> None:
    assert wrong(check(CLUSTERS / path)) == []


@pytest.mark.parametrize("text", [LOCAL, BATCH])
def test_hosts_and_scripts_are_looked_over_too(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text, encoding="utf-8")
    assert wrong(check(tmp_path / "file")) == []


def test_there_is_one_file_for_aws() -> None:
    assert (CLUSTERS / "aws.yaml").is_symlink()
    assert (CLUSTERS / "aws.yaml").resolve() == ROOT / "cluster.yaml"


# File, what is replaced, by what: subject, where and a word of the remedy of the one bad finding.
MISTAKES = [
    ("aws.yaml", "head_node_type: head\n", "", "head", "", "head_node_type"),
    ("aws.yaml", "head_node_type: head\n", "head_node_type: haed\n", "head", "head_node_type", "head"),
    ("aws.yaml", "region: us-west-2", "region: Oregon", "places", "provider.region", "us-west-2"),
    ("aws.yaml", "  region:", "  regoin:", "keys", "provider", "region"),
    ("aws.yaml", "type: aws", "type: asw", "provider", "provider.type", "aws"),
    ("aws.yaml", "ssh_user", "ssh_usr", "keys", "auth.ssh_usr", "ssh_user"),
    ("aws.yaml", "  pull_before_run", "  pul_before_run", "keys", "docker.pul_before_run", "pull_before_run"),
    ("aws.yaml", "idle_timeout_minutes: ", "idle_timeout_minutes: soon ", "types", "idle_timeout_minutes", "number"),
    ("aws.yaml", "idle_timeout_minutes: ", "idle_timeout_minutes: -1 #", "values", "idle_timeout", "at least 0"),
    ("aws.yaml", "min_workers: 2", "min_workres: 2", "keys", "gpu.min_workres", "min_workers"),
    ("aws.yaml", "min_workers: 2", "min_workers: 9", "nodes", "available_node_types.gpu", "min_workers"),
    ("aws.yaml", "--dashboard-host=127.0.0.1", "--dashboard-host=0.0.0.0", "dashboard", "head_start", "127.0.0.1"),
    ("aws.yaml", "--object-store-memory=$", "--object-store-memry=$", "options", "start_ray", "object-store-memory"),
    ("aws.yaml", "2.60.0-py311-gpu", "2.44.0-py311-gpu", "images", "docker.image", "2.60.0"),
    ("aws.yaml", "  ~/.ray/auth_token: ~/.ray/auth_token\n", "", "token", "file_mounts", "auth_token"),
    ("aws.yaml", "      KeyName: *key\n", "", "keys of ssh", "gpu.node_config", "KeyName"),
    ("aws.yaml", "max_workers: 8\n\n", "max_workers: 8\nmax_workers: 9\n\n", "keys", "", "one of the two"),
    ("aws.yaml", "provider:", "provider: [", "YAML", "", "correct"),
    ("spot.yaml", "      KeyName: &key", "      InstanceMarketOptions: {MarketType: spot}\n      KeyName: &key",
     "head", "head.node_config", "on demand"),
    ("gcp.yaml", "      GPU: 1\n", "", "machines", "available_node_types.gpu", "GPU: 1"),
    ("gcp.yaml", "us-central1-a", "us-west1-a", "places", "availability_zone", "us-central1"),
    ("gcp.yaml", "  project_id: PROJECT\n", "", "keys", "provider", "project_id"),
    ("tpu.yaml", "v5litepod-16\n", "v5litpod-8\n", "machines", "acceleratorType", "v5litepod-8"),
    ("local", "RAY_enable_autoscaler_v2=0 ", "", "autoscaler", "head_start", "RAY_enable_autoscaler_v2=0"),
    ("local", "head_ip:", "haed_ip:", "keys", "provider", "head_ip"),
    ("local", "file_mounts:", "available_node_types: {}\nfile_mounts:", "nodes", "available_node_types", "out"),
    ("local", "RAY_AUTH_MODE=token ray start --ad", "ray start --ad", "token", "worker_start", "RAY_AUTH_MODE"),
    ("batch", "#SBATCH --nodes=3\n", "", "nodes", "", "hosts"),
    ("batch", "ray symmetric-run", "ray something", "start", "", "symmetric-run"),
    ("batch", "export RAY_AUTH_MODE=token\n", "", "token", "symmetric-run", "RAY_AUTH_MODE"),
    ("batch", "--min-nodes", "--min-noeds", "options", "symmetric-run", "min-nodes"),
    ("kuberay-cluster.yaml", "kind: RayCluster", "kind: RayClutser", "kinds", "kind", "RayCluster"),
    ("kuberay-cluster.yaml", "mode: token", "mode: disabled", "token", "authOptions", "token"),
    ("kuberay-cluster.yaml", "ClusterIP", "LoadBalancer", "dashboard", "serviceType", "port-forward"),
    ("kuberay-cluster.yaml", "minReplicas: 2", "minReplicas: 9", "nodes", "workerGroupSpecs[0]", "minReplicas"),
    ("kuberay-cluster.yaml", 'rayVersion: "2.60.0"', 'rayVersion: "2.52.0"', "images", "rayVersion", "2.60.0"),
    ("kuberay-cluster.yaml", "{ name: spill, mountPath: /spill }", "{ name: spil, mountPath: /spill }", "volumes",
     "volumeMounts", "spill"),
    ("kuberay-cluster.yaml", "num-cpus:", "num-cpu:", "options", "rayStartParams.num-cpu", "num-cpus"),
    ("kuberay-job.yaml", "entrypoint: python", "entrypiont: python", "keys", "spec", "entrypoint"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new", "subject", "where", "remedy"), MISTAKES)
def test_each_mistake_is_found_where_it_is(
    name: str, old: str, new: str, subject: str, where: str, remedy: str
) -> None:
    text = text_of(name)
    assert old in text
    found = [one for one in wrong(check_text(text.replace(old, new, 1), "f.yaml")) if one.subject == subject]
    assert found, wrong(check_text(text.replace(old, new, 1), "f.yaml"))
    assert any(where in one.where and remedy in one.remedy for one in found), found
    if old in text and "\n" not in old and subject not in ("nodes", "images", "YAML"):
        line = text[: text.index(old)].count("\n") + 1
        assert any(abs(int(re.findall(r":(\d+)", one.where)[0]) - line) <= 9 for one in found)


DOUBTFUL = [
    ("aws.yaml", "RAY_health_check_period_ms=1000", "", "health checks"),
    ("aws.yaml", "g5.2xlarge #", "q9z.2xlarge #", "machines"),
    ("aws.yaml", "g5.2xlarge #", "g5.2xlrage #", "machines"),
    ("aws.yaml", "g5.2xlarge #", "c7i.large #", "machines"),  # exists, but the list does not have it
    ("gcp.yaml", "g2-standard-8 #", "g2-stadnard-8 #", "machines"),
    ("gcp.yaml", "g2-standard-8 #", "n4-standard-8 #", "machines"),
    ("gcp.yaml", "GPU: 1\n", "GPU: 4\n", "machines"),
    ("kuberay-job.yaml", "shutdownAfterJobFinishes: true", "shutdownAfterJobFinishes: false", "price"),
    ("kuberay-cluster.yaml", "mountPath: /dev/shm", "mountPath: /shm", "shared memory"),
    (
        "kuberay-cluster.yaml",
        "{ name: RAY_health_check_period_ms",
        "{ name: RAY_health_check_perod_ms",
        "health checks",
    ),
    ("batch", "#SBATCH --time=01:00:00\n", "", "time"),
]


@pytest.mark.parametrize(("name", "old", "new", "subject"), DOUBTFUL)
def test_what_works_but_should_not_be_left_is_doubtful(name: str, old: str, new: str, subject: str) -> None:
    text = text_of(name)
    assert old in text and subject not in {one.subject for one in check_text(text, "f") if one.verdict == "doubtful"}
    found = check_text(text.replace(old, new, 1), "f")
    assert subject in {one.subject for one in found if one.verdict == "doubtful"}
    assert wrong(found) == []


SECRETS = [
    ("aws.yaml", "type: aws", "type: aws\n  aws_credentials: {aws_access_key_id: AKIA" + "A" * 16 + "}"),
    ("aws.yaml", "- ray stop", "- export RAY_AUTH_TOKEN=0123456789abcdef"),
    ("aws.yaml", "- ray stop", "- ray start --head --redis-password=hunter2"),
    ("batch", "export RAY_AUTH_MODE=token", "export RAY_AUTH_MODE=token HF_TOKEN=hf_" + "a" * 34),
    ("kuberay-cluster.yaml", "          env:\n",
     "          env:\n              - { name: WANDB_API_KEY, value: abc }\n"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new"), SECRETS)
def test_secrets_are_found_and_not_told(name: str, old: str, new: str) -> None:
    found = [one for one in wrong(check_text(text_of(name).replace(old, new, 1), "f")) if one.subject == "secrets"]
    assert found
    assert not any(word in f"{one.what}{one.remedy}" for one in found for word in ("hunter2", "AKIA", "hf_a", "0123"))


def test_a_secret_of_kubernetes_is_no_place_either() -> None:
    text = "apiVersion: v1\nkind: Secret\nmetadata: {name: a}\nstringData: {auth_token: b}\n"
    assert [one.subject for one in wrong(check_text(text, "f"))] == ["secrets"]


def test_the_token_may_be_turned_on_for_the_whole_container() -> None:
    text = text_of("aws.yaml").replace("    RAY_AUTH_MODE=token\n", "")
    assert wrong(check_text(text, "f")) == []
    off = text.replace(
        "    - --env=RAY_AUTH_MODE=token # for commands typed in the container: ray exec, ray attach\n", ""
    )
    assert [one.subject for one in wrong(check_text(off, "f"))] == ["token", "token"]


def test_a_slice_has_several_hosts() -> None:
    names = ("v4-8", "v4-16", "v5litepod-8", "v5litepod-16", "v9-8")
    assert [getattr(parse_tpu_slice(name), "hosts", None) for name in names] == [1, 2, 1, 4, None]


def test_the_price_counts_the_head_and_the_dearest_nodes_that_may_be() -> None:
    (found,) = [one for one in check(CLUSTERS / "aws.yaml") if one.subject == "price"]
    assert "$2.81 to $10.08" in found.what  # 0.384 + 2 x 1.212, 0.384 + 8 x 1.212


def test_machines_carry_accelerators_of_the_table() -> None:
    listed = [machine for cloud in ("aws", "gcp", "gpu") for machine in instance_types(cloud).values()]
    assert len(listed) > 100
    assert {machine.kind for machine in listed if machine.kind} <= set(ACCELERATORS)
    assert all((machine.accelerators > 0) == bool(machine.kind) for machine in listed)


def test_values_that_only_the_user_knows_are_asked_for() -> None:
    open_ones = {one.what.split()[0] for one in check(CLUSTERS / "aws.yaml") if one.subject == "CHANGE"}
    assert open_ones == {"ssh_key", "key_name"}


@pytest.mark.parametrize("name", ["aws.yaml", "gcp.yaml", "spot.yaml", "tpu.yaml", "local.yaml"])
def test_a_wheel_or_token_that_is_not_there_is_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(CLUSTERS / name, tmp_path / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    asked = {"files", "token"}
    found = check(tmp_path / "mine.yaml")
    assert asked <= {one.subject for one in found if one.verdict == "doubtful"}
    for file in ("dist/trainwright-1-py3-none-any.whl", "dist/constraints.txt", ".ray/auth_token"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert not asked & {one.subject for one in check(tmp_path / "mine.yaml")}
    (tmp_path / "dist/trainwright-0-py3-none-any.whl").touch()
    assert "files" in {one.subject for one in check(tmp_path / "mine.yaml")}, "one of two would be installed"


def test_what_ray_itself_refuses_is_told(tmp_path: Path) -> None:
    text = text_of("spot.yaml").replace("    min_workers: 0\n", "    min_workers: 8\n")  # in sum more than there may be
    (tmp_path / "f").write_text(text, encoding="utf-8")
    assert [one.subject for one in wrong(check(tmp_path / "f"))] == ["Ray"]


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterFileError, match="cannot be read"):
        check(tmp_path / "none.yaml")


@pytest.mark.parametrize("text", ["", "- a\n", "just words", "a: b\n", "\t", "kind: Pod\napiVersion: v1\n"])
def test_other_files_are_no_crash(text: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text(text, encoding="utf-8")
    assert check(tmp_path / "f")


def test_references_are_followed_and_repeated_keys_told() -> None:
    (document,) = read_yaml("a: &x {b: 1}\nc:\n  <<: *x\n  d: 2\ne: *x\n", "f")
    assert document.value == yaml.safe_load("a: {b: 1}\nc: {b: 1, d: 2}\ne: {b: 1}")
    assert document.fields["c"].fields["d"].where == "f:4, c.d"
