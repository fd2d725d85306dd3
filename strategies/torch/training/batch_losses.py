"""Losses of a whole batch: its mean, rows gathered over the ranks, and a check of what a division would change."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from trainwright.core import random_state
from trainwright.core.data import Batch, Terms
from trainwright.core.errors import JobError, nearest
from trainwright.core.loss_api import BATCH_LOSS, gather_with
from trainwright.strategies.torch.checkpoint.tensor_digests import digests
from trainwright.strategies.torch.tensor_parallel.sharded_tensor import ShardedTensor, full_tensor
from trainwright.strategies.torch.torch_compat import generator_of, tensor_leaves, tree_leaves, tree_map
from trainwright.strategies.torch.torch_errors import TorchUserCode, summarize_error

_log = logging.getLogger(__name__)

_MEAN_ROUNDING = 160  # of float32: how far a mean over a batch and that of its halves may be apart, relatively
_LEAST_DIFFERENCE = 2e-6  # of them, absolutely: a loss near 0 is the rest of a subtraction
_TELLING = 100  # times that: halves this far apart show a weight in the mean that is wrong by 1 %
_ALONG = 3  # as many times less is allowed of a difference between gradients along that of the halves
_SCALES = (2.0**16, 2.0**8, 1.0)  # of a loss in float16, as training scales it; the next one where a gradient overflows
_Function = Callable[[Any, Any], Any]
_Mode = Callable[[], AbstractContextManager[Any]]
GroupFactory = Callable[[], ProcessGroup]


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """How a global batch is divided: data ranks, and micro-batches of each; and its step."""

    ranks: int = 1
    micro_batches: int = 1
    step: int = 0  # completed steps of the run

    @property
    def whole(self) -> bool:
        """Whether the batch is not divided."""
        return self.ranks * self.micro_batches == 1

    def __str__(self) -> str:
        return f"{self.ranks} data ranks with {self.micro_batches} micro-batches each"


WHOLE_BATCH = BatchLayout()


# --- A loss that is one number for a micro-batch ----------------------------------------------------------------------


Weight = str | Callable[[Any], Any] | None  # of a job


@dataclass(frozen=True, kw_only=True)
class BatchMean:
    """A loss that is one number for a micro-batch."""

    value: Tensor  # () of the graph
    count: Tensor | None  # () items that it is the mean of, as `weight=` counts them; None for the rows

    def of_rows(self, rows: int) -> Tensor | Terms:
        """Return it as the loss of each row, with weights whose sum is the count."""
        values = self.value.repeat(rows)
        return values if self.count is None else Terms(values, self.count / rows)

    def sums(self, rows: int) -> tuple[float, float]:
        """Return the sum of the items' losses and the number of items, given the rows."""
        count = float(rows if self.count is None else self.count)
        return float(self.value) * count if count else 0.0, count


def batch_mean(what: str, result: Any, weight: Weight, columns: Mapping[str, Tensor], where: str) -> Any:
    """Return a loss of one number as BatchMean, and another result unchanged.

    Args:
        what: names the function.
        result: what it returned; of an output of Hugging Face's models its `loss` is taken.

    Raises:
        JobError: weight= fits no such loss, or does not give a number.
        UserCodeError: weight= raised.
    """
    own = None if isinstance(result, Tensor | Terms) else getattr(result, "loss", None)
    value = own if isinstance(own, Tensor) else result
    if isinstance(value, Tensor) and not value.dim():
        value = full_tensor(value if value.is_floating_point() else value.float())
        return BatchMean(value=value, count=None if weight is None else _count(weight, columns, value, where))
    if weight is not None:
        problem = (
            f"weight= counts the items of a loss of one number, and {what} returned more: leave weight= out, or return "
            "the mean over these items"
        )
        raise JobError([problem], where=where)
    return value


