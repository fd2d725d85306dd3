"""Which rank lies on which node."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trainwright.core.plan import (
    Mesh,
    assign_nodes,
    assign_slots,
    format_ranges,
    parse_ranges,
    ranks_by_node,
    slots_per_node,
)
from trainwright.core.topology import StateTag
from trainwright.driver.checkpointing import choose_memory_copy_ranks

degrees = st.integers(1, 4)
meshes = st.builds(Mesh, pipeline=degrees, data=degrees, shard=degrees, tensor=st.sampled_from([1, 2, 4]))
rooms = st.lists(st.integers(0, 16), min_size=1, max_size=12)


def rank_of(mesh: Mesh, stage: int, data: int, shard: int = 0, tensor: int = 0) -> int:
    return ((stage * mesh.data + data) * mesh.shard + shard) * mesh.tensor + tensor


@given(meshes, rooms)
def test_nobody_is_left_out_and_no_node_is_overfilled(mesh: Mesh, room: list[int]) -> None:
    if sum(room) < mesh.size:
        with pytest.raises(ValueError, match="do not fit"):
            assign_nodes(mesh, room)
        return
    held = Counter(assign_nodes(mesh, room))
    assert sum(held.values()) == mesh.size
    assert all(held[node] <= most for node, most in enumerate(room))


@given(meshes, rooms)
def test_tensor_groups_stay_inside_a_node_wherever_there_is_room_for_them(mesh: Mesh, room: list[int]) -> None:
    assume(sum(room) >= mesh.size)
    nodes = assign_nodes(mesh, room)
    groups = [set(nodes[first : first + mesh.tensor]) for first in range(0, mesh.size, mesh.tensor)]
    inside = sum(len(group) == 1 for group in groups)
    assert inside >= min(len(groups), sum(each // mesh.tensor for each in room))


@given(meshes, st.integers(1, 16), st.integers(1, 64))
def test_pipeline_neighbours_share_a_node_or_lie_on_adjacent_ones(mesh: Mesh, units: int, count: int) -> None:
    each = units * mesh.tensor
    assume(each * count >= mesh.size)
    nodes = assign_nodes(mesh, [each] * count)
    far = -(-mesh.shard * mesh.tensor // each)  # nodes that a whole stage of a replica takes
    for data in range(mesh.data):
        for stage, after in pairwise(range(mesh.pipeline)):
            for shard in range(mesh.shard):
                here, there = (nodes[rank_of(mesh, one, data, shard)] for one in (stage, after))
                assert 0 <= there - here <= far


@given(meshes, rooms)
def test_as_few_pieces_as_can_be_have_all_their_copies_on_one_node(mesh: Mesh, room: list[int]) -> None:
    """No order can do better: of the workers outside a node each holds one piece."""
    room = [each // mesh.tensor * mesh.tensor for each in room]
    assume(sum(room) >= mesh.size)
    nodes, replica = assign_nodes(mesh, room), mesh.size // mesh.data
    copies = Counter(
        frozenset(nodes[rank_of(mesh, stage, data, shard, tensor)] for data in range(mesh.data))
        for stage in range(mesh.pipeline)
        for shard in range(mesh.shard)
        for tensor in range(mesh.tensor)
    )
    for node, held in Counter(nodes).items():
        assert copies[frozenset({node})] == max(0, held - (mesh.data - 1) * replica)


def test_where_half_of_the_workers_lie_on_each_node_every_piece_outlives_one_of_them() -> None:
    mesh = Mesh(pipeline=2, data=2, tensor=2)
    names = [f"node-{node}" for node in assign_nodes(mesh, [4, 4])]
    assert names == ["node-0"] * 2 + ["node-1"] * 2 + ["node-0"] * 2 + ["node-1"] * 2
    pieces = [frozenset({f"{mesh.stage_of(rank)}/{rank % 2}"}) for rank in range(8)]
    tags = {rank: StateTag(step=1, layout="", pieces=held, sound=True) for rank, held in enumerate(pieces)}
    assert choose_memory_copy_ranks(tags, names, "in_place") == (), "the ranks' own memory does as well as a keeper's"
    assert choose_memory_copy_ranks(tags, ["node-0"] * 4 + ["node-1"] * 4, "in_place"), (
        "as in the order of ranks it would not"
    )


@given(meshes, st.data())
def test_ranks_take_the_places_that_there_are(mesh: Mesh, data: st.DataObject) -> None:
    nodes = data.draw(st.lists(st.sampled_from("abc"), min_size=mesh.size, max_size=mesh.size))
    order = assign_slots(mesh, nodes)
    assert sorted(order) == list(range(mesh.size))
    assert assign_slots(mesh, ["a"] * mesh.size) == tuple(range(mesh.size))
    rooms = [nodes.count(node) for node in dict.fromkeys(nodes)]
    named = list(dict.fromkeys(nodes))
    assert [nodes[place] for place in order] == [named[node] for node in assign_nodes(mesh, rooms)]


def test_a_worker_of_several_devices_is_one() -> None:
    assert assign_nodes(Mesh(data=8), [1, 1], devices=4) == (0, 1)
    assert assign_nodes(Mesh(pipeline=2, data=2, tensor=4), [4, 4], devices=2) == (0, 0, 1, 1, 0, 0, 1, 1)


@given(rooms, st.integers(1, 64), st.booleans())
def test_rooms(capacities: list[int], workers: int, close: bool) -> None:
    found = slots_per_node(capacities, workers, close=close)
    assert sum(found) == min(workers, sum(capacities))
    assert all(0 <= room <= most for room, most in zip(found, capacities, strict=True))
    used = [node for node, room in enumerate(found) if room or not close]
    free = [found[node] for node in used if found[node] < capacities[node]]
    assert max(found) - min(free, default=max(found)) <= 1, "evenly"
    if close and sum(capacities) >= workers:
        assert sum(sorted(capacities)[1 - len(used) :][: len(used) - 1]) < workers or len(used) == 1, "the fewest nodes"


@given(st.frozensets(st.integers(0, 3000), min_size=1))
def test_ranges(numbers: frozenset[int]) -> None:
    assert parse_ranges(format_ranges(numbers)) == tuple(sorted(numbers))


def test_ranges_in_words() -> None:
    assert format_ranges([5, 0, 1, 2, 9, 10]) == "0-2, 5, 9-10"
    assert parse_ranges("") == ()
    assert ranks_by_node("aabba") == {"a": "0-1, 4", "b": "2-3"}
