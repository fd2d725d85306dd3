"""cluster.yaml: Ray's own validation, and what that lets pass. Nothing here talks to a cloud."""

from __future__ import annotations

import copy
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).resolve().parents[2]
Config = dict[str, Any]

# Ray takes any key below provider; these are the ones its AWS provider reads.
PROVIDER_KEYS = {
    "type",
    "region",
    "availability_zone",
    "cache_stopped_nodes",
    "use_internal_ips",
    "security_group",
    "key_pair",
    "cloudwatch",
}
# Parameters of EC2's RunInstances that make sense here.
NODE_KEYS = {
    "InstanceType",
    "ImageId",
    "KeyName",
    "IamInstanceProfile",
    "BlockDeviceMappings",
    "InstanceMarketOptions",
    "SubnetIds",
    "SecurityGroupIds",
    "NetworkInterfaces",
    "Placement",
}
INSTANCE_TYPE = re.compile(
    r"[a-z]{1,3}\d[a-z]*(-[a-z0-9]+)?\.(metal|((2|3|4|6|8|9|10|12|16|18|24|32|48|56|96)?x)?large)"
)
GPU_FAMILIES = ("g4dn", "g5", "g6", "g6e", "p3", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200")


def load() -> Config:
    """The file, as Ray reads it."""
    config: Config = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    return config


def problems(config: Config) -> list[str]:
    """What Ray's validation does not see."""
    types = config["available_node_types"]
    found = [f"provider.{key} is unknown" for key in config["provider"].keys() - PROVIDER_KEYS]
    if config.get("head_node_type") not in types:
        found.append("head_node_type is missing or not defined")
    if not re.fullmatch(r"[a-z]{2}(-[a-z]+)+-\d", config["provider"].get("region", "")):
        found.append("provider.region is no region")
    for name, kind in types.items():
        node = kind["node_config"]
        found += [f"{name}.{key} is unknown" for key in node.keys() - NODE_KEYS]
        if not INSTANCE_TYPE.fullmatch(node.get("InstanceType", "")):
            found.append(f"{name}: no such InstanceType")
        if "ssh_private_key" in config["auth"] and not node.get("KeyName"):
            found.append(f"{name} lacks the KeyName of auth.ssh_private_key")
        if not kind.get("min_workers", 0) <= kind.get("max_workers", 0) <= config["max_workers"]:
            found.append(f"{name}: min_workers <= max_workers <= max_workers of all is not so")
    return found


def node_of(config: Config) -> Config:
    """The EC2 parameters of the GPU nodes."""
    node: Config = config["available_node_types"]["gpu"]["node_config"]
    return node


def test_ray_accepts_the_file() -> None:
    prepared = prepare_config(load())
    validate_config(prepared)
    assert prepared["available_node_types"]["head"]["max_workers"] == 0, "the head is no worker"
    for commands in ("head_setup_commands", "worker_setup_commands"):
        assert any("pip install" in command for command in prepared[commands]), f"{commands} install nothing"


def test_what_ray_lets_pass_is_right_too() -> None:
    assert problems(load()) == []


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda config: config.pop("head_node_type"), "head_node_type"),
        (lambda config: config.update(head_node_type="haed"), "head_node_type"),
        (lambda config: config["provider"].update(regoin="us-west-2"), "provider.regoin"),
        (lambda config: config["provider"].update(region="Oregon"), "provider.region"),
        (lambda config: node_of(config).update(InstanceType="g5.huge"), "gpu: no such"),
        (lambda config: node_of(config).pop("KeyName"), "gpu lacks the KeyName"),
        (lambda config: node_of(config).update(ImageID="ami-1"), "gpu.ImageID"),
        (lambda config: config["available_node_types"]["gpu"].update(min_workers=9), "gpu: min_workers"),
    ],
)
def test_mistakes_that_ray_lets_pass_are_found(break_it: Callable[[Config], object], message: str) -> None:
    config = copy.deepcopy(load())
    break_it(config)
    assert [problem for problem in problems(config) if problem.startswith(message)]


def test_worker_nodes_have_gpus_and_the_head_none() -> None:
    types = load()["available_node_types"]
    families = {name: kind["node_config"]["InstanceType"].split(".")[0] for name, kind in types.items()}
    assert families["gpu"] in GPU_FAMILIES
    assert families["head"] not in GPU_FAMILIES


def test_containers_hold_the_ray_that_was_tested() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (ray,) = [str(Requirement(pin).specifier).removeprefix("==") for pin in pins if pin.startswith("ray==")]
    docker = load()["docker"]
    assert docker["image"] == f"rayproject/ray:{ray}-py311-gpu"
    assert docker["head_image"] == f"rayproject/ray:{ray}-py311-cpu"


def test_every_node_installs_the_checkout_under_the_constraints() -> None:
    config = load()
    ((remote, local),) = config["file_mounts"].items()
    assert local == "."
    install = config["setup_commands"][0]
    assert install.endswith(f"--constraint {remote}/constraints.txt {remote}")


def test_silent_nodes_are_found_within_seconds() -> None:
    start = " ".join(load()["head_start_ray_commands"])
    settings = {name: int(value) for name, value in re.findall(r"RAY_health_check_(\w+)=(\d+)", start)}
    assert settings == {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in start
    assert "--dashboard-host=127.0.0.1" in start, "the dashboard takes jobs from anyone who reaches it"


def test_the_guard_of_the_head_is_there_to_be_uncommented() -> None:
    text = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
    changed = text.replace("  # - nohup", "  - nohup").replace(
        "    ray start --head", "    RAY_REDIS_ADDRESS=redis:1 ray start --head"
    )
    commands = yaml.safe_load(changed)["head_start_ray_commands"]
    assert len(commands) == 3 and "RAY_REDIS_ADDRESS=redis:1 ray start --head" in commands[1]
    found = re.fullmatch(r"nohup python -m (\S+) >/tmp/headguard.log 2>&1 </dev/null &", commands[2])
    assert found and importlib.util.find_spec(found[1])