def _count(weight: str | Callable[[Any], Any], columns: Mapping[str, Tensor], value: Tensor, where: str) -> Tensor:
    """Return how many items of a micro-batch count, in a type of losses."""
    if isinstance(weight, str) and weight not in columns:
        raise JobError([f"weight={weight!r} is not a column of the batch: {nearest(weight, columns)}"], where=where)
    with TorchUserCode("weight=", where):
        found = columns[weight].sum() if isinstance(weight, str) else weight(dict(columns))
        count = torch.as_tensor(found, device=value.device).detach()
    if count.numel() != 1:
        problem = f"weight= returned shape {tuple(count.shape)}: return one number for the micro-batch, such as a sum()"
        raise JobError([problem], where=where)
    return count.reshape(()).to(torch.float64 if value.dtype == torch.float64 else torch.float32)


# --- What a loss holds ------------------------------------------------------------------------------------------------


def to_device(loss: Any, device: torch.device) -> Any:
    """Return a loss or a metric with its tensors on a device; a module is moved, as by `Module.to`, and not copied."""
    if isinstance(loss, Tensor | nn.Module):
        return loss.to(device)
    if isinstance(loss, functools.partial):
        positional = (to_device(value, device) for value in loss.args)
        named = {name: to_device(value, device) for name, value in loss.keywords.items()}
        return functools.partial(to_device(loss.func, device), *positional, **named)
    return loss


