"""Persistent collections: equal to the builtin ones after any changes, and the originals stay as they were."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.driver.persistent_collections import PersistentList, PersistentMap, PersistentSet

KEYS = st.one_of(st.integers(-2, 5), st.integers(120, 135), st.integers(1000, 1003))
SETS = st.frozensets(KEYS)


@given(SETS, SETS)
def test_a_set_does_as_a_frozenset_does(items: frozenset[int], others: frozenset[int]) -> None:
    made = PersistentSet(items)
    operands: list[Set[int]] = [others, PersistentSet(others)]
    for other in operands:
        assert made - other == items - others and made | other == items | others
        assert made & other == items & others and other - made == others - items
        assert bool(made - other) == bool(items - others)
    assert made == items and sorted(made) == sorted(items) and len(made) == len(items)
    assert all((key in made) == (key in items) for key in others)


@given(st.dictionaries(KEYS, st.integers()), st.lists(st.tuples(KEYS, st.integers())), SETS)
def test_a_map_does_as_a_dictionary_does(
    items: dict[int, int], more: list[tuple[int, int]], gone: frozenset[int]
) -> None:
    made = start = PersistentMap(items)
    now = dict(items)
    for key, value in more:
        made, now = made.put(key, value), {**now, key: value}
        assert made == now and made[key] == value
    left = made.without(gone)
    assert left == {key: value for key, value in now.items() if key not in gone}
    assert made == now and start == items and bool(left) == bool(dict(left)) and len(left) == len(dict(left))
    assert all((key in left) == (key in dict(left)) for key in (*gone, *now))


@given(st.lists(st.integers(), min_size=1, max_size=300), st.data())
def test_a_list_does_as_a_tuple_does(items: list[int], data: Any) -> None:
    made, place = PersistentList(items), data.draw(st.integers(0, len(items) - 1))
    changed = made.put(place, -7)
    assert list(changed) == [*items[:place], -7, *items[place + 1 :]] and list(made) == items
    assert changed[place] == -7 and made[place] == items[place] and made[place - len(items)] == items[place]
    assert made[place:] == tuple(items[place:]) and len(changed) == len(items)
    assert made == PersistentList(items) and made != PersistentList([*items, 1])
    for outside in (len(items), -len(items) - 1):
        with pytest.raises(IndexError):
            made[outside]


def test_what_is_missing_raises_as_in_a_dictionary() -> None:
    made = PersistentMap({1: "one"})
    for key in (2, 1000):
        with pytest.raises(KeyError):
            made[key]
    assert made.get(2) is None and made.without({2, 1000}) == made
