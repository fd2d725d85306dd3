"""Jobs with models and optimizers that are awkward to divide among parameter servers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.torch_engines import Files, adam, spec


class Odd(nn.Module):
    """Tied, frozen and normalized; one tensor is larger than all others together."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 37, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(37, dtype=torch.float64)
        self.wide = nn.Linear(37, 37, dtype=torch.float64)
        self.again = nn.Linear(37, 37, bias=False, dtype=torch.float64)
        self.again.weight = self.wide.weight
        self.last = nn.Linear(37, 3, dtype=torch.float64)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.again(torch.tanh(self.wide(self.norm(self.first(x)))))))


def grouped(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Decays what has two dimensions; Adagrad makes its state at once."""
    flat, wide = ([each for each in parameters if (each.dim() > 1) is many] for many in (False, True))
    return torch.optim.Adagrad([{"params": flat}, {"params": wide, "weight_decay": 0.1}])


def by_tensor(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    class Normed(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for each in group["params"]:
                    each.grad = each.grad / (each.grad.norm() + 1e-12)
            super().step()

    return Normed(parameters, lr=0.1)


def facts(kept: Files) -> dict[str, Any]:
    """The files, whose plain values have no order."""
    return {name: json.loads(data) if name.endswith(".json") else data for name, data in kept.files.items()}


JOBS = {
    "adam": spec(model=Odd, optimizer=adam, inexact=("batch_norm",)),
    "groups": spec(model=Odd, optimizer=grouped, inexact=("batch_norm",)),
    "whole": spec(model=Odd, optimizer=by_tensor, inexact=("batch_norm",)),
}
