"""What one forward pass of a module does: its operations, what they read and write, and what backward keeps of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from trainwright.strategies.torch.profiling.attention_detection import Scores
from trainwright.strategies.torch.profiling.meta_values import Values
from trainwright.strategies.torch.tensor_parallel.divisibility import Division, Share, Tags
from trainwright.strategies.torch.torch_compat import TorchDispatchMode, tree_leaves

_aten = torch.ops.aten
_FREE = (_aten._unsafe_view, _aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.detach)
_GATHERS = (_aten.embedding, _aten.index_select, _aten.gather, _aten.index)  # read as much as they write
FUSED = 1.5  # times the operations of two products: it computes scores twice and is slower (core.profile says the same)


@dataclass(kw_only=True)
class Call:
    """What the calls of one module came to, those of the modules it calls left out.

    Attributes:
        place: among all calls, in the order in which they began.
        cut: numbers that calls up to this one and calls after it pass to each other.
        splits: whether tensor parallelism divides its products.
        split_kept, split_traffic: what of `kept` and `traffic` it divides.
        reductions: all-reduces of its output if it does.
        share: what that follows from.
    """

    flops: float = 0.0
    matmuls: int = 0
    launches: int = 0
    traffic: float = 0.0
    kept: float = 0.0
    scores: float = 0.0
    output: int = 0
    place: int = 0
    cut: float = 0.0
    splits: bool = False
    split_kept: float = 0.0
    split_traffic: float = 0.0
    reductions: int = 0
    share: Share = field(default_factory=Share)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One forward pass.

    Attributes:
        calls: by module, in the order in which they first ran.
        heads: of attention that can be computed apart; 0 where there is none.
        tokens: of the longest sequence that attends; 1 where there is none.
        division: what became of the outputs of linear layers.
        asks: the flow asked for values of tensors, which followed from the inputs or from constants.
    """

    calls: Mapping[nn.Module, Call]
    heads: int
    tokens: int
    division: Division
    asks: bool = False


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up each module's own operations, and what autograd saves for backward.

    Args:
        held: storages that are there anyway, such as parameters'.
        parameters: storages of these.
        values: of the inputs.
        rows: samples of the batch.
        whole: storages of the parameters that tensor parallelism does not divide, whatever is found.
    """

    def __init__(
        self, held: set[int], parameters: set[int], values: Values, rows: int, whole: frozenset[int] = frozenset()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: dict[nn.Module, Call] = {}
        self._open: list[nn.Module] = []
        self._saved: dict[int, tuple[Tensor, Call]] = {}  # by storage; kept alive, so that no other takes its place
        self._held = held
        self._spans: dict[int, tuple[Tensor, int, int]] = {}  # first and last place of all that make or read each
        self._values = values
        self._scores = Scores(rows)
        self._division = Division(parameters, whole)
        self._paused = False

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Counts what happens in the module, and nothing once this ends."""
        with ExitStack() as stack:
            for module in model.modules():
                stack.callback(module.register_forward_pre_hook(self._enter).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved))
            stack.enter_context(self)
            stack.enter_context(_Fused(self))
            yield

    def found(self) -> Trace:
        """What was counted."""
        divided = self._division.settled(self._scores.heads)
        for tensor, call in self._saved.values():
            size = _size(tensor)
            if self._scores.among(tensor):
                call.scores += size
                call.traffic -= min(size, call.traffic)
                continue
            call.kept += size
            if _all_of(self._division.of(tensor), divided):
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
            _settle(call, divided, table)
        self._saved.clear()
        found = self._scores
        return Trace(
            calls=self._calls, heads=found.heads, tokens=found.tokens, division=self._division, asks=self._values.asked
        )

    def attended(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """A fused kernel: two products, and scores that are never written."""
        self._scores.attended(query, key)
        if self._open:
            self._division.attended((query, key, value), output, self._calls[self._open[-1]].share)
            call = self._calls[self._open[-1]]
            call.launches += 1
            call.matmuls += 2
            call.flops += FUSED * 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Counts no operation."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        self._calls.setdefault(module, Call(place=len(self._calls)))
        self._open.append(module)

    def _leave(self, module: nn.Module, _inputs: Any, outputs: Any) -> None:
        self._open.pop()
        self._calls[module].output = numbers(outputs)
        if not self._open:
            self._division.ends(outputs)

    def _save(self, tensor: Tensor) -> Tensor:
        """Called by autograd for what it saves; each storage counts once, where it was saved first."""
        key = storage(tensor)
        if self._open and key not in self._held and key not in self._saved:
            self._saved[key] = tensor, self._calls[self._open[-1]]
        return tensor

    def _span(self, tensors: Any) -> None:
        """Notes that a call makes or reads these."""
        place = self._calls[self._open[-1]].place
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and (key := storage(tensor)) not in self._held:
                _, first, last = self._spans.get(key, (tensor, place, place))
                self._spans[key] = tensor, min(first, place), max(last, place)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = self._values.run(func, args, kwargs or {})
        packet = func._overloadpacket
        if self._open:
            self._span(args)
            self._span(outputs)
        if self._open and not self._paused and not func.is_view and packet not in _FREE:
            call = self._calls[self._open[-1]]
            call.launches += 1
            self._scores.see(packet, args, outputs)
            scores = isinstance(outputs, Tensor) and self._scores.follows(outputs)
            self._division.see(func, args, outputs, call.share, scores=scores)
            count = flop_registry.get(packet)
            if count is None:
                moved = numbers(outputs) + numbers(outputs if packet in _GATHERS else args)
                call.traffic += moved
                if isinstance(outputs, Tensor):
                    call.share.traffic.append((moved, self._division.of(outputs)))
            else:
                call.matmuls += 1
                call.flops += count(*args, **(kwargs or {}), out_val=outputs)
        return outputs


def _settle(call: Call, divided: Tags, table: int) -> None:
    """What tensor parallelism does to a call, given the linear layers that it can divide."""
    share = call.share
    if share.table and share.table == table and divided:
        call.splits, call.reductions = True, 1  # each rank looks up its part, the sum is whole
        return
    call.split_traffic = min(sum(size for size, tags in share.traffic if _all_of(tags, divided)), call.traffic)
    call.splits = bool(share.products or call.split_traffic) and all(
        tags is not None and _all_of(tags, divided) for tags in share.products
    )
    call.reductions = len(share.reductions) if call.splits else 0


def _all_of(tags: Tags, divided: Tags) -> bool:
    return bool(tags) and tags <= divided


class _Fused(TorchFunctionMode):
    """Attention and dropout as accelerators compute them: in one kernel, where the meta device takes several.

    So attention's scores are never written, and of dropout a mask is kept.
    """

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer
        whole = nn.functional.multi_head_attention_forward
        seen = {**vars(nn.functional), "scaled_dot_product_attention": self._attention, "dropout": _dropout}
        self._multi_head = FunctionType(whole.__code__, seen, whole.__name__, whole.__defaults__)

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
            output: Tensor = _Attention.apply(query, key, value, mask, shape)  # type: ignore[no-untyped-call]
        self._tracer.attended(query, key, value, output)
        return output


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As `torch.nn.functional.dropout`."""
    if not training or not 0 < p < 1:
        return nn.functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


class _Attention(torch.autograd.Function):
    """Keeps what a fused kernel keeps: its inputs, its output, and for each query the logarithm of its sum."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, shape: torch.Size) -> Tensor:
        output = query.new_empty((*shape[:-3], shape[-2], shape[-3], shape[-1])).transpose(-2, -3)
        given = (query, key, value) if mask is None else (query, key, value, mask)
        ctx.save_for_backward(*given, output, query.new_empty(shape[:-1]))
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (*(torch.empty_like(each) for each in ctx.saved_tensors[:3]), None, None)


def storage(tensor: Tensor) -> int:
    """What tensors that share memory have in common, on the meta device too."""
    key: int = tensor.untyped_storage()._cdata
    return key


def numbers(outputs: Any) -> int:
    """Elements of tensors, however they are nested."""
    if isinstance(outputs, Tensor):
        return outputs.numel()
    if isinstance(outputs, Mapping):
        return sum(numbers(value) for value in outputs.values())
    if isinstance(outputs, tuple | list):
        return sum(numbers(value) for value in outputs)
    return 0


def _size(tensor: Tensor) -> float:
    """Elements of the memory that a tensor keeps, of which it may be a part; a mask's are half a number."""
    size = tensor.untyped_storage().nbytes() / tensor.element_size()
    return size / 2 if tensor.dtype == torch.bool else size
