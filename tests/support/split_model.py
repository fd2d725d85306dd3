"""Models split for tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainwright.strategies.torch.profiling.model_profile import plainly, traced
from trainwright.strategies.torch.tensor_parallel.layers import Split
from trainwright.strategies.torch.tensor_parallel.plan_search import Splitter

GIVEN = torch.zeros(1, 6)


def split(model: nn.Module, degree: int = 2, plan: Mapping[str, str] | None = None, given: Tensor = GIVEN) -> Split:
    splitter = Splitter(model, plainly({"x": given}, (("x",), ()), None), degree, "rank 0")
    if plan:
        return splitter.planned(plan)
    return splitter.found(lambda bones: traced(bones, {"x": given}, (("x",), ()), None))
