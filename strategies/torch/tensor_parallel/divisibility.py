"""Which of a model's products tensor parallelism can divide, found by following what its linear layers make.

A linear layer on whole numbers may be divided by its outputs, if what it makes goes number by number, or head by head,
to another one, which is then divided by its inputs and ends with an all-reduce (Shoeybi et al., 2019). What makes use
of all numbers of a token at once in between, such as a norm or a residual sum, forbids it. The last layer's outputs may
stay divided, as a vocabulary's do, and so may the largest table of what is looked up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainwright.strategies.torch.torch_compat import tree_leaves

_aten = torch.ops.aten
_LINEAR = (_aten.mm, _aten.addmm)
_BATCHES = {_aten.bmm: 0, _aten.baddbmm: 1}  # with the place of their first factor
_JOINS = (_aten.cat, _aten.stack)
_KEEPS = (_aten.native_dropout, _aten.clone, _aten._to_copy, _aten._unsafe_view, _aten.copy_, _aten.masked_fill)
_SOFTMAX = (_aten._softmax, _aten._safe_softmax)
_OVER_LAST = (
    _aten.mean,
    _aten.sum,
    _aten.native_layer_norm,
    _aten._fused_rms_norm,
    _aten.amax,
    _aten.linalg_vector_norm,
)
Tags = frozenset[int]
_NONE: Tags = frozenset()


@dataclass(kw_only=True)
class Share:
    """What of one call tensor parallelism would divide: each with the linear layers that must be divided for it.

    Attributes:
        products: of each; None where nothing can divide it.
        traffic: numbers read and written.
        reductions: of each linear layer that is divided by its inputs.
        table: elements of a table that it looks numbers up in.
    """

    products: list[Tags | None] = field(default_factory=list)
    traffic: list[tuple[float, Tags]] = field(default_factory=list)
    reductions: list[Tags] = field(default_factory=list)
    table: int = 0


class Division:
    """Follows what linear layers make, by storage.

    Args:
        parameters: storages of the model's.
        whole: storages of the weights that are not divided, whatever is found.
    """

    def __init__(self, parameters: set[int], whole: frozenset[int] = frozenset()) -> None:
        self._parameters, self._kept = parameters, whole
        self._tags: dict[int, tuple[Tensor, Tags]] = {}  # kept alive, so that no other takes a storage's place
        self._widths: list[int] = []  # outputs of each linear layer that may be divided by them
        self._columns: list[int] = []  # storage of its weight
        self._rows: list[Tags] = []
        self._inputs: list[int] = []  # storage of the weight that is divided by its inputs for these
        self._tables: dict[int, int] = {}  # elements of each table, by storage
        self._joint: list[Tags] = []
        self._failed: set[int] = set()
        self._last = _NONE

    def of(self, tensor: Tensor) -> Tags:
        """The linear layers that must be divided for this tensor to be."""
        found = self._tags.get(tensor.untyped_storage()._cdata)
        return found[1] if found else _NONE

    def see(self, func: Any, args: Any, outputs: Any, share: Share, *, scores: bool) -> None:
        """One operation that is no view; `scores` says whether it normalises attention's."""
        packet = func._overloadpacket
        given = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
        tags = _NONE.union(*map(self.of, given))
        if packet in _LINEAR and self._held(args[-1]):
            self._linear(args[-2], made[0], args[-1].untyped_storage()._cdata, share)
        elif packet in _BATCHES:
            first = _BATCHES[packet]
            self.attended((args[first], args[first + 1]), made[0], share)
        elif packet is _aten.embedding and self._held(args[0]):
            table = args[0].untyped_storage()._cdata
            if table not in self._kept:
                share.table = max(share.table, args[0].numel())
                self._tables[table] = args[0].numel()
        elif tags and self._keeps(func, given, made, scores):
            self._mark(made, tags)
        else:
            self._failed |= tags

    def attended(self, factors: tuple[Tensor, ...], made: Tensor, share: Share) -> None:
        """Products of what linear layers made, head by head."""
        tags = [self.of(each) for each in factors]
        whole = _NONE.union(*tags)
        if all(tags):
            self._mark([made], whole)
            self._joint.append(whole)
        else:
            self._failed |= whole
        share.products.append(whole if all(tags) else None)

    def ends(self, outputs: Any) -> None:
        """What the model returns."""
        tensors = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
        self._last = _NONE.union(*map(self.of, tensors))

    def settled(self, heads: int) -> Tags:
        """The linear layers that can be divided by their outputs, by any divisor of the heads."""
        inner = {one for one in _NONE.union(*self._rows) if not self._widths[one] % max(heads, 1)}
        good = (inner | self._last) - self._failed  # a vocabulary is padded
        groups = [*self._rows, *self._joint]
        while bad := [group for group in groups if group & good and not group <= good]:
            good -= _NONE.union(*bad)
        return frozenset(good) if heads else _NONE

    def blocks(self, heads: int) -> list[tuple[frozenset[int], frozenset[int]]]:
        """What has to be divided together: storages of the weights divided by outputs, and of those by inputs."""
        good = self.settled(heads)
        blocks: list[tuple[Tags, frozenset[int]]] = []
        rows = [(tags, frozenset([weight])) for tags, weight in zip(self._rows, self._inputs, strict=True)]
        for tags, inputs in (row for row in rows if row[0] <= good):
            for other in [each for each in blocks if each[0] & tags]:
                blocks.remove(other)
                tags, inputs = tags | other[0], inputs | other[1]
            blocks.append((tags, inputs))
        return [(frozenset(self._columns[one] for one in tags), inputs) for tags, inputs in blocks]

    def weights(self, heads: int) -> frozenset[int]:
        """Storages of all weights that count as divided."""
        good = self.settled(heads)
        inputs = {weight for tags, weight in zip(self._rows, self._inputs, strict=True) if tags <= good}
        return frozenset({*inputs, *(self._columns[one] for one in good)}) | self.ends_of_model()[1]

    def ends_of_model(self) -> tuple[frozenset[int], frozenset[int]]:
        """Storages of the weights whose outputs are the model's, and of its largest table."""
        last = frozenset(self._columns[one] for one in self._last - _NONE.union(*self._rows))
        largest = max(self._tables, key=self._tables.__getitem__, default=None)
        return last, frozenset() if largest is None else frozenset([largest])

    def _linear(self, given: Tensor, made: Tensor, weight: int, share: Share) -> None:
        tags = self.of(given)
        if tags:
            self._rows.append(tags)
            self._inputs.append(weight)
            self._failed |= tags if weight in self._kept else _NONE
            share.reductions.append(tags)
        else:
            tags = frozenset([len(self._widths)])
            self._failed |= tags if weight in self._kept else _NONE
            self._widths.append(made.shape[-1])
            self._columns.append(weight)
            self._mark([made], tags)
        share.products.append(tags)

    def _keeps(self, func: Any, given: list[Tensor], made: list[Tensor], scores: bool) -> bool:
        """Whether an operation does nothing that a rank cannot do with its part of the numbers or heads."""
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

    def _mark(self, made: list[Tensor], tags: Tags) -> None:
        for each in made:
            self._tags[each.untyped_storage()._cdata] = each, tags

    def _held(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._parameters
