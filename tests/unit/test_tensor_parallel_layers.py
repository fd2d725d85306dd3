"""Which layers tensor parallelism divides: what is found, what a forward makes of a part, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.conformance.language_model import HEADS, WIDTH, Attention, Language
from tests.support.split_model import GIVEN, split
from tests.support.torch_profile import profile_model
from trainwright.core.errors import JobError
from trainwright.strategies.torch.tensor_parallel.layers import (
    TensorParallelGroup,
    TensorParallelPlan,
    shard_layers,
    weight_is_transposed,
)
from trainwright.strategies.torch.tensor_parallel.plan_search import TracedOp, TracedTensor, trace_mismatch


class Pair(nn.Module):
    """Two linear layers, and something between them."""

    def __init__(self, between: Any = torch.tanh) -> None:
        super().__init__()
        self.up, self.down, self.between, self.size = nn.Linear(6, 8), nn.Linear(8, 6), between, 8

    def forward(self, given: Tensor) -> Tensor:
        outputs: Tensor = self.down(self.between(self.up(given)))
        return outputs


class Normed(Attention):
    """Attention whose queries have a norm for each head."""

    def __init__(self, learned: bool) -> None:
        super().__init__(HEADS, False)
        self.norm = nn.RMSNorm(self.size, elementwise_affine=learned)

    def forward(self, hidden: Tensor) -> Tensor:
        made = (each(hidden).unflatten(-1, (self.heads, -1)) for each in (self.query, self.key, self.value))
        query, key, value = (each.transpose(1, 2) for each in made)
        mixed = nn.functional.scaled_dot_product_attention(self.norm(query), key, value)
        outputs: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return outputs


class Straight(nn.Linear):
    """A linear layer of another class."""


class Turned(nn.Module):
    """A linear layer whose weight lies the other way round."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, given: Tensor) -> Tensor:
        return torch.addmm(self.bias, given.view(-1, given.shape[-1]), self.weight).view(*given.shape[:-1], -1)


def test_blocks_of_a_language_model_are_found_with_its_tied_vocabulary() -> None:
    found = split(Language())
    kinds = {"query": "column", "key": "column", "value": "column", "out": "row"}
    for number in (0, 1):
        assert {name: found.roles[f"blocks.{number}.attention.{name}"] for name in kinds} == kinds
        assert found.attributes[f"blocks.{number}.attention"] == {"groups": 1, "heads": 2}
    assert [found.roles[f"blocks.0.{name}"] for name in ("gate", "up", "down")] == ["column", "column", "row"]
    assert (found.roles["table"], found.roles["head"]) == ("vocabulary", "gathered")
    assert not found.random


def test_random_numbers_inside_a_block_are_each_ranks_own() -> None:
    assert split(Language(dropout=0.1)).random >= {"blocks.0.attention.query"}
    assert not split(Pair()).random


def test_what_one_projection_gives_to_queries_keys_and_values_stays_whole() -> None:
    found = split(Language(groups=4, fused=True))
    assert not any("attention" in name for name in found.roles) and found.roles["blocks.0.down"] == "row"


def test_a_profile_says_why_nothing_of_a_model_can_be_divided() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(HEADS, True)

        def forward(self, given: Tensor) -> Tensor:
            outputs: Tensor = self.attention(given)
            return outputs.mean(1)

    profile = profile_model(Fused, {"x": torch.zeros(1, 3, WIDTH).numpy()}, ("x",))
    assert profile.heads == HEADS and "attention.all" in profile.indivisible
    assert not profile_model(Language, {"x": GIVEN.numpy()}, ("x",)).indivisible


def test_a_block_whose_division_does_not_come_out_counts_as_whole() -> None:
    class Rigid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

        def forward(self, given: Tensor) -> Tensor:
            outputs: Tensor = self.down(self.up(given).view(*given.shape[:-1], 3, 4).relu().flatten(-2))
            return outputs

    def build() -> nn.Module:
        return nn.Sequential(Attention(HEADS, False), Rigid())

    profile = profile_model(build, {"x": torch.zeros(1, 3, WIDTH).numpy()}, ("x",))
    assert split(build(), given=torch.zeros(1, 3, WIDTH)).roles.keys() == {
        f"0.{n}" for n in ("query", "key", "value", "out")
    }
    found = {layer.name: (layer.splits, layer.reductions) for layer in profile.layers}
    assert found["0.query"] == (True, 0) and found["0.out"] == (True, 1)
    assert found["1.up"] == found["1.down"] == (False, 0)


