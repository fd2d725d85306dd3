"""Activations computed again: the same bits, less kept, and dropout drawn alike."""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.torch_engines import Net, batch, feed, one_device, plan, saved, spec
from trainwright.strategies.torch.training.model_blocks import SelectiveRecompute, checkpoint_blocks

WIDE, ROWS, BLOCKS = 64, 32, 3
HEADS, TOKENS = 4, 32


class Block(nn.Module):
    """What is inside is four times as large as what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE), nn.Dropout(0.5)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = inputs + self.down(self.drop(torch.relu(self.up(inputs))))
        return outputs


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(4, WIDE), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDE, 3))


def kept(model: nn.Module) -> int:
    """Bytes that backward keeps of a forward, parameters left out."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    found: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory._cdata not in own:
            found[memory._cdata] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda saved: saved):
        outputs = model(torch.randn(ROWS, 4))
    assert outputs.requires_grad
    return sum(found.values())


def test_a_block_keeps_what_it_is_given() -> None:
    torch.manual_seed(0)
    model = deep()
    before = kept(model)
    checkpoint_blocks(model)
    inputs = BLOCKS * ROWS * WIDE * 4
    assert inputs <= kept(model) < inputs + ROWS * (4 + WIDE) * 4 + 20_000 < before / 4  # and the state of dropout


@pytest.mark.parametrize("model", [deep, Net])
def test_steps_have_the_same_bits(model: type[nn.Module]) -> None:
    plain = one_device(spec(model=model))
    again = one_device(spec(model=model), plan(recompute="full"))
    for step in range(3):
        given = feed(batch(first=step * 100), step=step)
        assert plain.train_step(given).loss == again.train_step(given).loss
    assert saved(plain).files == saved(again).files
    assert plain.evaluate_step(feed()) == again.evaluate_step(feed())


