"""Persistent collections: a changed copy shares with the original what did not change.

A decision is a new state, and most events change one entry of it. If each copied whole collections, the events of n
workers would cost n * n. Entries are therefore kept in chunks: a change copies one chunk and the list of chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any, TypeVar, overload

T = TypeVar("T")
_BITS = 6  # keys of one chunk differ in so many of their last bits
_SIZE = 1 << _BITS
_NONE: frozenset[int] = frozenset()


class PersistentList(Sequence[T]):
    """An immutable sequence."""

    __slots__ = ("_chunks", "_length")

    def __init__(self, items: Iterable[T] = ()) -> None:
        whole = tuple(items)
        self._chunks = tuple(whole[start : start + _SIZE] for start in range(0, len(whole), _SIZE))
        self._length = len(whole)

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[T, ...]: ...
    def __getitem__(self, place: int | slice) -> T | tuple[T, ...]:
        if isinstance(place, slice):
            return tuple(self)[place]
        if place < 0:
            place += self._length
        if place < 0:
            raise IndexError(place)
        return self._chunks[place >> _BITS][place % _SIZE]

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._chunks)

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PersistentList) and self._chunks == other._chunks

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PersistentList({list(self)})"

    def put(self, place: int, item: T) -> PersistentList[T]:
        """Return a copy with another item at a place, which must be one of the list's."""
        number, rest = place >> _BITS, place % _SIZE
        chunk = self._chunks[number]
        made: PersistentList[T] = PersistentList.__new__(PersistentList)
        made._chunks = (*self._chunks[:number], (*chunk[:rest], item, *chunk[rest + 1 :]), *self._chunks[number + 1 :])
        made._length = self._length
        return made


class PersistentMap(Mapping[int, T]):
    """An immutable mapping of integers. It iterates chunk by chunk, in each in the order in which keys were added."""

    __slots__ = ("_chunks",)

    def __init__(self, items: Mapping[int, T] | Iterable[tuple[int, T]] = ()) -> None:
        self._chunks: dict[int, dict[int, T]] = {}
        for key, value in items.items() if isinstance(items, Mapping) else items:
            self._chunks.setdefault(key >> _BITS, {})[key] = value

    def __getitem__(self, key: int) -> T:
        return self._chunks[key >> _BITS][key]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, int) and key in self._chunks.get(key >> _BITS, ())

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._chunks.values())

    def __len__(self) -> int:
        return sum(map(len, self._chunks.values()))

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __repr__(self) -> str:
        return f"PersistentMap({dict(self)})"

    def put(self, key: int, value: T) -> PersistentMap[T]:
        """Return a copy in which a key has this value."""
        number = key >> _BITS
        return self._changed({**self._chunks, number: {**self._chunks.get(number, {}), key: value}})

    def without(self, keys: Iterable[int]) -> PersistentMap[T]:
        """Return a copy without these keys, of which it need not have any."""
        chunks = self._chunks.copy()
        for number, gone in _in_chunks(keys).items():
            left = {key: value for key, value in chunks.get(number, {}).items() if key not in gone}
            if left:
                chunks[number] = left
            else:
                chunks.pop(number, None)
        return self._changed(chunks)

    @staticmethod
    def _changed(chunks: dict[int, dict[int, T]]) -> PersistentMap[T]:
        made: PersistentMap[T] = PersistentMap.__new__(PersistentMap)
        made._chunks = chunks
        return made


class PersistentSet(Set[int]):
    """An immutable set of integers. What `-` and `|` return shares chunks with the left operand."""

    __slots__ = ("_chunks",)

    def __init__(self, items: Iterable[int] = ()) -> None:
        self._chunks: dict[int, frozenset[int]] = _in_chunks(items)

    def __contains__(self, item: object) -> bool:
        return isinstance(item, int) and item in self._chunks.get(item >> _BITS, _NONE)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._chunks.values())

    def __len__(self) -> int:
        return sum(map(len, self._chunks.values()))

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __repr__(self) -> str:
        return f"PersistentSet({sorted(self)})"

    def __sub__(self, other: Set[Any]) -> PersistentSet:
        chunks = self._chunks.copy()
        for number, gone in _in_chunks(other).items():
            chunk = chunks.get(number, _NONE)
            left = chunk - gone if chunk is not gone else _NONE  # what is shared need not be looked through
            if left:
                chunks[number] = left
            else:
                chunks.pop(number, None)
        return self._changed(chunks)

    def __or__(self, other: Set[Any]) -> PersistentSet:
        chunks = self._chunks.copy()
        for number, more in _in_chunks(other).items():
            chunks[number] = chunks.get(number, _NONE) | more
        return self._changed(chunks)

    @staticmethod
    def _changed(chunks: dict[int, frozenset[int]]) -> PersistentSet:
        made = PersistentSet.__new__(PersistentSet)
        made._chunks = chunks
        return made


def _in_chunks(items: Iterable[int]) -> dict[int, frozenset[int]]:
    """Items by the number of their chunk."""
    if isinstance(items, PersistentSet):
        return items._chunks
    if isinstance(items, set | frozenset) and len(items) == 1:  # as most events have it
        return {next(iter(items)) >> _BITS: frozenset(items)}
    found: dict[int, list[int]] = {}
    for item in items:
        found.setdefault(item >> _BITS, []).append(item)
    return {number: frozenset(chunk) for number, chunk in found.items()}
