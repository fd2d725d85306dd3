"""Tells attention's scores from other tensors, in a model that computes them one operation after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_PRODUCTS = {_aten.bmm: 0, _aten.baddbmm: 1}  # with the place of their first factor
_SOFTMAX = (_aten._softmax, _aten._safe_softmax)


@dataclass(kw_only=True, eq=False)
class _Chain:
    """A batch of products and what is made of it, number by number.

    Attributes:
        normalised: by a softmax over its last dimension.
        used: thereafter as a factor of another batch of products: these are scores.
    """

    normalised: bool = False
    used: bool = False


class Scores:
    """Follows batches of products through operations that keep their size.

    What a softmax has made into weights and another product has used is attention's: a classifier's or a router's
    probabilities come from a product with a parameter, which is none of a batch.

    Args:
        rows: samples of the batch.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._chains: dict[int, tuple[Tensor, _Chain]] = {}  # by storage; kept alive, so that no other takes its place
        self.heads = 0
        self.tokens = 1

    def attended(self, query: Tensor, key: Tensor) -> None:
        """Attention by (..., heads, tokens, width); of grouped queries, those of a key must stay together."""
        if query.ndim >= 3:
            self._note(math.gcd(query.shape[-3], key.shape[-3]), query.shape[-2])

    def see(self, packet: Any, args: Any, outputs: Any) -> None:
        """One operation that is no view."""
        if packet in _PRODUCTS:
            first = _PRODUCTS[packet]
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
                self._chains[_key(each)] = each, chain

    def follows(self, tensor: Tensor) -> bool:
        """Whether it comes from a batch of products, number by number."""
        return self._chain(tensor) is not None

    def among(self, tensor: Tensor) -> bool:
        """Whether a tensor shares its memory with scores."""
        chain = self._chain(tensor)
        return chain is not None and chain.used

    def _multiplied(self, one: Tensor, other: Tensor, made: Tensor) -> None:
        weights = [chain for chain in map(self._chain, (one, other)) if chain is not None and chain.normalised]
        for chain in weights:
            if not chain.used:
                chain.used = True
                self._note(made.shape[0] // self._rows, one.shape[-2] if self._chain(one) else other.shape[-1])
        if not weights:
            self._chains[_key(made)] = made, _Chain()

    def _chain(self, tensor: Tensor) -> _Chain | None:
        found = self._chains.get(_key(tensor))
        return found[1] if found else None

    def _note(self, heads: int, tokens: int) -> None:
        self.heads = math.gcd(self.heads, heads)
        self.tokens = max(self.tokens, tokens)


def _key(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    key: int = tensor.untyped_storage()._cdata
    return key
