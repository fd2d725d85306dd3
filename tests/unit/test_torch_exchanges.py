"""What tensor-parallel ranks exchange in a forward and its backward, and that the gradients are those of one device."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tests.conformance.test_products import Language
from tests.unit.test_torch_splitting import split
from tests.unit.torch_ring import ThreadRing, on_ranks
from trainwright.strategies.torch.parts import Box
from trainwright.strategies.torch.tensors import divide
from trainwright.strategies.torch.vocabulary import plain

GIVEN = torch.linspace(-2.0, 2.0, 12, dtype=torch.float64).view(2, 6)


def learned(model: nn.Module) -> dict[str, Tensor]:
    plain(model(GIVEN)).square().sum().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def test_ranks_add_up_once_for_all_layers_that_are_given_the_same() -> None:
    model = Language()
    how = split(model)

    def run(ring: ThreadRing) -> tuple[dict[str, Tensor], dict[str, Box], ThreadRing]:
        own = copy.deepcopy(model)
        boxes = divide(own, how, ring, "rank 0")
        return learned(own), boxes, ring

    found, whole = on_ranks(2, run), learned(model)
    for gradients, boxes, ring in found:
        blocks = 2 * len(model.blocks)  # attention and what comes after it
        assert ring.calls == {"summed": (1 + blocks) + (1 + blocks), "joined": 1}  # the table, forward; the head, back
        assert gradients.keys() == whole.keys()
        for name, gradient in gradients.items():
            part = boxes[name].inside(Box.all_of(whole[name].shape)) if name in boxes else ...
            torch.testing.assert_close(gradient, whole[name][part], rtol=1e-9, atol=1e-12)


def test_what_was_changed_in_place_is_shared_no_more() -> None:
    def run(ring: ThreadRing) -> tuple[bool, bool, bool]:
        given = torch.ones(2, requires_grad=True) * 1.0
        first, again = ring.copied(given), ring.copied(given)
        given.add_(1.0)
        return first is again, ring.copied(given) is again, ring.copied(given.detach()).requires_grad

    assert on_ranks(1, run) == [(True, False, False)]
