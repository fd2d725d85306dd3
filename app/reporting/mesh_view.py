"""Which rank holds which part of the model and of the batch, and on which node: a table that stays short. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, product

from rich.table import Table
from rich.text import Text

from trainwright.core.cluster import Cluster
from trainwright.core.plan import Mesh, Plan
from trainwright.core.rank_placement import arrange, numbers_in, ranges_of, ranks_by_node, rooms_of, tensor_workers

NAMED = 3  # nodes of one row whose names are all told
SHOWN = 16  # rows in a terminal, and in a page before the others are asked for

Point = tuple[int, ...]  # coordinates of a rank, by dimension
Box = tuple[tuple[int, ...], ...]  # all points whose coordinates are among these


@dataclass(frozen=True, kw_only=True)
class MeshTable:
    """Rows of nodes.

    Attributes:
        columns: `node`, `ranks`, and the dimensions of more than one; where there are servers, `node` and the roles.
        rows: cells; nodes that hold the same of each replica are one row.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def planned_nodes(plan: Plan, cluster: Cluster) -> dict[str, str]:
    """The ranks that each node is to hold where nobody else is, as `core.arranging.ranges_of` tells them.

    Empty where they do not fit, and where there are servers, which Ray places.
    """
    if plan.servers:
        return {}
    place, together = plan.placement, tensor_workers(plan.mesh, plan.devices_per_worker)
    each = [
        node.accelerators // place.accelerators if place.accelerators else int(node.cpus / place.cpus + 1e-6)
        for node in cluster.nodes
    ]
    groups, capacities = plan.workers // together, [room // together for room in each]
    if sum(capacities) < groups:
        return {}
    rooms = [together * room for room in rooms_of(capacities, groups, close=bool(place.accelerators))]
    nodes = arrange(plan.mesh, rooms, plan.devices_per_worker)
    return ranks_by_node(cluster.nodes[node].name for node in nodes)


def mesh_table(plan: Plan, nodes: Mapping[str, str]) -> MeshTable | None:
    """Who holds what; None of a single worker, or where the nodes hold other ranks than the plan's.

    Args:
        nodes: the ranks of the workers on each node, as `core.arranging.ranges_of` tells them.
    """
    if plan.servers:
        return _roles(plan, nodes)
    workers = sum(len(numbers_in(ranks)) for ranks in nodes.values())
    if workers != plan.workers and plan.mesh == Mesh(data=plan.mesh.data):
        plan = plan.resized(max(workers, 1))
    if workers != plan.workers or workers == 1:
        return None
    mesh, names = plan.mesh, ("data", "stage", "shard", "tensor")
    shown = [number for number, degree in enumerate((mesh.data, mesh.pipeline, mesh.shard, mesh.tensor)) if degree > 1]
    parts = [(node, box) for node, ranks in nodes.items() for box in _boxes(_points(plan, numbers_in(ranks)))]
    rows = []
    for alike in _alike(parts):
        held = [ranges_of(number for _, box in alike for number in box[column]) for column in shown]
        if len(alike) > 1 and shown and shown[0] == 0:
            held[0] += f", {len(alike[0][1][0])} on each"
        ranks = ranges_of(rank // plan.devices_per_worker for _, box in alike for rank in _ranks(mesh, box))
        rows.append((_named([node for node, _ in alike]), ranks, *held))
    return MeshTable(columns=("node", "ranks", *(names[number] for number in shown)), rows=tuple(rows))


def _roles(plan: Plan, nodes: Mapping[str, str]) -> MeshTable | None:
    """The ranks of each role, of which all workers hold the same; None where no node is known."""
    roles = tuple(dict.fromkeys(plan.role_of(rank) for rank in range(plan.processes)))
    rows = [
        (node, *(ranges_of(rank for rank in numbers_in(ranks) if plan.role_of(rank) == role) for role in roles))
        for node, ranks in nodes.items()
    ]
    return MeshTable(columns=("node", *roles), rows=tuple(rows)) if rows else None


def _points(plan: Plan, workers: Iterable[int]) -> frozenset[Point]:
    """Coordinates (data, stage, shard, tensor) of all ranks of these workers."""
    mesh, devices = plan.mesh, plan.devices_per_worker
    ranks = (rank for worker in workers for rank in range(worker * devices, (worker + 1) * devices))
    return frozenset(_point(mesh, rank) for rank in ranks)


def _point(mesh: Mesh, rank: int) -> Point:
    data, shard = divmod(mesh.data_rank_of(rank), mesh.shard)
    return data, mesh.stage_of(rank), shard, rank % mesh.tensor


def _ranks(mesh: Mesh, box: Box) -> Iterable[int]:
    """Of all points of a box: how `Mesh` numbers them."""
    for data, stage, shard, tensor in product(*box):
        yield ((stage * mesh.data + data) * mesh.shard + shard) * mesh.tensor + tensor


def _boxes(points: frozenset[Point]) -> list[Box]:
    """The points as few boxes: coordinates with the same rest are one."""
    if () in points:
        return [()]
    rests: dict[int, set[Point]] = {}
    for first, *rest in sorted(points):
        rests.setdefault(first, set()).add(tuple(rest))
    firsts: dict[frozenset[Point], list[int]] = {}
    for first, found in rests.items():
        firsts.setdefault(frozenset(found), []).append(first)
    return [(tuple(some), *box) for rest, some in firsts.items() for box in _boxes(rest)]


def _alike(parts: Sequence[tuple[str, Box]]) -> list[list[tuple[str, Box]]]:
    """Those of nodes that hold the same of as many replicas, and nothing else, together."""
    alone = {node for node, some in groupby(parts, key=lambda part: part[0]) if len(list(some)) == 1}
    found: dict[object, list[tuple[str, Box]]] = {}
    for number, (node, box) in enumerate(parts):
        key = (len(box[0]), box[1:]) if node in alone else number
        found.setdefault(key, []).append((node, box))
    return list(found.values())


def _named(nodes: Sequence[str]) -> str:
    if len(nodes) <= NAMED:
        return ", ".join(nodes)
    return f"{nodes[0]}, {nodes[1]} … {nodes[-1]} ({len(nodes)} nodes)"


def mesh_text(table: MeshTable) -> Table:
    """For the terminal: the first rows, and how many more there are."""
    text = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for name in table.columns:
        text.add_column(name, overflow="fold")
    for row in table.rows[:SHOWN]:
        text.add_row(*map(Text, row))
    if len(table.rows) > SHOWN:
        text.add_row(Text(f"and {len(table.rows) - SHOWN} more", style="dim"))
    return text


def mesh_html(table: MeshTable) -> str:
    """For notebooks: all rows, those after the first ones folded away."""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table.rows]
    shown, more = ("".join(f"<tr>{row}</tr>" for row in some) for some in (rows[:SHOWN], rows[SHOWN:]))
    rest = f"<details><summary>{len(rows) - SHOWN} more</summary><table>{more}</table></details>" if more else ""
    return f"<table><tr>{head}</tr>{shown}</table>{rest}"