def test_no_cut_may_follow_what_is_divided() -> None:
    profile = profile_model(Language, {"x": GIVEN.numpy()}, ("x",))
    leads = {layer.name for layer in profile.layers if layer.leads}
    assert {"blocks.0.gate", "blocks.0.up", "blocks.0.attention.query"} <= leads
    assert not leads & {"blocks.0.down", "blocks.0.attention.out", "blocks.0.norm", "head"}


def test_weights_may_lie_either_way() -> None:
    model = Pair()
    model.up, model.down = Turned(6, 8), Turned(8, 6)
    assert split(model).roles == {"up": "column", "down": "row"}


def test_how_a_square_weight_of_zeros_lies_is_found() -> None:
    turned, plain = Turned(8, 8), Straight(8, 8)
    for module in (turned, plain):
        nn.init.zeros_(module.weight)
    assert weight_is_transposed(turned) is True and weight_is_transposed(plain) is False


@pytest.mark.parametrize(
    "between",
    [
        lambda made: made.softmax(-1),
        lambda made: made * torch.arange(8.0, device=made.device),
        lambda made: made[..., :4].repeat(1, 2),
        lambda made: made - made.mean(-1, keepdim=True),
        lambda made: made.view(1, 2, -1).transpose(1, 2).reshape(1, -1),
        lambda made: made / made.shape[-1],
        lambda made: made.cumsum(-1),
        lambda made: nn.functional.layer_norm(made, made.shape[-1:]),
        lambda made: made + torch.arange(made.shape[-1], device=made.device),
        lambda made: made - made.mean(),
        lambda made: made / made.abs().amax(),
        lambda made: made * torch.linalg.vector_norm(made),
    ],
)
def test_what_needs_the_whole_is_refused(between: Any) -> None:
    with suppress(JobError):  # or its last layer alone is divided
        assert "up" not in split(Pair(between)).roles
    with pytest.raises(JobError, match="tensor_plan cannot be followed"):
        split(Pair(between), plan={"up": "column", "down": "row"})


class Ends(nn.Module):
    """A table, and a last layer that may be used without calling it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table, self.norm = kind, nn.Embedding(8, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, 8, bias=False)
        self.double()

    def forward(self, given: Tensor) -> Tensor:
        hidden = self.norm(self.table(given.long()))
        if self.kind == "called":
            outputs: Tensor = self.head(hidden)
            return outputs
        if self.kind == "product":
            return hidden @ self.table.weight.T
        return nn.functional.linear(hidden, (self.head if self.kind == "head" else self.table).weight)


@pytest.mark.parametrize(
    ("kind", "roles"),
    [
        ("called", {"table": "vocabulary", "head": "gathered"}),
        ("head", {"table": "vocabulary"}),
        ("table", None),
        ("product", None),
    ],
)
def test_tables_and_last_layers_are_divided_where_they_are_called(kind: str, roles: Mapping[str, str] | None) -> None:
    if roles is None:
        with pytest.raises(JobError, match="a parameter of module 'table' is used without calling it"):
            split(Ends(kind))
    else:
        assert split(Ends(kind)).roles == roles


@pytest.mark.parametrize(("index", "wrong"), [(0, -1), (1, 5)])
def test_what_is_not_in_the_vocabulary_is_refused_as_on_one_device(index: int, wrong: int) -> None:
    model = nn.Sequential(nn.Embedding(5, 2))
    shard_layers(
        model, TensorParallelPlan(roles={"0": "vocabulary"}), TensorParallelGroup(index=index, size=2), "rank 0"
    )
    with pytest.raises(IndexError):
        model(torch.tensor([wrong]))


def test_a_part_keeps_what_a_parameter_is_marked_with_and_its_hooks_are_refused() -> None:
    roles, group, model = (
        TensorParallelPlan(roles={"up": "column", "down": "row"}),
        TensorParallelGroup(index=1, size=2),
        Pair(),
    )
    model.up.weight.plain = True  # type: ignore[assignment]
    shard_layers(model, roles, group, "rank 0")
    assert model.up.weight.shape == (4, 6) and model.up.weight.plain is True
    model = Pair()
    model.down.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(JobError, match=r"'down\.weight' has a hook"):
        shard_layers(model, roles, group, "rank 0")


class Beside(Pair):
    """Something learned beside what is divided."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.gate, self.act = kind, nn.Linear(6, 1), nn.PReLU()
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, given: Tensor) -> Tensor:
        made, given = self.up(given), given * self.temperature
        by = {
            "temperature": lambda: made * self.temperature,
            "activation": lambda: self.act(made),
            "gate": lambda: made * self.gate(given).sigmoid(),
            "input": lambda: made * given.mean(-1, keepdim=True),
            "scale": lambda: made * given.detach().mean(-1, keepdim=True),
        }
        outputs: Tensor = self.down(by[self.kind]())
        return outputs


