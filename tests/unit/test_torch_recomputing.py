"""Activations computed again: the same bits, less kept, and dropout drawn alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.unit.torch_jobs import Net, batch, feed, one_device, plan, saved, spec
from trainwright.strategies.torch.recomputing import recompute

WIDE, ROWS, BLOCKS = 64, 32, 3


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
    recompute(model)
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


def test_a_block_that_is_cut_is_left_alone() -> None:
    model = deep()
    recompute(model, ["2.down"])
    model(torch.randn(2, 4)).sum().backward()
    assert [block.calls for block in list(model)[1:-1]] == [2, 1, 2]
