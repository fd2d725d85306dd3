"""Tensor parallelism and its products with data, shard and pipeline: a small language model, as on one device."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.support.conformance import problems, torch_case
from tests.support.conformance.harness import Pool, World
from tests.support.conformance.language_model import Language
from tests.support.conformance.problems import PROBLEMS
from tests.support.conformance.torch_case import adamw
from trainwright.core.data import StepReport
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Mesh
from trainwright.strategies.torch.tensor_parallel.sharded_tensor import ShardedTensor

ENGINE = "trainwright.strategies.torch"


# the mesh, the schedule, what is sharded, and the most of the model's numbers that a rank may hold
PRODUCTS: Mapping[str, tuple[Mesh, str, int, float]] = {
    "tp": (Mesh(tensor=2), "", 0, 0.62),
    "fsdp x tp": (Mesh(shard=2, tensor=2), "", 3, 0.33),
    "dp x fsdp x tp": (Mesh(data=2, shard=2, tensor=2), "", 3, 0.33),
    "fsdp x pp": (Mesh(pipeline=2, shard=2), "1f1b", 1, 0.33),
    "pp x tp": (Mesh(pipeline=2, tensor=2), "interleaved", 0, 0.42),
    "dp x pp x tp": (Mesh(pipeline=2, data=2, tensor=2), "gpipe", 0, 0.42),
    "fsdp x pp x tp": (Mesh(pipeline=2, shard=2, tensor=2), "1f1b", 1, 0.22),
}

LARGER = ("dp x fsdp x tp", "dp x pp x tp", "fsdp x tp", "pp x tp")  # eight ranks, or a part of a larger product

SEQUENCE = ("fsdp x tp", "pp x tp")  # tokens are divided between the layers that are


def numbers_of(files: Mapping[str, bytes]) -> int:
    """Of the model, in the files of one rank."""
    (facts,) = [json.loads(data)["tensors"]["model"] for name, data in files.items() if name.endswith(".json")]
    return sum(math.prod(stop - start for start, stop in each["held"]) for each in facts.values())


def engine_of(mesh: Mesh) -> str:
    if mesh.pipeline > 1:
        return f"{ENGINE}.engines.pipeline:Pipeline"
    return f"{ENGINE}.engines.fsdp:Sharded" if mesh.shard > 1 else f"{ENGINE}.engines.tensor_parallel:TensorParallel"


def spec(model: Any, **fields: Any) -> ModelSpec:
    given: dict[str, Any] = {
        "model": model, "loss": torch_case.cross_entropy, "optimizer": adamw, "total_steps": 20, "inputs": ("x",),
        "targets": ("y",), "clip_norm": 0.05, "sample": functools.partial(torch_case.sample, PROBLEMS["ragged"]),
    }  # fmt: skip
    return ModelSpec(**{**given, **fields})


def world_of(
    pool: Pool, name: str, job: ModelSpec, steps: int = 3, dtype: str = "float64", precision: str = "fp32"
) -> tuple[World, list[Any]]:
    """Processes of a layout, and feeds of a batch that does not divide, in two micro-batches."""
    mesh, schedule, zero, _ = PRODUCTS.get(name, (Mesh(), "", 0, 1.0))
    engine = f"{ENGINE}.engines.base:OneDevice" if name == "one" else engine_of(mesh)
    problem = replace(PROBLEMS["ragged"], steps=steps, dtype=dtype)
    plan = problems.plan_of(problem, engine, mesh.size, 1, "collective")
    cuts = ("blocks.1",) if mesh.pipeline > 1 else ()
    if schedule == "interleaved":
        cuts = ("blocks.0", "blocks.1", "norm")
    plan = replace(plan, mesh=mesh, schedule=schedule, zero=zero, cuts=cuts, chunks=2 if len(cuts) > 1 else 1)
    plan = replace(plan, precision=precision, sequence=name in SEQUENCE)
    data, ids = problems.columns(problem), problems.batches(problem)
    feeds = [problems.feeds(problem, plan, step, ids[step], data) for step in range(steps)]
    return World(pool, "torch", plan, job), feeds


@functools.cache
def expected(pool: Pool) -> tuple[list[StepReport], dict[str, Any]]:
    world, feeds = world_of(pool, "one", spec(Language))
    with world:
        world.start(feeds[0])
        return world.train(feeds)[0], torch_case.state(world.files())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in LARGER else name for name in PRODUCTS]
)
def test_a_language_model_is_that_of_one_device(pool: Pool, name: str) -> None:
    reports, whole = expected(pool)
    loss = apart if PRODUCTS[name][0].tensor > 1 else torch_case.cross_entropy
    world, feeds = world_of(pool, name, spec(Language, loss=loss))
    with world:
        world.start(feeds[0])
        found = world.train(feeds)
        state = torch_case.state(world.files())
        held = [numbers_of(rank.call("files")) for rank in world.ranks]
    numbers = sum(value.size for key, value in whole.items() if key.startswith("model."))
    assert max(held) < PRODUCTS[name][3] * numbers, "a rank holds more than its part"
    assert all(one == found[0] for one in found)
    assert [each.loss for each in found[0]] == pytest.approx([each.loss for each in reports], rel=1e-9)
    norms = [each.gradient_norm for each in reports]
    assert [each.gradient_norm for each in found[0]] == pytest.approx(norms, rel=1e-9)
    assert state.keys() == whole.keys(), "an unused parameter has optimizer state"
    for key in state.keys() - {"state.json"}:
        assert np.allclose(state[key], whole[key], rtol=1e-9, atol=1e-9), key


def test_shards_of_stages_train_in_half_precision(pool: Pool) -> None:
    losses = []
    sample = functools.partial(torch_case.sample, replace(PROBLEMS["ragged"], dtype="float32"))
    for name in ("one", "fsdp x pp"):
        world, feeds = world_of(pool, name, spec(single, sample=sample), steps=2, dtype="float32", precision="bf16")
        with world:
            world.start(feeds[0])
            losses.append([report.loss for report in world.train(feeds)[0]])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def apart(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, whose logits no rank holds whole."""
    values = torch_case.cross_entropy(outputs, targets)
    assert isinstance(outputs, ShardedTensor) and outputs.is_sharded
    return values


def single() -> Language:
    """In single precision."""
    return Language().float()
