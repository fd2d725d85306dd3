"""Models made on the meta device: their modules draw the values, whole or divided, and what they leave out is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.rank_processes import Exchange, formed, run_ranks
from tests.support.torch_engines import one_device, plan, saved, spec
from trainwright.core.errors import JobError, UserCodeError
from trainwright.core.plan import Mesh
from trainwright.strategies.torch.checkpoint.safetensors_files import load_weights
from trainwright.strategies.torch.engines.fsdp import Sharded
from trainwright.strategies.torch.training.new_model import new_model


class Scaled(nn.Module):
    """A module with a buffer of its own; `kind` says what its reset does."""

    def __init__(self, kind: str = "whole") -> None:
        super().__init__()
        self.kind = kind
        self.gain = nn.Parameter(torch.empty(4))
        self.register_buffer("offset", torch.empty(4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        if self.kind == "raises":
            raise KeyError("no such table")
        if self.kind == "whole":
            nn.init.constant_(self.offset, 0.5)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain + self.offset


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.middle = nn.Linear(4, 4), Scaled(), nn.Linear(4, 4)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.middle.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.scale(self.first(x))))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Tied()


def test_each_module_draws_its_own_in_order_and_ties_stay() -> None:
    torch.manual_seed(5)
    made, stored = new_model(spec(model=on_meta), plan(), "rank 0")
    torch.manual_seed(5)
    whole = Tied()
    torch.manual_seed(5)
    for module in whole.modules():
        if isinstance(module, nn.Linear | Scaled):
            module.reset_parameters()
    assert stored == {} and made.last.weight is made.middle.weight
    expected, found = whole.state_dict(), made.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        (
            "part",
            JobError,
            "'offset' of Scaled was made on the meta device, and its reset_parameters() does not write it",
        ),
        ("raises", UserCodeError, "reset_parameters() of Scaled raised KeyError: 'no such table'"),
    ],
)
def test_what_a_module_leaves_out_is_told(kind: str, error: type[Exception], said: str) -> None:
    def model() -> nn.Module:
        with torch.device("meta"):
            return Scaled(kind)

    with pytest.raises(error) as caught:
        new_model(spec(model=model), plan(), "rank 3")
    assert said in str(caught.value) and "rank 3" in str(caught.value)


def test_a_module_without_the_method_is_refused_and_nothing_is_drawn() -> None:
    def model() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 1))

    with pytest.raises(JobError, match=r"is on the meta device and holds no values: give its module a reset_param"):
        new_model(spec(model=model), plan(), "rank 0")


def _shards(rank: int, _world: int, exchange: Exchange) -> dict[str, Any]:
    engine = formed(rank, exchange, spec(model=on_meta), engine=Sharded(), how=plan(mesh=Mesh(shard=2), zero=3))
    return {name: value.full_tensor().tolist() for name, value in engine.replica.model.named_parameters()}


def test_the_parts_of_a_divided_model_have_the_bits_of_one_device() -> None:
    whole = load_weights(saved(one_device(spec(model=on_meta))))
    first, second = run_ranks(_shards, 2)
    assert first == second == {name: whole[name].tolist() for name in first} and len(first) == 5
