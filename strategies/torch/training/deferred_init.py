"""Deferred initialization: builds a model of which this process keeps a part, without all of it in memory at once.

`model()` runs as ever, on the CPU, and each of its operations is carried out, so that every random number is drawn in
its turn. But the memory of large tensors is released soon after they were written, and it is noted how their values
came about: the operations, and the state of the generator before each draw. Whatever reads such a tensor later gets its
values again, by the same operations from the same states, and thus the same bits. So a rank computes the tensors again
that it keeps a part of, one after the other, cuts them, and never has the values of the others twice.

torchdistx's `deferred_init` records too, but without carrying out; then the numbers of one device come out only where
the whole model is replayed in order, and code that reads a value, or seeds a generator between two layers, fails.
Tensors whose values cannot be computed again stay in memory: those from files, NumPy, or operations that are not noted.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.core.data import fold_seed
from trainwright.core.frameworks import return_freed_memory
from trainwright.strategies.torch.checkpoint.tensor_digests import digests, text_hash
from trainwright.strategies.torch.torch_compat import (
    DisableTorchFunctionSubclass,
    TorchDispatchMode,
    tensor_leaves,
    tree_leaves,
    tree_map_only,
)

_log = logging.getLogger(__name__)
_SMALLEST = 1 << 16  # bytes of a tensor whose memory is released
_LONGEST = 256  # operations that one tensor is computed again by; its values stay where it takes more
_SCRATCH = 4  # while model() runs: times the tensor at hand, since one is initialized by way of others
_HELD_BYTES = 1 << 26  # of released tensors that may be in memory at a time

_aten = torch.ops.aten
# Only the form of what they are given matters, and what they return has no values yet.
_EMPTY = frozenset(
    (_aten.empty, _aten.empty_strided, _aten.empty_permuted, _aten.empty_like, _aten.new_empty,
     _aten.new_empty_strided)
)  # fmt: skip
# The same, of the first argument.
_BY_FORM = _EMPTY | {
    _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like, _aten.randint_like,
    _aten.new_zeros, _aten.new_ones, _aten.new_full,
}  # fmt: skip
# They write all of their first argument, and do not read it.
_OVERWRITING = frozenset(
    (_aten.uniform_, _aten.normal_, _aten.random_, _aten.exponential_, _aten.log_normal_, _aten.cauchy_,
     _aten.geometric_, _aten.bernoulli_, _aten.zero_, _aten.fill_, _aten.copy_)
)  # fmt: skip
# What gives the same bits again, besides draws and elementwise operations.
_REPEATABLE = _BY_FORM | _OVERWRITING | {
    _aten.zeros, _aten.ones, _aten.full, _aten.arange, _aten.linspace, _aten.eye, _aten.scalar_tensor, _aten._to_copy,
    _aten.tril, _aten.triu, _aten.tril_, _aten.triu_, _aten.cat, _aten.stack, _aten.repeat, _aten.masked_fill,
    _aten.masked_fill_, _aten.index_fill_, _aten.constant_pad_nd,
}  # fmt: skip
# They reach a tensor's memory by another way than torch's operations.
_RAW_ACCESS = frozenset(
    (Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.__array__,
     Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.__dlpack__, Tensor.share_memory_)
)  # fmt: skip


@dataclass(eq=False)
class _Values:
    """The values of a memory: how they are computed again, and whether they are there."""

    storage: weakref.ref[torch.UntypedStorage]
    size_bytes: int
    last: _Operation | None = None  # the newest that wrote to it; None where nothing did
    present: bool = True

    def memory(self) -> torch.UntypedStorage:
        """Return the memory, which a tensor in use has."""
        storage = self.storage()
        assert storage is not None, "a tensor in use has memory"
        return storage


@dataclass(frozen=True, kw_only=True, eq=False)
class _Operand:
    """A tensor as an operation was given it."""

    values: _Values | None  # None for a small one, which is kept in `small`
    small: Tensor | None
    dtype: torch.dtype
    form: tuple[tuple[int, ...], tuple[int, ...], int]  # size, strides and offset

    @classmethod
    def of(cls, tensor: Tensor, values: _Values | None) -> _Operand:
        small = tensor.detach().clone() if values is None else None
        form = tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset())
        return cls(values=values, small=small, dtype=tensor.dtype, form=form)

    def over(self, memory: Mapping[_Values, torch.UntypedStorage]) -> Tensor:
        """Return the tensor over other memory."""
        if self.values is None:
            assert self.small is not None, "it is one or the other"
            return self.small
        size, strides, offset = self.form
        return torch.empty(0, dtype=self.dtype).set_(memory[self.values], offset, size, strides)

    def text(self, names: dict[_Values, int]) -> str:
        """Return a text that names what it is."""
        what = digests([self.small]) if self.small is not None else names.setdefault(self.values, len(names))  # type: ignore[arg-type]
        return f"{self.dtype} {self.form} {what}"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Operation:
    """An operation that wrote to a memory, with what is needed to repeat it."""

    number: int  # in the order in which they ran
    func: Any
    args: Any  # with operands in place of tensors
    kwargs: Any
    sources: tuple[_Operation, ...]  # that wrote what it reads
    generator: torch.Generator | None  # that it drew from
    state: Tensor | None  # of the generator, before
    result: _Operand | None = None  # what it made; None where it wrote in place
    place: int = 0  # of that among its outputs
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)  # that new tensors had

    @property
    def touched(self) -> set[_Values]:
        """The memory that it reads and writes."""
        operands = [each for each in tree_leaves((self.args, self.kwargs, self.result)) if isinstance(each, _Operand)]
        return {each.values for each in operands if each.values is not None}

    def repeat(self, memory: Mapping[_Values, torch.UntypedStorage]) -> None:
        """Write the same values to other memory."""
        args, kwargs = tree_map_only(_Operand, lambda one: one.over(memory), (self.args, self.kwargs))
        usual, before = torch.get_default_dtype(), None
        torch.set_default_dtype(self.dtype)
        try:
            if self.generator is not None and self.state is not None:
                before = self.generator.get_state()
                self.generator.set_state(self.state)
            made = self.func(*args, **kwargs)
        finally:
            torch.set_default_dtype(usual)
            if before is not None and self.generator is not None:
                self.generator.set_state(before)
        if self.result is not None:
            self.result.over(memory).copy_(tree_leaves(made)[self.place])

    def text(self, names: dict[_Values, int]) -> str:
        """Return a text that differs wherever what it writes does, as long as its sources are equal."""
        told = tree_map_only(_Operand, lambda one: one.text(names), (self.args, self.kwargs, self.result))
        drawn = digests([self.state]) if self.state is not None else None
        return f"{self.func} {tree_map_only(torch.Generator, lambda _: None, told)} {self.place} {drawn} {self.dtype}"


class _LargeTensors:
    """Large tensors whose values can be computed again: which of them are in memory, and how the others are computed.

    Attributes:
        whole: memory of those that stay in memory, its bytes, and why.
    """

    def __init__(self) -> None:
        self.whole: list[tuple[weakref.ref[torch.UntypedStorage], int, str]] = []
        self._values: weakref.WeakKeyDictionary[torch.UntypedStorage, _Values] = weakref.WeakKeyDictionary()
        self._present: dict[_Values, None] = {}  # the one that was used last is the last
        self._present_bytes = 0

    def find(self, tensor: Tensor) -> _Values | None:
        """Return the values of a tensor; None where it is none of these."""
        return self._values.get(tensor.untyped_storage()) if _is_plain(tensor) else None

    def add(self, tensor: Tensor) -> _Values:
        """Note a tensor that was just made."""
        storage = tensor.untyped_storage()
        values = self._values[storage] = _Values(weakref.ref(storage), storage.nbytes())
        self._touch(values)
        return values

    def provide(self, values: _Values, *, computed: bool = True) -> None:
        """Let values have memory, and be in it."""
        if not values.present:
            storage = values.memory()
            storage.resize_(values.size_bytes)
            if computed:
                _compute(values, storage)
        self._touch(values)

    def keep(self, values: _Values, reason: str) -> None:
        """Let values stay in memory: it is not known how to compute them again, or when they are read."""
        self.provide(values)
        self._forget(values)
        del self._values[values.memory()]
        self.whole.append((values.storage, values.size_bytes, reason))

    def release(self, room_bytes: int) -> None:
        """Release the memory of those that were used longest ago, where there is more than that."""
        for values in [*self._present] if self._present_bytes > room_bytes else ():
            if self._present_bytes <= room_bytes:
                return
            storage = values.storage()
            if storage is not None and len(_needed(values)) > _LONGEST:
                self.keep(values, f"more than {_LONGEST} operations on a tensor")
                continue
            self._forget(values)
            if storage is not None:
                storage.resize_(0)
                values.present = False

    def provide_all(self) -> None:
        """Give all tensors that are left their values, and note nothing about them any longer."""
        if not all(values.present for values in self._values.values()):
            gc.collect()  # those that this rank does not keep may be in a cycle
        for values in [*self._values.values()]:
            if values.storage() is not None:
                self.provide(values)
        self._values.clear()
        self._present.clear()

    def _touch(self, values: _Values) -> None:
        """Note that values are in memory, and used now."""
        if values in self._present:
            del self._present[values]
        else:
            self._present_bytes += values.size_bytes
        self._present[values], values.present = None, True

    def _forget(self, values: _Values) -> None:
        """Count values no longer among those that may be released."""
        if values in self._present:
            del self._present[values]
            self._present_bytes -= values.size_bytes


class DeferredInit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Holds the values of few large tensors at a time while a model is built, and computes the others again when read.

    `building` is around the function that builds the model and what divides it; `divide` comes between the two. At the
    end of `building` all tensors that are left have their values.
    """

    def __init__(self, held_bytes: int = _HELD_BYTES) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held_bytes = held_bytes
        self._large = _LargeTensors()
        self._count = 0
        self._noting, self._divided = True, False
        self._inside = False  # of an operation: what it does itself is not noted

    @contextmanager
    def building(self) -> Iterator[None]:
        """Release the memory of large tensors that this thread makes, until the end of the context."""
        with return_freed_memory(), _RawAccess(self), self:
            _BUILDING.append(self)
            try:
                yield
            finally:
                _BUILDING.remove(self)
                with self._own():
                    self._large.provide_all()

    def divide(self, model: nn.Module, loaded: Collection[str] = ()) -> int:
        """Let as little of the model be in memory as there can; what divides it follows.

        Args:
            loaded: names of tensors that get other values later, so that theirs are not needed.

        Returns:
            The digest of the other parameters that are trained. Large ones are not computed for it: it differs where
            they do, and may differ where equal ones came about differently.
        """
        self._divided = True
        with self._own():
            named = [each for name, each in model.named_parameters() if each.requires_grad and name not in loaded]
            found = fold_seed(*map(self._digest, named))
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if name in loaded and (values := self._large.find(tensor)) is not None:
                    values.last = None
        self._warn_of_whole_tensors()
        return found

    def keep_new(self) -> None:
        """Let what is made from here on stay in memory: it is what this rank keeps."""
        self._noting = False

    def keep(self, tensors: Any) -> None:
        """Let tensors have their values in memory from now on."""
        if not self._inside:
            with self._own():
                for values in map(self._large.find, tensor_leaves(tensors)):
                    if values is not None:
                        self._large.keep(values, "access to memory, such as numpy()")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        with self._own(), DisableTorchFunctionSubclass():
            return self._run(func, args, kwargs)

    # --- inside -------------------------------------------------------------------------------------------

    @contextmanager
    def _own(self) -> Iterator[None]:
        """Note nothing of what is done in this context."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def _warn_of_whole_tensors(self) -> None:
        whole = Counter[str]()
        for storage, size_bytes, reason in self._large.whole:
            whole[reason] += size_bytes if storage() is not None else 0
        if whole.total() > self._held_bytes:
            _log.warning(
                "model() makes %.1f GiB of tensors that are all in memory until the model is divided, since their "
                "values cannot be computed again, %.1f GiB by %s first of all: use the functions of torch.nn.init and "
                "elementwise operations, or let initial_weights= name files",
                whole.total() / 2**30,
                whole.most_common(1)[0][1] / 2**30,
                whole.most_common(1)[0][0],
            )

    def _digest(self, tensor: Tensor) -> int:
        values = self._large.find(tensor)
        if values is None:
            return digests([tensor])[0]
        names = {values: 0}
        told = [text_hash(each.text(names)) for each in _needed(values)]
        return fold_seed(text_hash(str((tensor.dtype, tensor.shape))), *told)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        given, large = tensor_leaves((args, kwargs)), self._large
        for inner in (inner for tensor in given for inner in _wrapped(tensor)):  # what is done to it is not seen here
            if (values := large.find(inner)) is not None:
                large.keep(values, "a subclass of torch.Tensor")
        used = dict.fromkeys(values for each in given if (values := large.find(each)) is not None)
        if not used and not self._noting:
            return func(*args, **kwargs)
        if func.is_view:
            return _viewed(func, args, kwargs, used)
        written = _written(func, args, kwargs)
        replaced = self._replaced(func, written, given)
        absent = replaced is not None and not replaced.present
        for values in used if func._overloadpacket not in _BY_FORM else ():
            large.provide(values, computed=values is not replaced)
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        known = drawn or torch.Tag.pointwise in func.tags or func._overloadpacket in _REPEATABLE
        noted = self._noting and len(written) < 2 and known
        generator = (kwargs.get("generator") or torch.default_generator) if noted and drawn else None
        state = None if generator is None else generator.get_state()
        operation = self._operation(func, args, kwargs, generator, state, replaced) if noted and written else None
        try:
            made = func(*args, **kwargs)
        except BaseException:
            for values in used:  # what it wrote until then stays
                if absent and values is replaced:
                    values.present = False
                large.keep(values, f"{func}, which raised")
            raise
        for values in (values for each in written if (values := large.find(each)) is not None):
            if operation is None or values.memory().nbytes() != values.size_bytes:
                large.keep(values, str(func))
            else:
                values.last = operation
        found = _new_large_tensors(made, given) if self._noting and not written else []
        operation = self._operation(func, args, kwargs, generator, state, None) if noted and found else None
        for place, tensor in found:
            self._add(tensor, operation, place, func)
        sizes = [values.size_bytes for values in used] + [each.nbytes for _, each in found]
        large.release(max(self._held_bytes, 0 if self._divided else _SCRATCH * max(sizes, default=0)))
        return made

    def _replaced(self, func: Any, written: Sequence[Tensor], given: Sequence[Tensor]) -> _Values | None:
        """Return the values that an operation replaces, all of them and without reading them."""
        if func._overloadpacket not in _OVERWRITING or len(written) != 1:
            return None
        target, values = written[0], self._large.find(written[0])
        alone = sum(self._large.find(each) is values for each in given) == 1
        whole = values is not None and target.is_contiguous() and target.nbytes == values.size_bytes
        return values if alone and whole else None

    def _operation(
        self, func: Any, args: Any, kwargs: Any, generator: torch.Generator | None, state: Any, replaced: _Values | None
    ) -> _Operation | None:
        """Describe an operation; None where it cannot be repeated by what is known here."""
        given, find = tensor_leaves((args, kwargs)), self._large.find
        if any(each.is_conj() or each.is_neg() for each in given):
            return None
        if not all(each.is_meta or each.nbytes < _SMALLEST or find(each) is not None for each in given):
            return None
        read = {values: None for each in given if (values := find(each)) is not None and values is not replaced}
        args, kwargs = tree_map_only(Tensor, lambda each: _Operand.of(each, find(each)), (args, kwargs))
        self._count += 1
        sources = tuple(values.last for values in read if values.last is not None)
        return _Operation(
            number=self._count, func=func, args=args, kwargs=kwargs, sources=sources, generator=generator, state=state
        )

    def _add(self, tensor: Tensor, operation: _Operation | None, place: int, func: Any) -> None:
        if operation is None:
            storage = tensor.untyped_storage()
            self._large.whole.append((weakref.ref(storage), storage.nbytes(), str(func)))
            return
        values = self._large.add(tensor)
        if func._overloadpacket not in _EMPTY:
            values.last = replace(operation, result=_Operand.of(tensor, values), place=place)


_BUILDING: list[DeferredInit] = []


def keep_new_tensors() -> None:
    """Let what is made from here on stay in memory; does nothing where no model is being built."""
    for init in _BUILDING:
        init.keep_new()


class _RawAccess(TorchFunctionMode):
    """Keeps the tensors whose memory a function reaches by another way than torch's operations."""

    def __init__(self, init: DeferredInit) -> None:
        super().__init__()
        self._init = init

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RAW_ACCESS:
            self._init.keep(args)
        return func(*args, **(kwargs or {}))


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of the host, and not other tensors inside."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and type(tensor).__torch_dispatch__ == Tensor.__torch_dispatch__
    )


