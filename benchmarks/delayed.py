"""What old gradients cost by themselves: a plain loop of torch, of one process, whose gradients are some steps old."""

from __future__ import annotations

from collections import deque

import torch
from alone import Setup, adam, build_model, order_of, triangle
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from trainwright.core.data import Columns


def accuracy_of(train: Columns, test: Columns, setup: Setup, delay: int) -> float:
    """On the test set, after the steps of `setup`, each by a gradient at the parameters of `delay` steps before.

    With the same samples in the same order as the crew's; the first steps' gradients are at the first parameters.
    """
    images, labels = torch.from_numpy(train["image"]), torch.from_numpy(train["label"])
    torch.manual_seed(setup.seed)
    model = build_model()
    optimizer = adam(setup.rate, model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: triangle(step, setup.steps))
    held = deque([_copy(model)], maxlen=delay + 1)
    for step in range(setup.steps):
        rows = order_of(len(labels), setup, step)
        old = held[0]
        loss = functional.cross_entropy(functional_call(model, old, images[rows]), labels[rows])
        for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, old.values()), strict=True):
            parameter.grad = gradient
        optimizer.step()
        schedule.step()
        held.append(_copy(model))
    with torch.no_grad():
        right = model(torch.from_numpy(test["image"])).argmax(1) == torch.from_numpy(test["label"])
    return float(right.float().mean())


def _copy(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters as they are, by name."""
    return {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