def untrained_problems(loss: Any, model: nn.Module) -> list[str]:
    """Return why parameters of a loss would not be trained: the optimizer gets those of the model alone."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    trained = {*model.parameters()}
    own = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    names = [name for name, parameter in own if parameter.requires_grad and parameter not in trained]
    if not names:
        return []
    return [
        f"parameter {names[0]!r} of loss={type(loss).__name__}(...) requires a gradient, and only parameters of the "
        "model are trained: hold it in the model, or freeze it with requires_grad_(False)"
    ]


@contextmanager
def unchanged_buffers(what: str, function: Any, model: nn.Module, where: str) -> Iterator[None]:
    """Raise JobError where a call in this context changes a buffer of a loss or step, which the model does not hold."""
    function = inspect.unwrap(function)  # an engine may wrap a step
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    if not isinstance(function, nn.Module):
        yield
        return
    own = {*model.buffers()}
    saved = {name for name, buffer in function.named_buffers() if buffer in own}

    def found() -> dict[str, int]:
        held = {name: buffer for name, buffer in function.named_buffers() if name not in saved}
        return dict(zip(held, digests(held.values()), strict=True))

    before = found()
    yield
    changed = [name for name, digest in found().items() if before.get(name) != digest]
    if changed:
        problem = (
            f"buffer {changed[0]!r} of {what}{type(function).__name__}(...) changes when it is called, and is neither "
            "saved nor equal on all ranks: hold it in the model, as a buffer that its forward updates while training; "
            "or call eval() on the module, where the buffer should stay as it is"
        )
        raise JobError([problem], where=where)


# --- torch's own losses -----------------------------------------------------------------------------------------------


_BY_CLASS = frozenset({"CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss"})
_BINARY = frozenset({"BCELoss", "BCEWithLogitsLoss", "binary_cross_entropy", "binary_cross_entropy_with_logits"})
_PLAIN = frozenset(
    {
        "HuberLoss", "KLDivLoss", "L1Loss", "MSELoss", "PoissonNLLLoss", "SmoothL1Loss", "SoftMarginLoss",
        "huber_loss", "kl_div", "l1_loss", "mse_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss",
    }
)  # fmt: skip


def per_sample(function: _Function) -> _Function:
    """Return a mean of torch's own as a function that gives the values of which it is the mean.

    Losses of `torch.nn` and `torch.nn.functional`, with `functools.partial` or without, are called with
    `reduction="none"`. Cross-entropy and NLL by class give Terms: their mean divides by the weights of the classes that
    count. Other functions are returned unchanged.
    """
    base: Any = function
    given: dict[str, Any] = {}
    while isinstance(base, functools.partial) and not base.args:
        base, given = base.func, {**base.keywords, **given}
    kind: Any = type(base) if isinstance(base, nn.Module) else base
    if getattr(kind, "__module__", "") not in ("torch.nn.modules.loss", "torch.nn.functional"):
        return function
    names = ("reduction", "weight", "ignore_index", "label_smoothing")
    options: dict[str, Any] = {name: getattr(base, name, None) for name in names}
    options = options if isinstance(base, nn.Module) else given
    name, weight = kind.__name__, options.get("weight")
    if name in _BY_CLASS:  # with smoothing, a sample of a class of weight 0 has a loss all the same
        known = weight is None or not options.get("label_smoothing") or bool(weight.all())
    else:
        known = name in _BINARY or (name in _PLAIN and weight is None)
    if not known or options.get("reduction", "mean") != "mean" or {"reduce", "size_average"} & options.keys():
        return function
    unreduced: _Function = functools.partial(base, **{**given, "reduction": "none"})
    if isinstance(base, nn.Module):
        module: Any = copy.deepcopy(base)
        module.reduction, unreduced = "none", module
    if name not in _BY_CLASS:
        return unreduced
    return functools.partial(_class_terms, unreduced, weight, options.get("ignore_index", -100))


def has_class_weights(function: _Function) -> bool:
    """Return whether a function that `per_sample` returned has the weights of classes as those of its terms."""
    if not isinstance(function, functools.partial) or function.func is not _class_terms:
        return False
    return function.args[1] is not None


def _class_terms(
    unreduced: _Function, weight: Tensor | None, ignored: int, outputs: Any, targets: Tensor
) -> Tensor | Terms:
    """Return the terms of a mean by class; of targets that are probabilities the mean is over samples."""
    values: Tensor = unreduced(outputs, targets)
    if targets.is_floating_point():
        return values
    counts = targets != ignored
    if weight is None:
        return Terms(values, counts)
    weights = weight[targets.where(counts, 0)] * counts
    return Terms(values / weights.where(weights > 0, 1.0), weights)


# --- Rows of all ranks ------------------------------------------------------------------------------------------------


class BatchRows:
    """Gives a function of one micro-batch the rows of the global batch; `group` makes the group of its data ranks."""

    def __init__(self, batch: Batch, layout: BatchLayout, group: GroupFactory | None, where: str) -> None:
        self._batch, self._layout, self._group, self._where = batch, layout, group, where
        self._counts: list[int] = []  # rows of each rank, once something was gathered

    @functools.cached_property
    def _real(self) -> Tensor:
        """Whether each row has a weight."""
        return torch.from_numpy(self._batch.weights > 0)

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


# --- The check on the first batch -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LossCall:
    """A call of a loss or a step, which the check repeats with some of the rows."""

    what: str  # names the function
    function: _Function  # (given, targets) -> values, Terms or BatchMean
    given: Any  # tensors, however they are nested, whose first dimension is the rows
    targets: Any  # the same
    rows: int
    parameters: tuple[Tensor, ...] = ()  # of the model that the function calls
    divided: bool = False  # ranks hold parts of that model, so that all must call it equally often

    def on(self, chosen: Tensor | None, gathers: list[bool]) -> Any:
        """Call the function with chosen rows, or with all as they are for None; note calls of `tw.gather`."""

        def kept(tensor: Any) -> Any:
            gathers.append(True)
            return tensor

        def pick(leaf: Any) -> Any:
            if chosen is not None:
                return _rows_of(leaf, chosen, self.rows)
            return leaf.clone() if isinstance(leaf, Tensor) else leaf

        with gather_with(kept):
            return self.function(tree_map(pick, self.given), tree_map(pick, self.targets))

    def differentiable(self) -> tuple[LossCall, list[Tensor]]:
        """Return the call, and by what its gradient is taken: trained parameters, or outputs that it is given.

        Nothing where a backward would exchange tensors with other ranks, which may not run it.
        """
        if self.parameters:
            return self, [] if self.divided else [each for each in self.parameters if each.requires_grad]
        if any(isinstance(leaf, ShardedTensor) for leaf in tree_leaves(self.given)):
            return self, []
        given = tree_map(lambda leaf: leaf.detach().requires_grad_() if _is_output(leaf) else leaf, self.given)
        return replace(self, given=given), [leaf for leaf in tree_leaves(given) if _is_output(leaf)]


def check_divisible(call: LossCall, layout: BatchLayout, where: str, modes: Sequence[_Mode] = (nullcontext,)) -> str:
    """Raise JobError where the loss of a batch depends on how it is divided; return why that could not be compared.

    The function is called with all rows, and with half of them in another order; where it gathers, with all of them in
    another order. Of a loss of each sample, the values must stay the same. A function that draws random numbers cannot
    be compared, and is not checked. A loss of one number must be the mean of its two halves; one that is not of rows,
    or that other random numbers change, is refused, unless `weight=` says what it is the mean of.

    Args:
        modes: contexts, the first of which is used in which the function does not raise; in each of them that is tried
            without gradients, then with them.
    """
    problem = ""
    for mode, gradients in product(modes, (False, True)):
        with mode(), torch.set_grad_enabled(gradients), _own_casts():
            gathers: list[bool] = []
            random_state.seed_generators(0)
            before = _random_state(call.given)
            try:
                result = tree_map(_without_graph, call.on(None, gathers))
            except Exception as error:
                if TorchUserCode.lost_peer(error):
                    raise
                if _ran_out_of_memory(call, error):
                    return ""
                problem = summarize_error(error)
                continue
            _compare(call, result, layout, where, gathers=bool(gathers), drew=_random_state(call.given) != before)
            return ""
    return problem


def _compare(call: LossCall, result: Any, layout: BatchLayout, where: str, *, gathers: bool, drew: bool) -> None:
    """Raise JobError where the result for all rows does not follow from those for some; see `check_divisible`."""
    shuffled = torch.randperm(call.rows, generator=torch.Generator().manual_seed(0))
    first, second = shuffled[: -(-call.rows // 2)], shuffled[-(-call.rows // 2) :]
    rounding = _rounding((call.given, call.targets, result, call.parameters))
    if isinstance(result, BatchMean):
        found = _mean_problem(result, call, [shuffled] if gathers else [first, second], drew=drew, rounding=rounding)
        if found:
            raise JobError([mean_message(call.what, found, layout)], where=where)
        return
    whole = None if drew else _numbers(result)
    if whole is not None and len(whole[0]) == call.rows:
        found = _sample_problem(whole, call, shuffled if gathers else first, rounding)
        if found:
            raise JobError([_dependence_message(call.what, found, gathers, layout)], where=where)


@contextmanager
def _own_casts() -> Iterator[None]:
    """Forget which weights autocast has cast, at both ends: torch 2.9 takes one without a graph for one with it."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _ran_out_of_memory(call: LossCall, error: Exception) -> bool:
    """Return whether a call needed too much memory, which says nothing of the loss, and log that.

    Raises it where the model is divided: the other ranks are in the same call, and would take the next one for it.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        return False
    if call.divided:
        raise error
    _log.warning("%s was not compared with its parts: %s", call.what, summarize_error(error))
    return True


def _without_graph(leaf: Any) -> Any:
    if isinstance(leaf, BatchMean):
        return replace(leaf, value=leaf.value.detach())
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _is_output(leaf: Any) -> bool:
    """Return whether a gradient can be taken by a value."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _mean_problem(whole: BatchMean, call: LossCall, parts: Sequence[Tensor], *, drew: bool, rounding: float) -> str:
    """Return why a loss of one number is not, or may not be, the mean of its parts; empty where it is.

    Args:
        parts: all rows in another order, or each half of them; the second half of one row is empty.
        drew: it draws random numbers.
    """
    told, rows = whole.count is not None, call.rows
    tensors = tensor_leaves(call.given)
    if not tensors or not all(tensor.dim() for tensor in tensors):
        return "" if told else "the model's outputs hold values without rows, such as a loss of its own: use step="
    try:  # every rank calls it equally often, whatever its rows: a model may be divided over ranks
        if drew and not _is_repeatable(whole, call):
            return "" if told else "it draws random numbers, so that it cannot be compared with its halves"
        found = [_without_graph(call.on(part if len(part) else parts[0], [])).sums(len(part)) for part in parts]
    except Exception as error:
        if TorchUserCode.lost_peer(error):
            raise
        if _ran_out_of_memory(call, error):
            return ""
        return f"with {len(parts[0])} of {rows} rows it raised {type(error).__name__}: {error}"
    if rows == 1:
        return "" if told else "micro-batches of one row have no halves to compare"
    (total, count), (expected, counted) = (sum(each) for each in zip(*found, strict=True)), whole.sums(rows)
    if told and not math.isclose(count, counted, rel_tol=1e-5):
        return f"weight= counts {counted:.6g} items in {rows} rows, and {count:.6g} in {len(parts)} parts of them"
    value, mean = (each / max(counted, 1.0) for each in (expected, total))
    scale = max(abs(value), *(abs(each) / max(counted, 1.0) for each, _ in found))
    rounded = 2 * torch.finfo(whole.value.dtype).eps
    relative = max(_MEAN_ROUNDING * torch.finfo(torch.float32).eps, rounding**2 / 8, rounded)
    allowed = relative * scale + _LEAST_DIFFERENCE
    if abs(value - mean) > allowed:
        return f"it is {value:.6g} for {rows} rows, and the mean of {len(parts)} parts of them is {mean:.6g}"
    means = [each / items for each, items in found if items]
    if len(means) < 2 or scale <= _LEAST_DIFFERENCE or abs(means[0] - means[1]) > _TELLING * allowed:
        return ""
    return _gradient_problem(call, parts, [items / counted for _, items in found], rounding)


