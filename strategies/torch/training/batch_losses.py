"""Losses that compare the samples of a batch: rows gathered over the ranks, and a check that finds such losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from trainwright.core import random_state
from trainwright.core.data import Batch, Terms
from trainwright.core.errors import JobError
from trainwright.core.loss_api import gather_with
from trainwright.strategies.torch.torch_compat import generator_of, tree_leaves, tree_map
from trainwright.strategies.torch.torch_errors import TorchUserCode

BATCH_LOSS = "batch_loss"  # in a job's inexact=
_Function = Callable[[Any, Any], Any]
GroupFactory = Callable[[], ProcessGroup]


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """How a global batch is divided: data ranks, and micro-batches of each."""

    ranks: int = 1
    micro_batches: int = 1

    @property
    def whole(self) -> bool:
        """Whether the batch is not divided."""
        return self.ranks * self.micro_batches == 1

    def __str__(self) -> str:
        return f"{self.ranks} data ranks with {self.micro_batches} micro-batches each"


WHOLE_BATCH = BatchLayout()


class BatchRows:
    """Gives a function of one micro-batch the rows of the global batch.

    Args:
        batch: the micro-batch.
        layout: of the global batch.
        group: makes the process group of its data ranks; None where there is none.
        where: the rank, for errors.
    """

    def __init__(self, batch: Batch, layout: BatchLayout, group: GroupFactory | None, where: str) -> None:
        self._batch, self._layout, self._group, self._where = batch, layout, group, where
        self._counts: list[int] = []  # rows of each rank, once something was gathered
        self._real = torch.from_numpy(batch.weights > 0)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks; see `core.loss_api`. Raises JobError where that is not possible."""
        problem = self._problem(tensor)
        if problem:
            raise JobError([problem], where=self._where)
        if not self._counts:
            self._count(tensor.device)
        own = tensor if bool(self._real.all()) else tensor[self._real.to(tensor.device)]
        if self._shared is None:
            return own
        rows: Tensor = _GatherRows.apply(own, self._counts, self._shared)  # type: ignore[no-untyped-call]
        return rows

    def own(self, result: Any) -> Any:
        """Return this rank's rows of a result for all rows; rows of weight 0 get any row."""
        values = result.values if isinstance(result, Terms) else result
        total = sum(self._counts)
        if not self._counts or not isinstance(values, Tensor) or not values.dim() or len(values) != total:
            return result
        first = 0 if self._shared is None else sum(self._counts[: distributed.get_rank(self._shared)])
        places = torch.where(self._real, self._real.cumsum(0) - 1 + first, 0).to(values.device)
        if not isinstance(result, Terms):
            return values[places]
        weights = torch.as_tensor(result.weights, device=values.device)
        return Terms(values[places], weights[places] if weights.dim() and len(weights) == total else weights)

    def _count(self, device: torch.device) -> None:
        """Count the rows with weight of each rank; all rows where no rank has any, as in a throwaway step."""
        own = torch.tensor([int(self._real.sum()), len(self._real)], device=device)
        found = [own]
        if self._shared is not None:
            found = [torch.empty_like(own) for _ in range(self._layout.ranks)]
            distributed.all_gather(found, own, group=self._shared)
        real, every = torch.stack(found).t().tolist()
        self._counts = real if sum(real) else every
        if not sum(real):
            self._real = torch.ones_like(self._real)

    @property
    def _shared(self) -> ProcessGroup | None:
        return self._group() if self._group is not None and self._layout.ranks > 1 else None

    def _problem(self, tensor: Any) -> str:
        if self._layout.micro_batches > 1:
            return (
                f"tw.gather sees one of {self._layout.micro_batches} micro-batches in a step: a loss that compares "
                "samples needs the whole batch at once: set accumulation=1 and a strategy without micro-batches, such "
                "as data_parallel or sharded"
            )
        if self._layout.ranks > 1 and self._group is None:
            return (
                f"tw.gather cannot reach the other {self._layout.ranks - 1} parts of the batch in this strategy: use "
                'strategy="data_parallel" or "sharded"'
            )
        if not isinstance(tensor, Tensor) or not tensor.dim() or len(tensor) != self._batch.rows:
            shape = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            return (
                f"tw.gather was given {shape} for {self._batch.rows} rows: give it tensors with a row for each sample"
            )
        return ""


