"""Which rank lies on which node. Pure.

Ranks that divide a layer between them stay inside a node, since they exchange something in every layer. Those of one
replica follow each other, stage by stage, so that pipeline neighbours share a node or lie on adjacent ones. Replicas
come one after another, so that copies of the same piece lie as far apart as the nodes allow.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, groupby

from trainwright.core.plan import Mesh


def arrange(mesh: Mesh, rooms: Sequence[int], devices: int = 1) -> tuple[int, ...]:
    """The node of each worker.

    Tensor groups cross nodes only where there is no room for all of them inside. Where they fit, as many pieces as can
    have copies on two nodes: a node that holds q workers holds all copies of max(0, q - (data - 1) * replica) pieces,
    and no order of ranks does better.

    Args:
        mesh: degrees.
        rooms: workers that each node has room for, in the order in which nodes are filled; `mesh.size // devices` or
            more in all.
        devices: ranks of a worker.

    Raises:
        ValueError: there is not room for all.
    """
    size, together = mesh.size // devices, tensor_workers(mesh, devices)
    if sum(rooms) < size:
        raise ValueError(f"{size} workers do not fit into {sum(rooms)} places")
    left, found = list(rooms), [0] * size
    whole = [node for node, room in enumerate(rooms) for _ in range(room // together)]
    for number, first in enumerate(_by_replica(mesh, devices)):
        if number < len(whole):
            nodes = [whole[number]] * together
        else:
            nodes = [node for node, room in enumerate(left) for _ in range(room)][:together]
        for worker, node in enumerate(nodes, first):
            found[worker] = node
            left[node] -= 1
    return tuple(found)


def seats(mesh: Mesh, nodes: Sequence[Hashable], devices: int = 1) -> tuple[int, ...]:
    """Which of the places that there are each worker takes: a permutation, the identity on a single node.

    Args:
        mesh: degrees.
        nodes: of each place; as many as there are workers.
        devices: ranks of a worker.
    """
    free: dict[Hashable, list[int]] = {}
    for place, node in enumerate(nodes):
        free.setdefault(node, []).append(place)
    places = [iter(found) for found in free.values()]
    return tuple(next(places[node]) for node in arrange(mesh, [len(found) for found in free.values()], devices))


def rooms_of(capacities: Sequence[int], count: int, *, close: bool) -> tuple[int, ...]:
    """How many of so many each node gets: as evenly as can be over the fewest nodes if `close`, else over all.

    Args:
        capacities: how many each node could hold.
    """
    largest = sorted(range(len(capacities)), key=lambda node: -capacities[node])
    if close:
        held = accumulate(capacities[node] for node in largest)
        largest = largest[: 1 + sum(room < count for room in held)]
    rooms = [0] * len(capacities)
    for _ in range(min(count, sum(capacities))):
        rooms[min((rooms[node], node) for node in largest if rooms[node] < capacities[node])[1]] += 1
    return tuple(rooms)


def tensor_workers(mesh: Mesh, devices: int = 1) -> int:
    """Workers that divide each layer between them, and are to be on one node."""
    return max(1, mesh.tensor // devices)


def ranks_by_node(nodes: Iterable[str]) -> dict[str, str]:
    """The ranks that each node holds, as `ranges_of` tells them, given the node of each."""
    found: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    return {node: ranges_of(ranks) for node, ranks in found.items()}


def ranges_of(numbers: Iterable[int]) -> str:
    """`0-7, 16`: numbers in words that stay short for thousands of them."""
    runs = groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0])
    ends = ([number for _, number in run] for _, run in runs)
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)


def numbers_in(ranges: str) -> tuple[int, ...]:
    """The numbers of which `ranges_of` told."""
    ends = [part.split("-") for part in ranges.split(", ") if part]
    return tuple(number for run in ends for number in range(int(run[0]), int(run[-1]) + 1))


def _by_replica(mesh: Mesh, devices: int) -> list[int]:
    """The first worker of each tensor group, replica by replica and in these stage by stage."""
    firsts = (
        ((stage * mesh.data + replica) * mesh.shard + shard) * mesh.tensor
        for replica in range(mesh.data)
        for stage in range(mesh.pipeline)
        for shard in range(mesh.shard)
    )
    return list(dict.fromkeys(first // devices for first in firsts))
