"""8-bit optimizers of bitsandbytes, where it is installed: a plain loop, and the same bits after a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from tests.gpu.lone import GPU, Lone, Task, trained
from tests.gpu.test_engines import assert_same
from tests.support.conformance import torch_case
from tests.support.conformance.problems import CLASSES, PROBLEMS

bitsandbytes = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.gpu(stand_in=False)

WIDTH = 128  # tensors of less than 4,096 elements have a state of 32 bits
PROBLEM = replace(PROBLEMS["ragged"], inputs=("x",), dtype="float32")


class Wide(nn.Module):
    """A network with a matrix whose state has 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = nn.Linear(PROBLEM.features, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        self.net = nn.Sequential(*inner, nn.Linear(WIDTH, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(x)
        return logits


def plain(task: Task) -> list[float]:
    """The losses of a loop by hand."""
    model = Wide().to(GPU)
    optimizer, losses = task.spec.make_optimizer(list(model.named_parameters())), []
    for feed in task.feeds:
        batches = [batch for part in feed.parts for batch in part]
        whole = sum(float(batch.weights.sum()) for batch in batches)
        optimizer.zero_grad()
        loss = 0.0
        for batch in batches:
            x, y = (torch.from_numpy(batch.columns[name]).to(GPU) for name in ("x", "y"))
            one = (torch.from_numpy(batch.weights).to(GPU) * torch_case.cross_entropy(model(x), y)).sum() / whole
            one.backward()
            loss += one.item()
        optimizer.step()
        losses.append(loss)
    return losses


@pytest.mark.parametrize("kind", ["AdamW8bit", "Lion8bit"])
def test_a_plain_loop_and_the_same_bits_after_a_checkpoint(kind: str) -> None:
    made = partial(getattr(bitsandbytes.optim, kind), lr=1e-3)
    task = Task.of(PROBLEM, spec=replace(torch_case.spec(PROBLEM), model=Wide, optimizer=made))
    run = trained(task, GPU)
    assert any(value.dtype == "uint8" and value.size == WIDTH * WIDTH for value in run.state.values())
    assert [report.loss for report in run.reports] == pytest.approx(plain(task), rel=1e-3)
    assert_same(trained(task, GPU, moved_to=GPU, at=20), run)
    with Lone(task, GPU) as lone:
        copied = lone.engine.snapshot()
        lone.train(0, 3)
        lone.engine.restore(copied)
        again = lone.train(0, len(task.feeds))
    assert [report.loss for report in again] == [report.loss for report in run.reports]
