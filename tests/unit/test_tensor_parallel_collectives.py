"""What tensor-parallel ranks exchange in a forward and its backward, and that the gradients are those of one device."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.conformance.language_model import WIDTH, Language
from tests.support.split_model import split
from tests.support.tensor_parallel_threads import ThreadGroup, on_ranks
from trainwright.core.errors import JobError
from trainwright.strategies.torch.shard_layout import ShardSlice
from trainwright.strategies.torch.tensor_parallel.layers import (
    GatheredTokens,
    TensorParallelPlan,
    copy_to_group,
    gather_tokens,
    reduce_scatter_tokens,
    shard_layers,
)
from trainwright.strategies.torch.tensor_parallel.plan_search import sequence_parallel_problem
from trainwright.strategies.torch.tensor_parallel.sharded_tensor import ShardedTensor, from_local, full_tensor
from trainwright.strategies.torch.tensor_parallel.tensor_group import TensorParallelGroup

ROWS, TOKENS = 2, 6
GIVEN = torch.linspace(-2.0, 2.0, ROWS * TOKENS, dtype=torch.float64).view(ROWS, TOKENS)


def called(bones: nn.Module, rows: int) -> Tensor:
    made: Tensor = bones(GIVEN[:rows].to("meta"))
    return made


def learned(model: nn.Module) -> dict[str, Tensor]:
    full_tensor(model(GIVEN)).square().sum().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


class Normed(nn.Module):
    """Two blocks with RMS norms and something learned around them."""

    def __init__(self, between: Any = torch.tanh) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 12) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(12, WIDTH) for _ in range(2))
        self.norm, self.gain, self.between = nn.RMSNorm(WIDTH), nn.Parameter(torch.ones(WIDTH)), between
        self.places = nn.Parameter(torch.ones(TOKENS, WIDTH))
        self.double()

    def forward(self, given: Tensor) -> Tensor:
        hidden = given.unsqueeze(-1) * self.gain
        for up, down in zip(self.ups, self.downs, strict=True):
            normed = self.norm(hidden)
            scaled = normed * (normed.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.gain
            hidden = self.between(hidden + down(torch.tanh(up(scaled)))) + self.places
        return hidden


def taught(model: nn.Module, of: int, *, sequence: bool) -> list[ThreadGroup]:
    """Each rank's exchanges, once its gradients were found to be its parts of one device's."""
    how, expected = split(model, of, given=GIVEN[:1]), learned(copy.deepcopy(model))

    def run(group: ThreadGroup) -> tuple[dict[str, Tensor], dict[str, ShardSlice], ThreadGroup]:
        own = copy.deepcopy(model)
        boxes = shard_layers(own, how, group, "rank 0")
        with torch.autograd.graph.saved_tensors_hooks(group.keep, lambda saved: saved):
            return learned(own), boxes, group

    found = on_ranks(of, run, sequence=sequence)
    for gradients, boxes, _ in found:
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            part = boxes[name].inside(ShardSlice.all_of(expected[name].shape)) if name in boxes else ...
            assert type(gradient) is Tensor
            torch.testing.assert_close(gradient, expected[name][part], rtol=1e-9, atol=1e-12)
    return [group for _, _, group in found]


def test_ranks_add_up_once_for_all_layers_that_are_given_the_same() -> None:
    for group in taught(Language(), 2, sequence=False):
        blocks = 2 * 2  # attention and what comes after it, twice
        assert group.calls == {
            "all_reduce": (1 + blocks) + (1 + blocks),
            "all_gather": 1,
        }  # the table, forward; the head, back
        assert ROWS * TOKENS * WIDTH in group.kept, "what blocks are given is kept whole"


def test_each_rank_holds_some_of_the_tokens_between_divided_regions() -> None:
    for group in taught(Language(), 2, sequence=True):
        assert group.calls["reduce_scatter"] == 10 and not group.asks
        assert ROWS * TOKENS * WIDTH not in group.kept, "all tokens are kept"


@pytest.mark.parametrize("of", [2, 4])
def test_norms_and_what_is_learned_between_regions_get_the_gradient_of_all_tokens(of: int) -> None:
    for group in taught(Normed(), of, sequence=True):  # 6 tokens on 4 ranks: the last one has none
        assert not group.asks


@pytest.mark.parametrize(
    ("between", "degree", "why"),
    [
        (torch.tanh, 2, ""),
        (lambda hidden: hidden.cumsum(1), 2, "aten.cumsum"),
        (lambda hidden: hidden - hidden.mean(1, keepdim=True), 2, "aten.mean"),
        (lambda hidden: torch.tanh(hidden.view(-1, WIDTH)).view(hidden.shape), 2, "aten.view"),  # apart in one row
        (torch.tanh, 12, "6 tokens, and 12 ranks"),
    ],
)
def test_a_forward_that_needs_all_tokens_between_regions_is_found_out(between: Any, degree: int, why: str) -> None:
    model = Normed(between)
    found = sequence_parallel_problem(model, split(model, degree, given=GIVEN[:1]), called, degree, "rank 0")
    assert why in found and bool(why) == bool(found)


def test_a_loss_within_the_forward_is_tried_and_what_it_raises_is_the_reason() -> None:
    def scored(bones: nn.Module, rows: int) -> Tensor:
        targets = torch.zeros(rows, dtype=torch.long, device="meta")
        return nn.functional.cross_entropy(called(bones, rows), targets)

    def read(bones: nn.Module, rows: int) -> float:
        return float(called(bones, rows).sum())

    model = Language()
    how = split(model, 2, given=GIVEN[:1])
    assert sequence_parallel_problem(model, how, scored, 2, "rank 0") == ""
    assert "without data it raised RuntimeError: " in sequence_parallel_problem(model, how, read, 2, "rank 0")


def test_all_tokens_are_let_go_after_the_forward_and_gathered_once_in_backward() -> None:
    def run(group: ThreadGroup) -> tuple[bool, int]:
        given = reduce_scatter_tokens(torch.ones(2, 6, 3, requires_grad=True) * 1.0, group)
        stream, learned = gather_tokens(group, given), torch.ones(4, 3, requires_grad=True)
        assert stream is not None
        made = [stream.linear(weight, None) for weight in (learned, learned, torch.ones(4, 3))]
        seen = weakref.ref(stream.whole)
        group.clear_shared_inputs()
        del stream
        gone = seen() is None
        torch.autograd.backward(made, [torch.ones(2, 6, 4)] * 3)
        return gone, group.calls["all_gather"]

    assert on_ranks(2, run) == [(True, 3)] * 2  # the third is the gradient of the sum


LAYERS: dict[str, Any] = {
    "copied": lambda given, group: (copy_to_group(group, given), given),
    "tokens": lambda given, group: (reduce_scatter_tokens(given, group), given),
    "gathered": lambda given, group: (gather_tokens(group, held := reduce_scatter_tokens(given, group)).whole, held),
    "linear": lambda given, group: (
        gather_tokens(group, reduce_scatter_tokens(given.detach(), group)).linear(given[0], None),
        given,
    ),
    "logits": lambda given, group: (from_local(given, group, 6), given),
    "whole": lambda given, group: (full_tensor(held := from_local(given, group, 6)), held),
    "row": lambda given, group: (divided(nn.Linear(6, 3), "row", group)(given), given),
    "learned": lambda given, group: (reduce_scatter_tokens(torch.ones(2, 6, 3), group) + given, given),
}


def divided(layer: nn.Module, role: str, group: TensorParallelGroup) -> nn.Module:
    shard_layers(whole := nn.Sequential(layer), TensorParallelPlan(roles={"0": role}), group, "rank 0")
    return whole


@pytest.mark.parametrize("name", LAYERS)
def test_a_gradient_through_divided_layers_is_not_differentiated_again(name: str) -> None:
    def run(group: ThreadGroup) -> None:
        made, given = LAYERS[name](torch.ones(2, 6, 3, requires_grad=True), group)
        with pytest.raises(JobError, match="create_graph=True"), torch._C.DisableTorchFunctionSubclass():
            torch.autograd.grad(made, given, torch.ones(made.shape), create_graph=True)

    on_ranks(2, run)


def test_dropout_draws_for_all_tokens_and_keeps_a_rank_its_own() -> None:
    whole = torch.ones(2, 6, 3, dtype=torch.float64)
    torch.manual_seed(1)
    expected, mask = torch.native_dropout(whole, 0.5, True)
    torch.manual_seed(1)
    claim = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
    given = ShardedTensor.of(whole[:, 3:], TensorParallelGroup(index=1, size=2), 1, claim)
    made, kept = torch.native_dropout(given, 0.5, True)
    assert isinstance(made, ShardedTensor) and isinstance(kept, ShardedTensor)
    assert torch.equal(made.local, expected[:, 3:]) and torch.equal(kept.local, mask[:, 3:])


def test_what_was_changed_in_place_is_shared_no_more() -> None:
    def run(group: ThreadGroup) -> tuple[bool, bool, bool]:
        given = torch.ones(2, requires_grad=True) * 1.0
        first, again = copy_to_group(group, given), copy_to_group(group, given)
        given.add_(1.0)
        return first is again, copy_to_group(group, given) is again, copy_to_group(group, given.detach()).requires_grad

    assert on_ranks(1, run) == [(True, False, False)]


def test_what_was_made_without_a_graph_or_in_another_way_is_not_shared() -> None:
    def run(group: ThreadGroup) -> bool:
        given = reduce_scatter_tokens(torch.ones(2, 6, 3, requires_grad=True) * 1.0, group)
        with torch.no_grad():
            assert gather_tokens(group, given) is not None
        assert isinstance(copy_to_group(group, given), Tensor)
        stream = gather_tokens(group, given)
        return isinstance(stream, GatheredTokens) and stream.whole.requires_grad

    assert on_ranks(2, run) == [True, True]
