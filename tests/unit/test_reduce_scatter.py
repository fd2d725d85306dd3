"""The reduce-scatter on CPUs: three processes, against sums in float64, and FSDP2 with it against one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.rank_processes import Exchange, formed, run_ranks
from tests.support.torch_engines import spec
from trainwright.strategies.torch.distributed.fsdp_wrap import fsdp_modules, fully_shard_model
from trainwright.strategies.torch.distributed.process_group import reduce_scatter
from trainwright.strategies.torch.torch_compat import reduce_scatter_single

RANKS, PART = 3, (5, 2)
KINDS = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def _whole(rank: int, kind: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(RANKS * PART[0], PART[1], generator=generator, dtype=torch.float64).to(kind)


def _summed(rank: int, world: int, exchange: Exchange) -> dict[Any, Any]:
    formed(rank, exchange, spec())
    found: dict[Any, Any] = {}
    for kind in KINDS:
        for mean in (False, True):
            whole = _whole(rank, kind)
            kept, own = whole.clone(), torch.full(PART, torch.nan, dtype=kind)
            reduce_scatter(own, whole, None, mean=mean)
            assert torch.equal(whole, kept), "what is sent is left as it is"
            theirs = torch.empty_like(own)
            operation = distributed.ReduceOp.AVG if mean else distributed.ReduceOp.SUM
            reduce_scatter_single(theirs, whole, operation)
            found[kind, mean] = own.tolist(), theirs.tolist()
    found["model"] = _sharded(rank, world)
    return found


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 2)).double()


def _sharded(rank: int, world: int) -> list[Any]:
    """The gradients of two backwards of a divided model, and that it gathers and reduces as it should."""
    model, whole = _model(), _model()
    fully_shard_model(model, init_device_mesh("cpu", (world,)), zero=3, where="rank")
    groups = [group for module in fsdp_modules(model) for group in module._get_fsdp_state()._fsdp_param_groups]
    assert groups and all(group.unshard_async_op for group in groups)
    rows = torch.arange(world * 8, dtype=torch.float64).view(world, 2, 4).sin()
    for _ in range(2):  # the second one is added to the first one
        model(rows[rank]).square().mean().backward()
        whole(rows.flatten(0, 1)).square().mean().backward()
    gradients = [each.grad.full_tensor() for each in model.parameters()]  # type: ignore[union-attr]
    for mine, theirs in zip(gradients, whole.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.grad, rtol=1e-12, atol=1e-15)
    return [gradient.tolist() for gradient in gradients]


def test_parts_of_sums_and_means_over_ranks_in_each_type() -> None:
    results = run_ranks(_summed, RANKS)
    for kind, bound in KINDS.items():
        total = torch.stack([_whole(rank, kind).double() for rank in range(RANKS)]).sum(0).view(RANKS, *PART)
        for mean in (False, True):
            for rank, found in enumerate(results):
                own, theirs = found[kind, mean]
                right = total[rank] / RANKS if mean else total[rank]
                for part in (own, theirs):
                    part = torch.tensor(part, dtype=torch.float64)
                    torch.testing.assert_close(part, right, rtol=bound, atol=4 * bound)
    assert results[0]["model"] == results[1]["model"] == results[2]["model"]