def _is_repeatable(whole: BatchMean, call: LossCall) -> bool:
    """Return whether a loss is the same with other random numbers: a shuffle may change the order of sums alone."""
    random_state.seed_generators(1)
    again = call.on(None, [])
    rounded = max(float(torch.finfo(whole.value.dtype).eps), _MEAN_ROUNDING * torch.finfo(torch.float32).eps)
    return math.isclose(float(again.value), float(whole.value), rel_tol=rounded)


def _gradient_problem(call: LossCall, parts: Sequence[Tensor], shares: Sequence[float], rounding: float) -> str:
    """Return how the gradient of a loss of one number differs from the mean of those of its halves; empty where not.

    Halves of the same value do not tell what a mean is over: at the start, each token may have the same loss. Of the
    difference, the part along that of the two gradients comes from other shares, and little of it from rounding.
    """
    compared, wanted = call.differentiable()
    if not wanted:
        return ""
    try:
        off, along, between, *largest = _gradient_sums(compared, wanted, parts, shares)
    except RuntimeError as error:  # out of memory, or of an LSTM, which cuDNN does not differentiate in this mode
        cause = summarize_error(error)
        _log.warning("the gradients of %s were not compared, and its values are nearly equal: %s", call.what, cause)
        return ""
    scale = math.sqrt(max(largest))
    if not math.isfinite(off):  # an overflow in float16
        return ""
    if max(math.sqrt(off), abs(along) / math.sqrt(between or 1.0) * _ALONG) <= rounding * scale:
        return ""
    return (
        f"its gradient for {call.rows} rows is not the mean of those of 2 parts of them: it differs by "
        f"{math.sqrt(off) / scale:.2g} of its norm"
    )


