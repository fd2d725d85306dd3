"""Loaded weights under each plan: two ranks that read their parts train as one device from the same state dict."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.conformance import torch_case
from tests.support.conformance.attention_model import LAYOUTS, TORCH, Run, assert_near
from tests.support.conformance.harness import Pool
from tests.support.conformance.problems import CLASSES, FEATURES
from tests.support.conformance.staged_model import Deep, plan, spec, trained
from trainwright.core.initial_weights import InitialWeights
from trainwright.core.plan import Mesh
from trainwright.storage.weight_files import open_weights

TENSOR = plan(engine=f"{TORCH}.engines.tensor_parallel:TensorParallel", mesh=Mesh(tensor=2))
HOW = {**LAYOUTS, "stages": plan(2, cuts=("blocks.1",), schedule="1f1b"), "tensor": TENSOR}
HOW["shards of stages"] = replace(LAYOUTS["shards of stages"], cuts=("blocks.1",))


class Wide(nn.Module):
    """Two layers that tensor parallelism divides: one by rows of its weight, one by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.down(torch.tanh(self.up(inputs)))
        return outputs


def on_meta(kind: Any) -> nn.Module:
    """Without values; the parameter that is frozen stays so, and tied ones stay tied."""
    with torch.device("meta"):
        model: nn.Module = kind().double()
    return model


def written(place: Path, kind: Any) -> dict[str, Tensor]:
    """Two shards, and what they hold."""
    random = torch.Generator().manual_seed(4)
    tensors = {
        name: torch.randn(value.shape, generator=random, dtype=torch.float64) / 3
        for name, value in kind().state_dict().items()
        if name != "again.weight"
    }
    save_file(dict(tensors), place / "model.safetensors")
    return tensors


def loaded(kind: Any, tensors: dict[str, Tensor]) -> nn.Module:
    """What a user would write instead."""
    model: nn.Module = kind().double()
    model.load_state_dict(tensors | ({"again.weight": tensors["first.weight"]} if kind is Deep else {}))
    return model


def runs(pool: Pool, place: Path, layout: str, **fields: Any) -> tuple[Run, Run]:
    """From the files under a layout, and from the state dict on one device."""
    kind = Wide if layout == "tensor" else Deep
    if layout == "tensor":
        fields |= {"tensor_plan": {"up": "column", "down": "row"}, "loss": torch_case.cross_entropy}
    tensors = written(place, kind)
    files = open_weights(InitialWeights(str(place)))
    start = {"initial_weights": files.options, "weights": files}
    found = trained(pool, HOW[layout], spec(functools.partial(on_meta, kind), **start, **fields))
    return found, trained(pool, plan(), spec(functools.partial(loaded, kind, tensors), **fields))


@pytest.mark.parametrize("layout", ["one", "parallel", "sharded", "stages", "shards of stages", "tensor"])
def test_runs_from_files_equal_one_device_from_a_state_dict(pool: Pool, tmp_path: Path, layout: str) -> None:
    found, expected = runs(pool, tmp_path, layout)
    assert found[1].keys() == expected[1].keys()
    assert_near(found, expected)


@pytest.mark.parametrize("layout", ["sharded", "stages"])
def test_a_loaded_base_is_not_stored(pool: Pool, tmp_path: Path, layout: str) -> None:
    found, expected = runs(pool, tmp_path, layout, save_frozen=False)
    frozen = "model.safetensors/blocks.1.lift.bias"
    assert frozen not in found[1] and found[1].keys() == expected[1].keys()
    assert_near(found, expected)
