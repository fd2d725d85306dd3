"""The reduce-scatter on CPUs: three processes, against sums in float64, and FSDP2 with it against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.rank_processes import Exchange, formed, run_ranks
from tests.support.torch_engines import spec
from trainwright.strategies.torch.distributed import fsdp_wrap
from trainwright.strategies.torch.distributed.fsdp_wrap import fsdp_modules, fully_shard_model
from trainwright.strategies.torch.distributed.process_group import reduce_scatter
from trainwright.strategies.torch.torch_compat import FsdpState, reduce_scatter_single

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


class _Recorded:
    """Records whether each gather was asynchronous."""

    def __init__(self, inner: Any, gathered: list[bool]) -> None:
        self.allocate, self._inner, self._gathered = inner.allocate, inner, gathered

    def __call__(self, *given: Any, async_op: bool = False, **more: Any) -> Any:
        self._gathered.append(async_op)
        return self._inner(*given, async_op=async_op, **more)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 2)).double()


def _sharded(rank: int, world: int) -> list[Any]:
    """The gradients of two backwards of a divided model, and that it gathers and reduces as it should."""
    model, whole = _model(), _model()
    fully_shard_model(model, init_device_mesh("cpu", (world,)), zero=3, where="rank")
    gathered, reduced = list[bool](), list[Any]()
    for module in fsdp_modules(model):
        for group in FsdpState(module).groups:
            module.set_custom_all_gather(_Recorded(group._all_gather_comm, gathered))  # type: ignore[arg-type]
    rows = torch.arange(world * 8, dtype=torch.float64).view(world, 2, 4).sin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            fsdp_wrap, "reduce_scatter", lambda *given, mean: reduced.append(reduce_scatter(*given, mean=mean))
        )
        for _ in range(2):  # the second one is added to the first one
            model(rows[rank]).square().mean().backward()
    assert all(gathered) and len(gathered) >= 2 * 4, "no gather was waited for at once"
    assert len(reduced) == 2 * 4, "one for each block in each backward"
    for _ in range(2):
        whole(rows.flatten(0, 1)).square().mean().backward()
    gradients = [each.grad.full_tensor() for each in model.parameters()]  # type: ignore[union-attr]
    for mine, theirs in zip(gradients, whole.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.grad, rtol=1e-12, atol=1e-15)
    return [gradient.tolist() for gradient in gradients]


def test_a_part_may_be_empty() -> None:
    assert run_ranks(_empty, 2) == [(2, 0, 3)] * 2


def _empty(rank: int, _world: int, exchange: Exchange) -> tuple[int, ...]:
    formed(rank, exchange, spec())
    own = torch.empty(2, 0, 3)
    reduce_scatter(own, torch.empty(4, 0, 3), None)
    return tuple(own.shape)


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
