"""Batch norm on several data ranks: running statistics are averaged, and with batch_norm="sync" batch statistics too.

By default a batch norm normalizes by a rank's own share of the batch. Its running statistics, which evaluation and
checkpoints use, are then averaged over the ranks in each step, weighted by rows, so that all ranks have the same. With
`batch_norm="sync"` it normalizes by mean and variance of the whole batch, as on one device: forward gathers each rank's
count, mean and sum of squares, and backward reduces two sums (Ioffe & Szegedy, 2015, with Chan et al., 1979).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable

from trainwright.core.data import Batch, Feed
from trainwright.core.errors import JobError
from trainwright.strategies.torch.torch_compat import BatchNorm


def batch_norms(model: nn.Module) -> list[str]:
    """Return the names of the modules that normalize by statistics of the batch."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, BatchNorm) and (module.training or module.running_mean is None)
    ]


def running_norms(model: nn.Module) -> list[BatchNorm]:
    """Return the batch norms of a model that keep running statistics."""
    return [module for module in model.modules() if isinstance(module, BatchNorm) and module.running_mean is not None]


def average_statistics(modules: Sequence[BatchNorm], feed: Feed, groups: Iterable[distributed.ProcessGroup]) -> None:
    """Average running statistics over the data ranks, weighted by the rows of each rank's share.

    Args:
        modules: all batch norms; those in evaluation mode stay as they are, as do those of other pipeline stages.
        groups: of ranks with other data, whose members call it too; together they reach all data ranks.
    """
    modules = [module for module in modules if module.running_mean is not None and not module.running_mean.is_meta]
    held = [each for module in modules for each in (module.running_mean, module.running_var) if each is not None]
    if not held:
        return
    rows = sum(sample_rows(batch) for part in feed.parts for batch in part)
    sums = torch.cat([*(each.reshape(-1).double() * rows for each in held), held[0].new_full((1,), rows).double()])
    for group in groups:
        distributed.all_reduce(sums, group=group)
    total = float(sums[-1])
    if not total:
        return
    means = torch.split(sums[:-1] / total, [each.numel() for each in held])
    training = [module.training for module in modules for _ in range(2)]
    for each, mean, changes in zip(held, means, training, strict=True):
        if changes:
            each.copy_(mean.view_as(each))


def sample_rows(batch: Batch) -> int:
    """Count the rows of a micro-batch that are samples: a rank without a share has one row of weight 0."""
    return 0 if batch.rows == 1 and not batch.weights.any() else batch.counted().rows


class SyncedBatchNorms:
    """Lets the batch norms of a model normalize by the whole batch in training.

    Attributes:
        on: whether other ranks run the same forward now; else each looks at its own share.
        counts: the rows that run now are samples.

    Raises:
        JobError: a batch norm has a forward of its own, or no running statistics.
    """

    def __init__(self, model: nn.Module, where: str) -> None:
        self.on, self.counts = False, True
        for name, module in model.named_modules():
            if not isinstance(module, BatchNorm):
                continue
            if type(module).forward not in (BatchNorm.forward, nn.SyncBatchNorm.forward):
                problem = f"module {name!r} has a forward of its own"
            elif module.running_mean is None:
                problem = f"module {name!r} keeps no running statistics, so that evaluation depends on the batch"
            else:
                module.forward = partial(self._forward, module)  # type: ignore[method-assign]
                continue
            raise JobError([f'{problem}, which batch_norm="sync" cannot follow'], where=where)

    def _forward(self, module: BatchNorm, given: Tensor) -> Tensor:
        if not module.training:
            return nn.functional.batch_norm(
                given, module.running_mean, module.running_var, module.weight, module.bias, False, 0.0, module.eps
            )
        own = _own_statistics(given, counts=self.counts or not self.on)
        gathered = _gathered(own) if self.on else own.unsqueeze(0)
        count, mean, variance = _merged(gathered)
        if self.on:
            _update(module, count, mean, variance)
        made: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            given, module.weight, module.bias, count, mean, variance, module.eps, self.on, bool(own[0])
        )
        return made


def _own_statistics(given: Tensor, *, counts: bool) -> Tensor:
    """Return count, means and sums of squared differences by channel of this rank's rows: (1 + 2 * channels,)."""
    kind = torch.promote_types(given.dtype, torch.float32)
    over = [dim for dim in range(given.dim()) if dim != 1]
    variance, mean = torch.var_mean(given.detach().to(kind), over, correction=0)
    rows = given.numel() // max(1, given.shape[1]) * counts
    return torch.cat((variance.new_full((1,), rows), mean * counts, variance * rows)).double()


def _gathered(own: Tensor) -> Tensor:
    """Return every rank's statistics, as (ranks, 1 + 2 * channels)."""
    found = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, own)
    return torch.stack(found)


def _merged(gathered: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return count, means and variances of all ranks' rows (Chan et al., 1979); 0 and 1 without rows."""
    counts, (means, squares) = gathered[:, :1], gathered[:, 1:].chunk(2, dim=1)
    total = counts.sum()
    if not total:
        return 0.0, torch.zeros_like(means[0]), torch.ones_like(means[0])
    mean = (means * counts).sum(0) / total
    return float(total), mean, (squares + counts * (means - mean).square()).sum(0) / total


def _update(module: BatchNorm, count: float, mean: Tensor, variance: Tensor) -> None:
    """Update running statistics by the batch, as torch does, with unbiased variances."""
    if count == 1:
        raise ValueError("expected more than 1 value per channel when training, over all ranks")
    if not count:
        return
    assert module.running_mean is not None and module.running_var is not None, "looked at when it was synchronized"
    factor = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        factor = 1.0 / float(module.num_batches_tracked) if factor is None else factor
    for held, now in ((module.running_mean, mean), (module.running_var, variance * count / (count - 1))):
        held.mul_(1.0 - (factor or 0.0)).add_((now * (factor or 0.0)).to(held.dtype))


class _Normalize(torch.autograd.Function):
    """Normalizes rows by means and variances of all ranks' rows."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor | None, bias: Tensor | None, count: float, mean: Tensor,
        variance: Tensor, eps: float, together: bool, counts: bool,
    ) -> Tensor:  # fmt: skip
        kind = torch.promote_types(given.dtype, torch.float32)
        shape = (1, -1, *(1 for _ in range(given.dim() - 2)))
        inverse = torch.rsqrt(variance + eps).to(kind)
        normal = (given.to(kind) - mean.to(kind).view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, inverse, weight)
        ctx.count, ctx.together, ctx.counts, ctx.kind = count, together, counts, given.dtype
        made = normal if weight is None else normal * weight.view(shape)
        return (made if bias is None else made + bias.view(shape)).to(given.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; two sums over all ranks' rows are reduced for them."""
        normal, inverse, weight = ctx.saved_tensors
        shape = (1, -1, *(1 for _ in range(slope.dim() - 2)))
        over = [dim for dim in range(slope.dim()) if dim != 1]
        slope = slope.to(normal.dtype)
        of_weight, of_bias = (slope * normal).sum(over), slope.sum(over)
        by = inverse if weight is None else inverse * weight
        sums = torch.stack((of_bias, of_weight)).double()
        if ctx.together:
            distributed.all_reduce(sums)
        if ctx.counts:  # what stands for an empty share has no part in the statistics
            straight, along = (sums / ctx.count).to(normal.dtype)
            slope = slope - straight.view(shape) - normal * along.view(shape)
        given = [(by.view(shape) * slope).to(ctx.kind), of_weight, of_bias, *[None] * 6]
        return tuple(each if needed else None for each, needed in zip(given, ctx.needs_input_grad, strict=True))