class _GatherRows(torch.autograd.Function):
    """All-gather of rows; the gradient of a rank's rows is summed over all ranks' losses."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: list[int], group: ProcessGroup) -> Tensor:
        ctx.counts, ctx.group = counts, group
        padded = own.new_zeros((max(counts), *own.shape[1:]))
        padded[: len(own)] = own
        found = [torch.empty_like(padded) for _ in counts]
        distributed.all_gather(found, padded, group=group)
        return torch.cat([rows[:count] for rows, count in zip(found, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        whole = gradients[0].contiguous().clone()
        distributed.all_reduce(whole, group=ctx.group)
        rank = distributed.get_rank(ctx.group)
        first = sum(ctx.counts[:rank])
        return whole[first : first + ctx.counts[rank]], None, None


@torch.no_grad()
def check_samples_independent(
    what: str,
    function: _Function,
    given: Any,
    targets: Any,
    batch: Batch,
    layout: BatchLayout,
    where: str,
    parameters: Iterable[Tensor] = (),
) -> None:
    """Raise JobError where the loss of a sample depends on the other samples of its micro-batch.

    The function is called with all rows, and with half of them in another order, without gradients; where it gathers,
    with all of them in another order. A function that draws random numbers cannot be compared, and is not checked.

    Args:
        what: names the function.
        function: (given, targets) -> values or Terms.
        given, targets: tensors, however they are nested, whose first dimension is the rows.
        batch: the micro-batch.
        layout: of the global batch.
        parameters: of the model that the function calls.
    """
    count, gathers = batch.rows, []
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(0))

    def called(pick: Callable[[Any], Any]) -> Any:
        def kept(tensor: Any) -> Any:
            gathers.append(True)
            return tensor

        with gather_with(kept):
            return _numbers(function(tree_map(pick, given), tree_map(pick, targets)))

    random_state.seed_generators(0)
    before = _random_state(given)
    try:
        whole = called(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
    except Exception as error:
        if TorchUserCode.lost_peer(error):
            raise
        return  # the call that counts comes next, and its error is told; one that needs gradients is let be
    if _random_state(given) != before or whole is None or len(whole[0]) != count:
        return
    chosen = shuffled if gathers else shuffled[: -(-count // 2)]
    try:
        part = called(lambda leaf: _rows_of(leaf, chosen, count))
    except Exception as error:
        if TorchUserCode.lost_peer(error):
            raise
        if isinstance(error, torch.OutOfMemoryError):
            return
        if any(isinstance(leaf, Tensor) and leaf.dim() and count not in leaf.shape for leaf in tree_leaves(given)):
            return  # it may not be the rows that were too few
        found = f"with {len(chosen)} of {count} rows it raised {type(error).__name__}: {error}"
    else:
        rounding = _rounding((*tree_leaves((given, targets, whole)), *parameters))
        found = "" if part is None else _difference(whole, part, chosen, rounding)
    if found:
        raise JobError([_dependence_message(what, found, bool(gathers), layout)], where=where)


def _random_state(given: Any) -> object:
    """Return the states of all generators that a function of these tensors may use."""
    devices = {leaf.device for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.is_cuda}
    return random_state.generator_states(), [
        generator_of(device).get_state().numpy().tobytes() for device in sorted(devices, key=str)
    ]


def _numbers(result: Any) -> tuple[Tensor, Tensor] | None:
    """Return values and weights; None where they are not tensors with a row for each sample."""
    values, weights = result if isinstance(result, Terms) else (result, None)
    if not isinstance(values, Tensor) or not values.dim():
        return None
    values = values.detach()
    told = torch.ones_like(values) if weights is None else torch.as_tensor(weights, device=values.device).detach()
    return values, told if told.dim() and len(told) == len(values) else told.expand_as(values)


def _rows_of(leaf: Any, chosen: Tensor, count: int) -> Any:
    """Return some rows of a tensor: of the dimension with one entry a sample, or of samples laid end to end."""
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return leaf
    along = next((number for number, size in enumerate(leaf.shape) if size == count), None)
    if along is not None:
        return leaf.index_select(along, chosen.to(leaf.device))
    if len(leaf) and len(leaf) % count == 0:
        apart = leaf.reshape(count, len(leaf) // count, *leaf.shape[1:])
        return apart.index_select(0, chosen.to(leaf.device)).flatten(0, 1)
    return leaf


def _rounding(values: Iterable[Any]) -> float:
    """Return the largest relative difference that rounding may make, by the coarsest type that may be computed in.

    A result in float64 may come from a model in float32, and accelerators multiply float32 as TF32.
    """
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    devices = {tensor.device.type for tensor in tensors}
    kinds = {tensor.dtype for tensor in tensors} | {torch.float32}
    kinds |= {torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)}
    if devices - {"cpu"}:
        kinds.add(torch.float16)  # as many bits of a fraction as TF32 has
    return float(max(torch.finfo(kind).eps for kind in kinds) ** 0.5)


def _difference(whole: tuple[Tensor, Tensor], part: tuple[Tensor, Tensor], chosen: Tensor, rounding: float) -> str:
    """Describe where a sample's values differ most; empty where they differ by no more than rounding."""
    for each, other in zip(whole, part, strict=True):
        if other.shape[:1] != chosen.shape:
            return f"of {len(chosen)} rows it gives {tuple(other.shape)}"
        expected = each.index_select(0, chosen.to(each.device))
        if expected.shape != other.shape:
            return f"a sample's loss has shape {tuple(expected.shape[1:])} and among others {tuple(other.shape[1:])}"
        expected, other = expected.double().nan_to_num(), other.double().nan_to_num()
        scale = float(expected.abs().max()) if expected.numel() else 0.0
        apart = (expected - other).abs().reshape(len(chosen), -1).amax(1)
        worst = int(apart.argmax())
        if float(apart[worst]) > rounding * scale:
            here, there = (float(it.reshape(len(chosen), -1)[worst].sum()) for it in (expected, other))
            return f"that of one sample is {here:.6g} in its micro-batch, and {there:.6g} with some of the others in it"
    return ""


def _dependence_message(what: str, found: str, gathers: bool, layout: BatchLayout) -> str:
    if gathers:
        return (
            f"{what} depends on the order of the rows ({found} in another order), and tw.gather gives them rank by "
            "rank: identify pairs by a column or by separate outputs, not by their place in the batch"
        )
    return (
        f"{what} is not of each sample alone: {found}; this plan divides a batch over {layout}, so the result would "
        "depend on the plan: compare with the whole batch by tw.gather(...) and accumulation=1, or run on one worker "
        f'with accumulation=1, or accept it with inexact=("{BATCH_LOSS}",)'
    )
