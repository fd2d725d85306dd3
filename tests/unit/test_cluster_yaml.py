"""cluster.yaml: Ray's own validation, and what the file promises. Nothing here talks to a cloud."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).resolve().parents[2]
Config = dict[str, Any]

GPU_FAMILIES = ("g4dn", "g5", "g6", "g6e", "p3", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200")


def load() -> Config:
    """The file, as Ray reads it."""
    config: Config = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    return config


def test_ray_accepts_the_file() -> None:
    prepared = prepare_config(load())
    validate_config(prepared)
    assert prepared["available_node_types"]["head"]["max_workers"] == 0, "the head is no worker"
    for commands in ("head_setup_commands", "worker_setup_commands"):
        assert any("pip install" in command for command in prepared[commands]), f"{commands} install nothing"


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


def test_every_node_installs_the_wheel_under_the_constraints() -> None:
    config = load()
    remote, token = config["file_mounts"]
    assert config["file_mounts"][remote] == "dist" and token == "~/.ray/auth_token"
    anew, needed = [command for command in config["setup_commands"] if "pip install" in command]
    assert anew.endswith(f"--force-reinstall --no-deps {remote}/*.whl")
    assert needed.endswith(f'--constraint {remote}/constraints.txt "$(echo {remote}/*.whl)[torch,tensorflow]"')


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
    found = re.fullmatch(r"nohup python -m (\S+) >/tmp/gcs_restarter.log 2>&1 </dev/null &", commands[2])
    assert found and importlib.util.find_spec(found[1])
