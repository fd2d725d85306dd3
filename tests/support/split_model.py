"""Models split for tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainwright.strategies.torch.tensor_parallel.layers import TensorParallelPlan
from trainwright.strategies.torch.tensor_parallel.plan_search import TensorParallelPlanner
from trainwright.strategies.torch.tracing.op_trace import meta_runner, trace_model

GIVEN = torch.zeros(1, 6)


def split(
    model: nn.Module, degree: int = 2, plan: Mapping[str, str] | None = None, given: Tensor = GIVEN
) -> TensorParallelPlan:
    splitter = TensorParallelPlanner(model, meta_runner({"x": given}, (("x",), ()), None), degree, "rank 0")
    if plan:
        return splitter.planned(plan)
    return splitter.found(lambda bones: trace_model(bones, {"x": given}, (("x",), ()), None))