def _gradient_sums(
    call: LossCall, wanted: Sequence[Tensor], parts: Sequence[Tensor], shares: Sequence[float]
) -> list[float]:
    """Return products of gradients, where D is that of all rows less the mean of those of the halves, G and H.

    Returns:
        D * D, D * (G - H), (G - H) * (G - H), G * G and H * H.
    """
    with torch.enable_grad(), _own_casts():
        found = [_gradients(call.on(part, []).value, wanted) for part in (None, *parts)]
    sums = torch.zeros(5, dtype=torch.float64)
    for whole, first, second in zip(*found, strict=True):
        rest, apart = whole - shares[0] * first - shares[1] * second, first - second
        pairs = ((rest, rest), (rest, apart), (apart, apart), (first, first), (second, second))
        sums += torch.stack([torch.sum(one * other, dtype=torch.float64) for one, other in pairs]).cpu()
    products: list[float] = sums.tolist()
    return products


def _gradients(value: Tensor, wanted: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of a number by some tensors, as real and dense tensors."""
    if not value.requires_grad:
        return [torch.zeros_like(each) for each in wanted]
    half = torch.float16 in _computing_types((value, *wanted))  # in which those of a mean over many values vanish
    found: list[Tensor] = []
    for scale in _SCALES if half else _SCALES[-1:]:
        slope = torch.full_like(value, scale)
        options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True, "retain_graph": scale > 1.0}
        dense = [each.to_dense() for each in torch.autograd.grad(value, wanted, slope, **options)]
        real = [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in dense]
        found = [each.to(torch.promote_types(each.dtype, torch.float32)) / scale for each in real]
        if not half or all(bool(each.isfinite().all()) for each in found):
            break
    return found


def _sample_problem(whole: tuple[Tensor, Tensor], call: LossCall, chosen: Tensor, rounding: float) -> str:
    """Return how a sample's loss depends on the other rows; empty where it does not, or that is unknown."""
    count = len(whole[0])
    try:
        part = _numbers(call.on(chosen, []))
    except Exception as error:
        if TorchUserCode.lost_peer(error):
            raise
        if _ran_out_of_memory(call, error):
            return ""
        if any(leaf.dim() and count not in leaf.shape for leaf in tensor_leaves(call.given)):
            return ""  # it may not be the rows that were too few
        return f"with {len(chosen)} of {count} rows it raised {type(error).__name__}: {error}"
    return "" if part is None else _difference(whole, part, chosen, rounding)


def _random_state(given: Any) -> object:
    """Return the states of all generators that a function of these tensors may use."""
    devices = {leaf.device for leaf in tensor_leaves(given) if leaf.is_cuda}
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


def _rounding(values: Any) -> float:
    """Return the largest relative difference that rounding may make, by the coarsest type that may be computed in.

    A result in float64 may come from a model in float32, and accelerators multiply float32 as TF32.
    """
    tensors = [value for value in tensor_leaves(values) if value.is_floating_point()]
    kinds = _computing_types(tensors) | {torch.float32}
    if any(tensor.device.type != "cpu" for tensor in tensors):
        kinds.add(torch.float16)  # as many bits of a fraction as TF32 has
    return float(max(torch.finfo(kind).eps for kind in kinds) ** 0.5)


def _computing_types(tensors: Iterable[Tensor]) -> set[torch.dtype]:
    """Return the types of tensors, and those that autocast may compute in on their devices."""
    kinds, devices = {tensor.dtype for tensor in tensors}, {tensor.device.type for tensor in tensors}
    return kinds | {torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)}


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


def mean_message(what: str, found: str, layout: BatchLayout) -> str:
    """Return the error of a loss of one number that is not, or may not be, a mean over rows."""
    return (
        f"{what} returned one number for the batch, and this plan divides a batch over {layout}: the number must be a "
        f"mean over rows, but {found}. For a mean over tokens, pixels or labels that count, set weight= to their "
        'number, such as lambda batch: (batch["labels"] != -100).sum(); or return one loss per sample '
        '(reduction="none") or tw.Terms(values, weights); or run on one worker with accumulation=1; or accept the '
        f'difference with inexact=("{BATCH_LOSS}",)'
    )