class Normed(nn.Module):
    """A block whose two buffers change in forward: one that the outputs come from, and one that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDE, WIDE))
        self.norm = nn.BatchNorm1d(WIDE)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = torch.relu(self.norm(self.layer(inputs)))
        return outputs


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, WIDE), Normed(), Normed(), nn.Linear(WIDE, 3))


def test_buffers_change_once_and_are_as_they_were_the_second_time() -> None:
    """Of two micro-batches at once, as a pipeline has them, whose backward is run twice."""
    torch.manual_seed(0)
    plain = normed()
    again = copy.deepcopy(plain)
    checkpoint_blocks(again)
    given = torch.randn(2, ROWS, 4)
    own = list(again.buffers())
    for model in (plain, again):
        losses = [model(inputs).square().sum() for inputs in given]
        for loss in losses:
            loss.backward(retain_graph=True)
            loss.backward()
    assert all(one is other for one, other in zip(own, again.buffers(), strict=True))
    assert again[1].norm.num_batches_tracked == 2
    for (name, one), other in zip(plain.state_dict().items(), again.state_dict().values(), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0, msg=name)
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=0)


def test_a_block_that_is_cut_is_left_alone() -> None:
    model = deep()
    checkpoint_blocks(model, ["2.down"])
    model(torch.randn(2, 4)).sum().backward()
    assert [block.calls for block in list(model)[1:-1]] == [2, 1, 2]


class Attending(nn.Module):
    """A block of a transformer that writes its scores, in one way or another."""

    def __init__(self, how: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.how, self.dropout = how, dropout
        self.before, self.after = nn.LayerNorm(WIDE), nn.LayerNorm(WIDE)
        self.three, self.out = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)
        self.own = nn.MultiheadAttention(WIDE, HEADS, dropout, batch_first=True)
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)
        self.register_buffer("mask", torch.ones(TOKENS, TOKENS).tril() == 0)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.before(hidden)
        hidden = hidden + (self.own(normed, normed, normed)[0] if self.how == "own" else self.attended(normed))
        outputs: Tensor = hidden + self.down(nn.functional.gelu(self.up(self.after(hidden))))
        return outputs

    def attended(self, normed: Tensor) -> Tensor:
        given = self.three(normed).view(len(normed), TOKENS, 3, HEADS, -1)
        if self.how == "einsum":
            query, key, value = given.unbind(2)
            scores = torch.einsum("bqhd,bkhd->bhqk", query, key)
            scores.div_(2.0).masked_fill_(self.mask, -1e9)
            seen = torch.einsum("bhqk,bkhd->bqhd", nn.functional.softmax(scores, -1), value)
        else:
            query, key, value = given.transpose(1, 3).unbind(2)
            if self.how == "fused":  # with dropout there is no such kernel on the CPU
                seen = nn.functional.scaled_dot_product_attention(query, key, value, None, self.dropout)
            else:
                scores = (query @ key.transpose(-1, -2) / 2.0).masked_fill(self.mask, -1e9)
                seen = nn.functional.dropout(scores.softmax(-1), self.dropout) @ value
            seen = seen.transpose(1, 2)
        outputs: Tensor = self.out(seen.reshape(len(normed), TOKENS, WIDE))
        return outputs


class Transformer(nn.Module):
    """Two blocks between two layers."""

    def __init__(self, how: str = "plain", dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, TOKENS * WIDE)
        self.blocks = nn.ModuleList(Attending(how, dropout) for _ in range(2))
        self.last = nn.Linear(WIDE, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).view(len(x), TOKENS, WIDE)
        for block in self.blocks:
            hidden = block(hidden)
        outputs: Tensor = self.last(hidden.mean(1))
        return outputs


class Resident(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of what operations made that is still there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for each in tree_leaves(outputs):
            if isinstance(each, Tensor) and not func.is_view:
                memory = each.untyped_storage()
                self.made[memory._cdata] = StorageWeakRef(memory), memory.nbytes()
        return outputs

    @property
    def size_bytes(self) -> int:
        return sum(size for weak, size in self.made.values() if not weak.expired())


def after_forward(model: nn.Module, recomputed: str) -> int:
    """Bytes that a forward leaves behind for its backward."""
    inputs, resident = torch.randn(ROWS, 4), Resident()
    with SelectiveRecompute() if recomputed == "selective" else nullcontext(), resident:
        outputs = model(inputs)
    assert outputs.requires_grad
    return resident.size_bytes


SCORES = 2 * ROWS * HEADS * TOKENS**2 * 4  # bytes of one copy in both blocks


@pytest.mark.parametrize(
    ("how", "dropout", "copies"),
    [("plain", 0.0, 1), ("plain", 0.25, 3), ("einsum", 0.0, 1), ("own", 0.25, 3), ("fused", 0.25, 3), ("fused", 0, 0)],
)
def test_scores_alone_are_computed_again(how: str, dropout: float, copies: int) -> None:
    """On the CPU dropout keeps its factors as numbers, beside what it is given and what it gives."""
    model = functools.partial(Transformer, how, dropout)
    plain, again = one_device(spec(model=model)), one_device(spec(model=model), plan(recompute="selective"))
    for step in range(2):
        given = feed(batch(first=step * 100), step=step)
        assert plain.train_step(given).loss == again.train_step(given).loss
    assert saved(plain).files == saved(again).files
    kept, less = (after_forward(model(), name) for name in ("none", "selective"))
    assert kept - less == pytest.approx(copies * SCORES, rel=0.01)


def test_values_that_are_changed_in_place_are_told() -> None:
    query = torch.randn(2, 3, 3, requires_grad=True)
    for which in range(2):
        mask, value = torch.zeros(3, 3), torch.randn(2, 3, 3)
        with SelectiveRecompute():
            outputs = (query @ query + mask).softmax(-1) @ value
        (mask if which else value).add_(1.0)
        with pytest.raises(RuntimeError, match="changed in place" if which else "inplace operation"):
            outputs.sum().backward()


def attended(how: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention whose scores are changed behind the back of whoever follows the functions, or used twice."""
    mask = torch.ones(len(key[0]), len(key[0])).triu(1) == 1
    scores = query @ key.mT
    if how == "index":
        scores[..., mask] = -1e9
    elif how == "view":
        scores.view(-1, *mask.shape).masked_fill_(mask, -1e9)
    elif how == "diagonal":
        scores.diagonal(dim1=-2, dim2=-1).fill_(-1e9)
    elif how == "no gradients":
        with torch.no_grad():
            scores.masked_fill_(mask, -1e9)
    elif how == "data":
        scores.data.masked_fill_(mask, -1e9)
    elif how == "order":
        early = scores.softmax(-1)
        scores.mul_(3.0)
        return (scores.softmax(-1) + early) @ value
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("how", ["index", "view", "diagonal", "no gradients", "data", "order"])
def test_scores_changed_in_any_way_have_the_same_gradients(how: str) -> None:
    factors = [torch.randn(2, 5, 5, requires_grad=True, dtype=torch.float64) for _ in range(3)]
    plain = torch.autograd.grad(attended(how, *factors).square().sum(), factors)
    with SelectiveRecompute():
        outputs = attended(how, *factors)
    for one, other in zip(plain, torch.autograd.grad(outputs.square().sum(), factors), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_chances_changed_in_place_are_told_as_torch_does() -> None:
    query = torch.randn(2, 3, 3, requires_grad=True)
    with SelectiveRecompute():
        chances = (query @ query).softmax(-1)
        chances.mul_(0.5)
        outputs = chances @ query
    with pytest.raises(RuntimeError, match="inplace operation"):
        outputs.sum().backward()


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_fused_attention_takes_what_a_product_gave(dropout: float) -> None:
    inputs, weight = torch.randn(2, 16, 16), torch.randn(4, 16, 16, requires_grad=True)

    def gradient() -> Tensor:
        torch.manual_seed(1)
        query = torch.einsum("btd,hdk->bhtk", inputs, weight)
        outputs = nn.functional.scaled_dot_product_attention(query, query, query, None, dropout)
        return torch.autograd.grad(outputs.square().sum(), [weight])[0]

    plain = gradient()
    with SelectiveRecompute():
        torch.testing.assert_close(gradient(), plain, rtol=0, atol=0)
