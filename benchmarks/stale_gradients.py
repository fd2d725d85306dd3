"""Train with stale gradients in one process: a plain torch loop whose gradients are a fixed number of steps old."""

from __future__ import annotations

from collections import deque

import torch
from local_servers import RunSettings, adam, build_model, select_samples, triangular_schedule
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from trainwright.core.data import Columns


def measure_accuracy(train: Columns, test: Columns, settings: RunSettings, delay: int) -> float:
    """Train with gradients that are `delay` steps old, and return the accuracy on the test set.

    The samples and their order are those of `server_processes`. The gradients of the first steps are at the initial
    parameters.
    """
    images, labels = torch.from_numpy(train["image"]), torch.from_numpy(train["label"])
    torch.manual_seed(settings.seed)
    model = build_model()
    optimizer = adam(settings.rate, model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: triangular_schedule(step, settings.steps))
    history = deque([_copy(model)], maxlen=delay + 1)
    for step in range(settings.steps):
        rows = select_samples(len(labels), settings, step)
        old = history[0]
        loss = functional.cross_entropy(functional_call(model, old, images[rows]), labels[rows])
        for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, old.values()), strict=True):
            parameter.grad = gradient
        optimizer.step()
        schedule.step()
        history.append(_copy(model))
    with torch.no_grad():
        right = model(torch.from_numpy(test["image"])).argmax(1) == torch.from_numpy(test["label"])
    return float(right.float().mean())


def _copy(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the parameters, by name."""
    return {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
