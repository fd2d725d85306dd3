"""Traces one forward on the meta device: costs of each module, and which layers tensor parallelism can divide.

A linear layer may be divided by its outputs if they go elementwise, or head by head, to another linear layer, which is
then divided by its inputs and ends with an all-reduce (Shoeybi et al., 2019). An operation between them that needs all
features of a token, such as a norm or a residual sum, forbids it. The outputs of the last layer, as a vocabulary's, and
the largest embedding may be divided too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from trainwright.strategies.torch.torch_compat import (
    TorchDispatchMode,
    multi_head_attention,
    storage_key,
    tensor_leaves,
)
from trainwright.strategies.torch.tracing.call_trace import MetaValueMode

_aten = torch.ops.aten
_LINEAR = (_aten.mm, _aten.addmm)
_BATCHED_PRODUCTS = {_aten.bmm: 0, _aten.baddbmm: 1}  # with the place of their first factor
_JOINS = (_aten.cat, _aten.stack)
_KEEPS = (_aten.native_dropout, _aten.clone, _aten._to_copy, _aten._unsafe_view, _aten.copy_, _aten.masked_fill)
_SOFTMAX = (_aten._softmax, _aten._safe_softmax)
_OVER_LAST = (
    _aten.mean, _aten.sum, _aten.native_layer_norm, _aten._fused_rms_norm, _aten.amax, _aten.linalg_vector_norm,
)  # fmt: skip
_LayerTags = frozenset[int]
_NO_LAYERS: _LayerTags = frozenset()
ModelCall = Callable[[nn.Module, Mapping[str, Tensor]], Any]  # calls a model with columns on its device


@dataclass(kw_only=True)
class _ShardableWork:
    """The work of one call that tensor parallelism could divide, with the linear layers that must be divided for it."""

    products: list[_LayerTags | None] = field(default_factory=list)  # of each; None where nothing can divide it
    traffic: list[tuple[float, _LayerTags]] = field(default_factory=list)  # numbers read and written
    reductions: list[_LayerTags] = field(default_factory=list)  # of each linear layer that is divided by its inputs
    table: int = 0  # elements of a table that it looks numbers up in


class _DivisionAnalysis:
    """Follows the outputs of linear layers by storage, to find which layers can be divided; not those in `whole`."""

    def __init__(self, parameters: set[int], whole: frozenset[int]) -> None:
        self._parameters, self._kept = parameters, whole
        self._tags: dict[int, tuple[Tensor, _LayerTags]] = {}  # kept alive, so that no other takes a storage's place
        self._widths: list[int] = []  # outputs of each linear layer that may be divided by them
        self._columns: list[int] = []  # storage of its weight
        self._rows: list[_LayerTags] = []
        self._inputs: list[int] = []  # storage of the weight that is divided by its inputs for these
        self._tables: dict[int, int] = {}  # elements of each table, by storage
        self._joint: list[_LayerTags] = []
        self._failed: set[int] = set()
        self._last = _NO_LAYERS

    def of(self, tensor: Tensor) -> _LayerTags:
        """Return the linear layers that must be divided so that this tensor is."""
        found = self._tags.get(storage_key(tensor))
        return found[1] if found else _NO_LAYERS

    def see(self, func: Any, args: Any, outputs: Any, share: _ShardableWork, *, scores: bool) -> None:
        """Record an operation that is not a view; `scores` says whether it normalizes attention scores."""
        packet = func._overloadpacket
        given = tensor_leaves(args)
        made = tensor_leaves(outputs)
        tags = _NO_LAYERS.union(*map(self.of, given))
        if packet in _LINEAR and self._held(args[-1]):
            self._linear(args[-2], made[0], storage_key(args[-1]), share)
        elif packet in _BATCHED_PRODUCTS:
            first = _BATCHED_PRODUCTS[packet]
            self.attended((args[first], args[first + 1]), made[0], share)
        elif packet is _aten.embedding and self._held(args[0]):
            table = storage_key(args[0])
            if table not in self._kept:
                share.table = max(share.table, args[0].numel())
                self._tables[table] = args[0].numel()
        elif tags and self._keeps(func, given, made, scores):
            self._mark(made, tags)
        else:
            self._failed |= tags

    def attended(self, factors: tuple[Tensor, ...], made: Tensor, share: _ShardableWork) -> None:
        """Record products of linear layers' outputs, head by head."""
        tags = [self.of(each) for each in factors]
        whole = _NO_LAYERS.union(*tags)
        if all(tags):
            self._mark([made], whole)
            self._joint.append(whole)
        else:
            self._failed |= whole
        share.products.append(whole if all(tags) else None)

    def ends(self, outputs: Any) -> None:
        """Record what the model returns."""
        self._last = _NO_LAYERS.union(*map(self.of, tensor_leaves(outputs)))

    def settled(self, heads: int) -> _LayerTags:
        """Return the linear layers that can be divided by outputs, by any divisor of the heads."""
        inner = {one for one in _NO_LAYERS.union(*self._rows) if not self._widths[one] % max(heads, 1)}
        good = (inner | self._last) - self._failed  # a vocabulary is padded
        groups = [*self._rows, *self._joint]
        while bad := [group for group in groups if group & good and not group <= good]:
            good -= _NO_LAYERS.union(*bad)
        return frozenset(good) if heads else _NO_LAYERS

    def blocks(self, heads: int) -> list[tuple[frozenset[int], frozenset[int]]]:
        """Return what must be divided together: storages of weights divided by outputs, and by inputs."""
        good = self.settled(heads)
        blocks: list[tuple[_LayerTags, frozenset[int]]] = []
        rows = [(tags, frozenset([weight])) for tags, weight in zip(self._rows, self._inputs, strict=True)]
        for tags, inputs in (row for row in rows if row[0] <= good):
            for other in [each for each in blocks if each[0] & tags]:
                blocks.remove(other)
                tags, inputs = tags | other[0], inputs | other[1]
            blocks.append((tags, inputs))
        return [(frozenset(self._columns[one] for one in tags), inputs) for tags, inputs in blocks]

    def weights(self, heads: int) -> frozenset[int]:
        """Return the storages of all weights that count as divided."""
        good = self.settled(heads)
        inputs = {weight for tags, weight in zip(self._rows, self._inputs, strict=True) if tags <= good}
        return frozenset({*inputs, *(self._columns[one] for one in good)}) | self.ends_of_model()[1]

    def ends_of_model(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the storages of the weights of the last layers, and of the largest embedding."""
        last = frozenset(self._columns[one] for one in self._last - _NO_LAYERS.union(*self._rows))
        largest = max(self._tables, key=self._tables.__getitem__, default=None)
        return last, frozenset() if largest is None else frozenset([largest])

    def _linear(self, given: Tensor, made: Tensor, weight: int, share: _ShardableWork) -> None:
        tags = self.of(given)
        if tags:
            self._rows.append(tags)
            self._inputs.append(weight)
            self._failed |= tags if weight in self._kept else _NO_LAYERS
            share.reductions.append(tags)
        else:
            tags = frozenset([len(self._widths)])
            self._failed |= tags if weight in self._kept else _NO_LAYERS
            self._widths.append(made.shape[-1])
            self._columns.append(weight)
            self._mark([made], tags)
        share.products.append(tags)

    def _keeps(self, func: Any, given: list[Tensor], made: list[Tensor], scores: bool) -> bool:
        """Return whether a rank can run an operation on its part of the features or heads."""
        packet, whole = func._overloadpacket, [each for each in given if not self.of(each)]
        if packet in _SOFTMAX:
            return scores
        if packet in _JOINS:
            return not any(each.numel() for each in whole)
        if packet in _OVER_LAST:
            width = given[0].shape[-1]
            tags = self.of(given[0])
            return given[0].ndim > 3 and all(width < self._widths[one] for one in tags)  # over a head
        if torch.Tag.pointwise in func.tags or packet in _KEEPS:
            return bool(made) and all(each.numel() < made[0].numel() for each in whole)
        return False

    def _mark(self, made: list[Tensor], tags: _LayerTags) -> None:
        for each in made:
            self._tags[storage_key(each)] = each, tags

    def _held(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self._parameters


# --- Operations of one forward pass -----------------------------------------------------------------------------------


_FREE_OPS = (
    _aten._unsafe_view, _aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.detach,
)  # fmt: skip
# These read as much as they write.
_GATHER_OPS = (_aten.embedding, _aten.index_select, _aten.gather, _aten.index)


@dataclass(kw_only=True)
class ModuleCalls:
    """The costs of one module's calls, without those of the modules that it calls."""

    flops: float = 0.0
    fused_flops: float = 0.0  # of these, of fused attention
    matmuls: int = 0
    launches: int = 0
    traffic: float = 0.0
    kept: float = 0.0
    scores: float = 0.0
    output: int = 0
    place: int = 0  # among all calls, in the order in which they began
    cut: float = 0.0  # numbers that calls up to this one and calls after it pass to each other
    splits: bool = False  # whether tensor parallelism divides its products
    # split_kept, split_traffic: what of `kept` and `traffic` it divides
    split_kept: float = 0.0
    split_traffic: float = 0.0
    reductions: int = 0  # all-reduces of its output if it does
    share: _ShardableWork = field(default_factory=_ShardableWork)  # what that follows from


@dataclass(frozen=True, kw_only=True)
class ForwardTrace:
    """The trace of one forward pass."""

    calls: Mapping[nn.Module, ModuleCalls]  # by module, in the order in which they first ran
    heads: int  # attention heads that can be computed independently; 0 where there is none
    tokens: int  # of the longest sequence that attends; 1 where there is none
    division: _DivisionAnalysis  # what became of the outputs of linear layers
    asks: bool = False  # the flow asked for values of tensors, which followed from the inputs or from constants


class _OpTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up each module's own operations, and what autograd saves for backward.

    Args:
        held: storages that are there anyway, such as those of `parameters`.
        whole: storages of the parameters that tensor parallelism does not divide, whatever is found.
    """

    def __init__(self, held: set[int], parameters: set[int], rows: int, whole: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: dict[nn.Module, ModuleCalls] = {}
        self._open: list[nn.Module] = []
        # By storage; kept alive, so that no other takes its place.
        self._saved: dict[int, tuple[Tensor, ModuleCalls]] = {}
        self._held = held
        self._spans: dict[int, tuple[Tensor, int, int]] = {}  # first and last place of all that make or read each
        self._scores = _AttentionScores(rows)
        self._division = _DivisionAnalysis(parameters, whole)
        self._paused = False

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Count the operations of a module inside this context."""
        with ExitStack() as stack:
            for module in model.modules():
                stack.callback(module.register_forward_pre_hook(self._enter).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved))
            stack.enter_context(self)
            stack.enter_context(_FusedKernels(self))
            yield

    def found(self) -> ForwardTrace:
        """Return the trace."""
        divided = self._division.settled(self._scores.heads)
        for tensor, call in self._saved.values():
            size = _size(tensor)
            if self._scores.among(tensor):
                call.scores += size
                call.traffic -= min(size, call.traffic)
                continue
            call.kept += size
            if _all_divided(self._division.of(tensor), divided):
                call.split_kept += size
        calls = list(self._calls.values())
        ends = [0.0] * (len(calls) + 1)
        for tensor, first, last in self._spans.values():
            ends[first] += _size(tensor)
            ends[last] -= _size(tensor)
        for call, crossing in zip(calls, accumulate(ends), strict=False):
            call.cut = crossing
        table = max((call.share.table for call in self._calls.values()), default=0)
        for call in self._calls.values():
            _apply_division(call, divided, table)
        self._saved.clear()
        found = self._scores
        return ForwardTrace(calls=self._calls, heads=found.heads, tokens=found.tokens, division=self._division)

    def attended(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Count fused attention: two products, and scores that are never written."""
        self._scores.attended(query, key)
        if self._open:
            self._division.attended((query, key, value), output, self._calls[self._open[-1]].share)
            call = self._calls[self._open[-1]]
            call.launches += 1
            call.matmuls += 2
            flops = 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
            call.flops, call.fused_flops = call.flops + flops, call.fused_flops + flops

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no operation inside this context."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        self._calls.setdefault(module, ModuleCalls(place=len(self._calls)))
        self._open.append(module)

    def _leave(self, module: nn.Module, _inputs: Any, outputs: Any) -> None:
        self._open.pop()
        self._calls[module].output = count_elements(outputs)
        if not self._open:
            self._division.ends(outputs)

    def _save(self, tensor: Tensor) -> Tensor:
        """Count what autograd saves; each storage counts once, where it was saved first."""
        key = storage_key(tensor)
        if self._open and key not in self._held and key not in self._saved:
            self._saved[key] = tensor, self._calls[self._open[-1]]
        return tensor

    def _span(self, tensors: Any) -> None:
        """Note that a call makes or reads tensors."""
        place = self._calls[self._open[-1]].place
        for tensor in tensor_leaves(tensors):
            if (key := storage_key(tensor)) not in self._held:
                _, first, last = self._spans.get(key, (tensor, place, place))
                self._spans[key] = tensor, min(first, place), max(last, place)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if self._open:
            self._span(args)
            self._span(outputs)
        if self._open and not self._paused and not func.is_view and packet not in _FREE_OPS:
            call = self._calls[self._open[-1]]
            call.launches += 1
            self._scores.see(packet, args, outputs)
            scores = isinstance(outputs, Tensor) and self._scores.follows(outputs)
            self._division.see(func, args, outputs, call.share, scores=scores)
            count = flop_registry.get(packet)
            if count is None:
                moved = count_elements(outputs) + count_elements(outputs if packet in _GATHER_OPS else args)
                call.traffic += moved
                if isinstance(outputs, Tensor):
                    call.share.traffic.append((moved, self._division.of(outputs)))
            else:
                call.matmuls += 1
                call.flops += count(*args, **(kwargs or {}), out_val=outputs)
        return outputs


def _apply_division(call: ModuleCalls, divided: _LayerTags, table: int) -> None:
    """Set what tensor parallelism divides of a call, given the linear layers that can be divided."""
    share = call.share
    if share.table and share.table == table and divided:
        call.splits, call.reductions = True, 1  # each rank looks up its part, the sum is whole
        return
    call.split_traffic = min(sum(size for size, tags in share.traffic if _all_divided(tags, divided)), call.traffic)
    call.splits = bool(share.products or call.split_traffic) and all(
        tags is not None and _all_divided(tags, divided) for tags in share.products
    )
    call.reductions = len(share.reductions) if call.splits else 0


def _all_divided(tags: _LayerTags, divided: _LayerTags) -> bool:
    return bool(tags) and tags <= divided


class _FusedKernels(TorchFunctionMode):
    """Traces attention and dropout as one kernel each: scores are never written, and of dropout a mask is kept."""

    def __init__(self, tracer: _OpTracer) -> None:
        super().__init__()
        self._tracer = tracer
        self._multi_head = multi_head_attention(scaled_dot_product_attention=self._attention, dropout=_dropout)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        if func is nn.functional.dropout:
            return _dropout(*args, **(kwargs or {}))
        if func is nn.functional.multi_head_attention_forward:
            return self._multi_head(*args, **(kwargs or {}))  # whose own calls do not come here
        return func(*args, **(kwargs or {}))

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
        with self._tracer.paused():
            with torch.no_grad():  # the real one, for what it refuses
                shape = nn.functional.scaled_dot_product_attention(query, key, value, *rest, **options).shape
            mask = rest[0] if rest else options.get("attn_mask")
            output: Tensor = _FusedAttention.apply(query, key, value, mask, shape)  # type: ignore[no-untyped-call]
        self._tracer.attended(query, key, value, output)
        return output


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Replace `torch.nn.functional.dropout`."""
    if not training or not 0 < p < 1:
        return nn.functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


class _FusedAttention(torch.autograd.Function):
    """Saves what a fused kernel saves: inputs, output, and the log-sum of each query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, shape: torch.Size) -> Tensor:
        output = query.new_empty((*shape[:-3], shape[-2], shape[-3], shape[-1])).transpose(-2, -3)
        given = (query, key, value) if mask is None else (query, key, value, mask)
        ctx.save_for_backward(*given, output, query.new_empty(shape[:-1]))
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (*(torch.empty_like(each) for each in ctx.saved_tensors[:3]), None, None)


def count_elements(outputs: Any) -> int:
    """Return the number of elements of nested tensors."""
    if isinstance(outputs, Tensor):
        return outputs.numel()
    if isinstance(outputs, Mapping):
        return sum(count_elements(value) for value in outputs.values())
    if isinstance(outputs, tuple | list):
        return sum(count_elements(value) for value in outputs)
    return 0


def _size(tensor: Tensor) -> float:
    """Return the elements of a tensor's memory, of which it may be a part; those of a mask count half."""
    size = tensor.untyped_storage().nbytes() / tensor.element_size()
    return size / 2 if tensor.dtype == torch.bool else size


# --- Attention scores -------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class _ScoreChain:
    """A batched product and what is computed of it elementwise."""

    normalised: bool = False  # by a softmax over its last dimension
    used: bool = False  # thereafter as a factor of another batch of products: these are scores


class _AttentionScores:
    """Finds attention scores: follows batched products through operations that keep their size.

    What a softmax has made into weights and another product has used is attention's: a classifier's or a router's
    probabilities come from a product with a parameter, which is none of a batch.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        # By storage; kept alive, so that no other takes its place.
        self._chains: dict[int, tuple[Tensor, _ScoreChain]] = {}
        self.heads = 0
        self.tokens = 1

    def attended(self, query: Tensor, key: Tensor) -> None:
        """Note attention by (..., heads, tokens, width); grouped queries of one key must stay together."""
        if query.ndim >= 3:
            self._note(math.gcd(query.shape[-3], key.shape[-3]), query.shape[-2])

    def see(self, packet: Any, args: Any, outputs: Any) -> None:
        """Record an operation that is not a view."""
        if packet in _BATCHED_PRODUCTS:
            first = _BATCHED_PRODUCTS[packet]
            self._multiplied(args[first], args[first + 1], outputs)
            return
        made = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
        if not isinstance(made, Tensor):
            return
        given = [each for each in args if isinstance(each, Tensor) and each.numel() == made.numel()]
        chain = next(filter(None, map(self._chain, given)), None)
        if chain is None:
            return
        if packet in _SOFTMAX and args[1] % made.ndim == made.ndim - 1:
            chain.normalised = True
        for each in outputs if isinstance(outputs, tuple | list) else (made,):
            if isinstance(each, Tensor) and each.numel() == made.numel():
                self._chains[storage_key(each)] = each, chain

    def follows(self, tensor: Tensor) -> bool:
        """Return whether a tensor comes from a batched product elementwise."""
        return self._chain(tensor) is not None

    def among(self, tensor: Tensor) -> bool:
        """Return whether a tensor shares its memory with scores."""
        chain = self._chain(tensor)
        return chain is not None and chain.used

    def _multiplied(self, one: Tensor, other: Tensor, made: Tensor) -> None:
        weights = [chain for chain in map(self._chain, (one, other)) if chain is not None and chain.normalised]
        for chain in weights:
            if not chain.used:
                chain.used = True
                self._note(made.shape[0] // self._rows, one.shape[-2] if self._chain(one) else other.shape[-1])
        if not weights:
            self._chains[storage_key(made)] = made, _ScoreChain()

    def _chain(self, tensor: Tensor) -> _ScoreChain | None:
        found = self._chains.get(storage_key(tensor))
        return found[1] if found else None

    def _note(self, heads: int, tokens: int) -> None:
        self.heads = math.gcd(self.heads, heads)
        self.tokens = max(self.tokens, tokens)


# --- Runs of a model on the meta device -------------------------------------------------------------------------------


def trace_model(
    model: nn.Module, tensors: Mapping[str, Tensor], call: ModelCall, whole: frozenset[int] = frozenset()
) -> ForwardTrace:
    """Trace one forward of a model on the meta device. Raises whatever the forward raises.

    Args:
        whole: storages of the parameters that tensor parallelism does not divide, whatever is found.
    """
    on = {name: value.to("meta") for name, value in tensors.items()}
    rows = max((len(value) for value in tensors.values()), default=1)
    held = {storage_key(tensor) for tensor in (*model.parameters(), *model.buffers(), *on.values())}
    parameters = {storage_key(each) for each in model.parameters()}
    values = MetaValueMode((on[name], value) for name, value in tensors.items())
    tracer = _OpTracer(held, parameters, rows, whole)
    with values, tracer.watching(model):
        call(model, on)
    return replace(tracer.found(), asks=values.asked)


def model_call(inputs: Sequence[str], keywords: Sequence[str], step: ModelCall | None) -> ModelCall:
    """Return the call of a model with its input columns, by keywords if there are any; without inputs, a job's step."""
    if step is not None and not inputs:
        return step
    if keywords:
        return lambda model, on: model(**dict(zip(keywords, [on[name] for name in inputs], strict=True)))
    return lambda model, on: model(*[on[name] for name in inputs])


def meta_runner(columns: Mapping[str, Tensor], call: ModelCall, least: int) -> Callable[..., Any]:
    """Return a function that calls a model on the meta device with `rows` rows, by default as few as it takes.

    What it asks of values that follow from the inputs is answered by the columns'.
    """

    def run(meta_model: nn.Module, rows: int = least) -> Any:
        real = {name: value[torch.arange(rows) % len(value)].cpu() for name, value in columns.items()}
        given = {name: value.to("meta") for name, value in real.items()}
        with MetaValueMode((given[name], value) for name, value in real.items()), torch.device("meta"):
            return call(meta_model, given)

    return run
