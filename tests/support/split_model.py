"""Models split for tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainwright.strategies.torch.tensor_parallel.layers import TensorParallelPlan
from trainwright.strategies.torch.tensor_parallel.plan_search import plan_layers
from trainwright.strategies.torch.tracing.op_trace import model_call

GIVEN = torch.zeros(1, 6)


def split(
    model: nn.Module, degree: int = 2, plan: Mapping[str, str] | None = None, given: Tensor = GIVEN
) -> TensorParallelPlan:
    return plan_layers(model, {"x": given}, model_call(("x",), (), None), degree, "rank 0", rows=1, named=plan)
