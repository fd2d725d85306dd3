"""Logits of which each rank holds some: a loss over them is that of one device, and what is gathered."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.tensor_parallel_threads import ThreadGroup, on_ranks
from trainwright.strategies.torch.shard_layout import ShardSlice
from trainwright.strategies.torch.tensor_parallel.sharded_tensor import ShardedTensor, from_local, full_tensor

ROWS, TOKENS, WIDTH = 3, 4, 7
TARGETS = torch.tensor([[0, 6, 3, -100], [2, 2, -100, 5], [4, 1, 6, 0]])
WEIGHT = torch.linspace(0.5, 2.0, WIDTH, dtype=torch.float64)
Loss = Callable[[Tensor], Tensor]
cross_entropy: Any = nn.functional.cross_entropy


def flat(logits: Tensor, **options: Any) -> Tensor:
    loss: Tensor = cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), **options)
    return loss


def learned(loss: Loss, of: int) -> tuple[list[tuple[Tensor, Tensor]], list[ThreadGroup]]:
    """What a loss gives each rank, the gradient of its part of a head's outputs, and what was exchanged."""
    start = torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    slopes = torch.linspace(0.1, 1.0, 64, dtype=torch.float64)

    def backward(value: Tensor) -> None:
        value = full_tensor(value)
        (value.reshape(-1) * slopes.repeat(9)[: value.numel()]).sum().backward()

    whole = start.clone().requires_grad_()
    expected = loss(whole * 1.0)
    backward(expected)
    assert whole.grad is not None

    def run(group: ThreadGroup) -> tuple[Tensor, Tensor, ThreadGroup]:
        box = ShardSlice.share((WIDTH,), 0, group.index, group.size)
        part = start[..., box.start[0] : box.stop[0]].clone().requires_grad_()
        value = loss(from_local(part, group, WIDTH))
        backward(value)
        assert part.grad is not None and not isinstance(part.grad, ShardedTensor)
        return full_tensor(value.detach()), part.grad, group

    found = on_ranks(of, run)
    for index, (value, gradient, _) in enumerate(found):
        box = ShardSlice.share((WIDTH,), 0, index, of)
        torch.testing.assert_close(value, expected.detach(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(gradient, whole.grad[..., box.start[0] : box.stop[0]], rtol=1e-9, atol=1e-12)
    return [(value, gradient) for value, gradient, _ in found], [group for _, _, group in found]


def doubled(logits: Tensor) -> Tensor:
    logits *= 2.0
    return flat(logits)


def cut(logits: Tensor) -> Tensor:
    seen = logits.flatten(0, 1)
    logits.data[..., 5:] = -1.0  # behind autograd's back, and after a view was made
    return seen * 1.0


def masked(logits: Tensor) -> Tensor:
    seen = logits.view(-1, WIDTH)
    logits[..., 0] = -1e9
    return cross_entropy(seen, TARGETS.flatten().masked_fill(TARGETS.flatten() == 0, 1))  # type: ignore[no-any-return]


def hooked(logits: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: gradient * 2.0)
    return flat(logits)


class Thirds(torch.autograd.Function):
    """One of the user's own, which computes what torch does not see."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given / 3.0 + given.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] / 3.0 + gradients[0].mean()


APART: dict[str, Loss] = {
    "each": lambda logits: flat(logits, reduction="none").view(ROWS, TOKENS),
    "mean": lambda logits: flat(logits),
    "sum": lambda logits: flat(logits, reduction="sum"),
    "weight": lambda logits: flat(logits, weight=WEIGHT),
    "smooth": lambda logits: flat(logits, label_smoothing=0.1),
    "smooth and weight": lambda logits: flat(logits, label_smoothing=0.1, weight=WEIGHT, reduction="none"),
    "ignored": lambda logits: cross_entropy(logits[:, 0], TARGETS[:, 0], ignore_index=2, reduction="none"),
    "turned": lambda logits: cross_entropy(logits.transpose(1, 2), TARGETS, reduction="none"),
    "shifted": lambda logits: cross_entropy(
        logits[:, :-1].reshape(-1, WIDTH).float().double(), TARGETS[:, 1:].reshape(-1), reduction="none"
    ),
    "contiguous": lambda logits: cross_entropy(logits[:, 1:].contiguous().view(-1, WIDTH), TARGETS[:, 1:].ravel()),
    "bytes": lambda logits: cross_entropy(logits[:, 0], TARGETS[:, 0].byte(), weight=WEIGHT),
    "one": lambda logits: cross_entropy(logits[0, 0], TARGETS[0, 0]),
    "capped": lambda logits: flat(30.0 * torch.tanh(logits / 30.0)),
    "barred": lambda logits: flat(logits + torch.linspace(-1.0, 1.0, WIDTH, dtype=torch.float64)),
    "two steps": lambda logits: nn.functional.nll_loss(logits[:, 1].log_softmax(-1), TARGETS[:, 1], reduction="none"),
    "soft": lambda logits: cross_entropy(logits.flatten(0, 1), torch.full((12, WIDTH), 1 / WIDTH).double()),
    "hooked": hooked,
    "in place": doubled,
    "twice": lambda logits: flat(logits) + flat(logits * 0.5),
}
WHOLE: dict[str, Loss] = {
    "square": lambda logits: (logits**2).mean(-1),
    "numbers": lambda logits: logits**2,
    "choice": lambda logits: -logits.log_softmax(-1).gather(-1, TARGETS.clamp(min=0).unsqueeze(-1)),
    "some classes": lambda logits: logits[..., :5].exp(),
    "mixed": lambda logits: logits.view(-1).square(),
    "masked in place": masked,
    "behind a view": cut,
    "some rows": lambda logits: cross_entropy(logits[TARGETS != -100], TARGETS[TARGETS != -100]),
    "both": lambda logits: flat(logits) + logits.logsumexp(-1).square().mean(),
    "product": lambda logits: logits @ WEIGHT,
    "own function": lambda logits: Thirds.apply(logits),  # type: ignore[no-untyped-call]
    "numpy": lambda logits: flat(logits) * float(logits.detach().numpy().max()) * logits[0].tolist()[0][0],
    "copied": lambda logits: flat(logits) * deepcopy(logits.detach()).max(),
}


@pytest.mark.parametrize("of", [2, 5])
@pytest.mark.parametrize("name", APART)
def test_cross_entropy_of_parts_is_that_of_one_device_and_gathers_nothing(name: str, of: int) -> None:
    _, rings = learned(APART[name], of)
    for group in rings:
        assert not group.calls["all_gather"], "logits were gathered"
        assert max(group.numbers.values()) <= 6 * ROWS * TOKENS, "more than a few numbers of each token"


@pytest.mark.parametrize("name", WHOLE)
def test_what_needs_all_logits_is_given_them(name: str) -> None:
    _, rings = learned(WHOLE[name], 2)
    assert all(group.calls["all_gather"] for group in rings)


@pytest.mark.parametrize("wrong", [WIDTH, -1])
def test_a_target_that_is_not_in_the_vocabulary_is_refused_as_on_one_device(wrong: int) -> None:
    def run(group: ThreadGroup) -> None:
        part = torch.zeros(1, ShardSlice.share((WIDTH,), 0, group.index, group.size).count)
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            cross_entropy(from_local(part, group, WIDTH), torch.tensor([wrong]))

    on_ranks(2, run)


def test_a_byte_is_a_target_also_where_it_wraps_to_the_ignored_one() -> None:
    targets = torch.tensor([156, 3], dtype=torch.uint8)  # -100 as a byte is 156
    whole = torch.arange(400.0).view(2, 200)

    def run(group: ThreadGroup) -> Tensor:
        box = ShardSlice.share((200,), 0, group.index, group.size)
        part = whole[:, box.start[0] : box.stop[0]]
        return full_tensor(cross_entropy(from_local(part, group, 200), targets, reduction="none"))

    for found in on_ranks(2, run):
        torch.testing.assert_close(found, cross_entropy(whole, targets.long(), reduction="none"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_added_up_in_single(dtype: torch.dtype) -> None:
    def run(group: ThreadGroup) -> Tensor:
        part = torch.full((1, 2000), 3.0, dtype=dtype)
        return full_tensor(cross_entropy(from_local(part, group, 4000), torch.tensor([3999]), reduction="none"))

    for found in on_ranks(2, run):
        expected = cross_entropy(torch.full((1, 4000), 3.0, dtype=dtype), torch.tensor([3999]), reduction="none")
        assert found.dtype == dtype and torch.equal(found, expected)