def _wrapped(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors inside one of a subclass."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for inner in tensor_leaves([getattr(tensor, name) for name in names]):
            yield inner
            yield from _wrapped(inner)


def _viewed(func: Any, args: Any, kwargs: Any, used: Iterable[_Values]) -> Any:
    """Make a view; torch checks that there is memory behind it."""
    absent = [values for values in used if not values.present]
    for values in absent:
        values.memory().resize_(values.size_bytes)
    made = func(*args, **kwargs)
    for values in absent:
        values.memory().resize_(0)
    return made


def _new_large_tensors(made: Any, given: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Return large new tensors in host memory among the outputs of an operation, with their places there."""
    others = {id(each.untyped_storage()) for each in given if _is_plain(each)}
    return [
        (place, each)
        for place, each in enumerate(tree_leaves(made))
        if isinstance(each, Tensor) and _is_plain(each) and each.untyped_storage().nbytes() >= _SMALLEST
        if each.untyped_storage().resizable() and id(each.untyped_storage()) not in others
    ]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    formal = func._schema.arguments
    named = [*zip(formal, args, strict=False), *((each, kwargs[each.name]) for each in formal if each.name in kwargs)]
    return tensor_leaves([value for each, value in named if each.alias_info is not None and each.alias_info.is_write])


def _needed(values: _Values) -> list[_Operation]:
    """Return the operations that values come from, in their order."""
    found: dict[_Operation, None] = {}
    waiting = [values.last]
    while waiting:
        each = waiting.pop()
        if each is not None and each not in found:
            found[each] = None
            waiting += each.sources
    return sorted(found, key=lambda each: each.number)


def _compute(values: _Values, storage: torch.UntypedStorage) -> None:
    """Compute values again, into a memory; that of others is only lent, until their last use."""
    needed = _needed(values)
    until = {each: number for number, operation in enumerate(needed) for each in operation.touched}
    memory = {values: storage}
    with torch.no_grad():
        for number, operation in enumerate(needed):
            for each in operation.touched - memory.keys():
                memory[each] = torch.UntypedStorage(each.size_bytes)  # type: ignore[no-untyped-call]
            operation.repeat(memory)
            for each in operation.touched - {values}:
                if until[each] == number:
                    del memory[each]