@pytest.mark.parametrize("kind", ["temperature", "activation", "gate", "input"])
def test_what_is_learned_and_whole_keeps_a_block_whole(kind: str) -> None:
    with suppress(JobError):  # or its last layer alone is divided
        assert "up" not in split(Beside(kind)).roles
    with pytest.raises(JobError, match="is combined with a whole parameter, of whose gradient"):
        split(Beside(kind), plan={"up": "column", "down": "row"})


def test_what_is_whole_and_not_learned_may_be_inside_a_block() -> None:
    assert split(Beside("scale"), plan={"up": "column", "down": "row"}).roles
    model = Beside("temperature")
    model.temperature.requires_grad_(False)
    assert split(model, plan={"up": "column", "down": "row"}).roles


@pytest.mark.parametrize("learned", [True, False])
def test_learned_norms_of_heads_keep_attention_whole(learned: bool) -> None:
    model = Language(groups=HEADS)
    for block in model.blocks:
        block.attention = Normed(learned)
    found = split(model.double())
    assert any("attention" in name for name in found.roles) is not learned
    assert found.roles["blocks.0.down"] == "row"


@pytest.mark.parametrize("scaled", [True, False])
def test_products_of_heads_scaled_by_a_count_of_them_are_refused(scaled: bool) -> None:
    def between(made: Tensor) -> Tensor:
        heads = made.view(-1, 1, 2)
        return torch.baddbmm(heads, heads, heads.mT @ heads, alpha=1 / len(heads) if scaled else 0.5).reshape(1, -1)

    plan = {"up": "column", "down": "row"}
    if scaled:
        with pytest.raises(JobError, match="baddbmm computes with the size of a part"):
            split(Pair(between), plan=plan)
    else:
        assert split(Pair(between), plan=plan).roles == plan


@pytest.mark.parametrize(("scale", "why"), [(0.5, ""), (0.25, "computes with the size of a part")])
def test_attention_in_one_kernel_is_scaled_alike(scale: float, why: str) -> None:
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def event(heads: int, scale: float) -> TracedOp:
        heads_of = TracedTensor((1, heads, 3, 2), True)
        return TracedOp(
            func=attend, given=(*[heads_of] * 3, 0.0, False, scale), made=((1, heads, 3, 2), (1, heads, 3), ())
        )

    found = trace_mismatch([event(4, 0.5)], [event(2, scale)], 2)
    assert found == (f"{attend._overloadpacket} {why}" if why else "")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"upp": "column"}, "names 'upp'.*nearest is 'up'"),
        ({"up": "colum"}, "'colum'.*nearest is 'column'"),
        ({"up": "vocabulary"}, "not a plain nn.Embedding"),
        ({"up": "column"}, "cannot be followed"),
        ({"up": "row", "down": "column"}, "cannot be followed"),
    ],
)
def test_a_plan_that_is_wrong_is_told(plan: dict[str, str], words: str) -> None:
    with pytest.raises(JobError, match=words):
        split(Pair(), plan=plan)


def test_degrees_that_do_not_divide_are_told() -> None:
    with pytest.raises(JobError, match="4 tensor-parallel ranks cannot share 2 heads"):
        split(Language(), 4)
    with pytest.raises(JobError, match="its 8 outputs are not a multiple of 3"):
        split(Pair(), 3, {"up": "column", "down": "row"})


def test_patterns_name_several_modules() -> None:
    plan = {"blocks.*.gate": "column", "blocks.*.up": "column", "blocks.*.down": "row"}
    assert len(split(Language(), plan=plan).roles) == 6
