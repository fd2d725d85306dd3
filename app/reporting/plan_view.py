"""A plan as text and tables: one line, names and values, the decision with its alternatives, ranks by node.

Beside it, the options of a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

from pydantic import TypeAdapter
from rich.table import Table
from rich.text import Text

from trainwright.core import formatting
from trainwright.core.cluster import Cluster
from trainwright.core.events import RunStarted
from trainwright.core.job import GROUP_OF, Job
from trainwright.core.plan import (
    Estimate,
    InfeasiblePlan,
    Mesh,
    Plan,
    assign_nodes,
    format_ranges,
    parse_ranges,
    ranks_by_node,
    slots_per_node,
    tensor_workers,
)


def plan_line(plan: Plan) -> str:
    """Return a plan as one line: strategy, workers, devices, batch and predicted step time.

    Example: `data_parallel: 2 workers x 1 thread on CPU, batch 256 = 2 x 128, est. 14 ms/step`.
    """
    parts = [f"{plan.strategy}: {_workers(plan)}", *_layout(plan), *_server_parts(plan), _batch(plan)]
    if plan.precision != "fp32":
        parts.append(plan.precision)
    if plan.estimate is not None:
        parts.append(f"est. {formatting.duration(plan.estimate.step_s)}/step")
    return ", ".join(parts)


def plan_name(plan: Plan) -> str:
    """Return degrees and choices: `pipeline 8 x data 16 (ZeRO-1) x tensor 8, micro-batch 2, 1f1b, recompute full`."""
    rows = plan.micro_batch or plan.micro_batches(plan.batch_size)[1]
    parts = [_degrees(plan) or "one device", f"micro-batch {rows}", *_choices(plan), *_server_parts(plan)]
    return ", ".join(filter(None, parts))


def infeasible_name(misfit: InfeasiblePlan) -> str:
    """Return the name of an infeasible plan: the strategy, with degrees where they are known."""
    return f"{misfit.strategy}: {plan_name(misfit.plan)}" if misfit.plan else misfit.strategy


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return names and values of a plan, for tables."""
    rows = [
        ("mesh", _degrees(plan) or "one device"),
        ("workers", _workers(plan)),
        ("reserved", _reserved(plan)),
        ("batch", _batch(plan).removeprefix("batch ")),
        ("precision", plan.precision),
    ]
    if plan.servers:
        rows += _server_rows(plan)
    if plan.stages:
        rows.append(("layers by stage", stage_sizes_text(plan.stages)))
    if plan.cuts:
        rows.append(("cut before", ", ".join(plan.cuts)))
    if plan.schedule:
        rows.append(("schedule", plan.schedule))
    if plan.sequence:
        rows.append(("sequence parallel", "tokens divided between tensor-parallel layers"))
    if plan.offload:
        rows.append(("in host memory", "parameters, gradients and optimizer state"))
    if plan.recompute != "none":
        rows.append(("recomputed", {"full": "all activations", "selective": "attention scores"}[plan.recompute]))
    if plan.estimate is not None:
        low, high = formatting.duration(plan.estimate.low_s), formatting.duration(plan.estimate.high_s)
        rows.append(("step, predicted", f"{formatting.duration(plan.estimate.step_s)} ({low} to {high})"))
        if plan.estimate.factors:
            said = f"{', '.join(factor_texts(plan.estimate))} (a model, not verified)"
            rows.append(("to the same loss", said))
        rows.append(("memory by stage" if plan.mesh.pipeline > 1 else "memory", memory_text(plan.estimate)))
    return rows + [("note", note) for note in plan.notes]


def _server_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return names and values of an asynchronous plan."""
    rows = [("servers", str(plan.servers)), ("consistency", plan.consistency)]
    if plan.wire != "full":
        rows.append(("on the wire", plan.wire))
    if plan.local_steps > 1:
        rows.append(("local steps", f"{plan.local_steps}, then {plan.outer}"))
    return rows


def factor_texts(estimate: Estimate) -> list[str]:
    """By what the same loss takes longer: `staleness x 1.15`."""
    return [f"{name.replace('_', ' ')} x {factor:.2f}" for name, factor in estimate.factors.items()]


def memory_text(estimate: Estimate) -> str:
    """Return the memory of the stages and of a device: `1.2 GiB to 3.4 GiB of 80 GiB`."""
    low, high = min(estimate.stage_memory_bytes), max(estimate.stage_memory_bytes)
    taken = formatting.size(high) if low == high else f"{formatting.size(low)} to {formatting.size(high)}"
    return f"{taken} of {formatting.size(estimate.device_memory_bytes)}" if estimate.device_memory_bytes else taken


def stage_sizes_text(stages: Iterable[int]) -> str:
    """`4, 6 x 3, 5`: equal neighbours together."""
    sizes = ((size, len(list(same))) for size, same in groupby(stages))
    return ", ".join(f"{size} x {count}" if count > 1 else str(size) for size, count in sizes)


def other_rows(facts: Sequence[Mapping[str, str]]) -> list[tuple[str, str, str]]:
    """Return name, `rejected` or `not possible`, and the reason for each plan that was not chosen."""
    rows = []
    for fact in facts:
        verdict = "not possible" if fact.get("hint") else "rejected"
        why = "; ".join(part for part in (fact.get("reason", ""), fact.get("hint", "")) if part)
        name = fact.get("plan") or fact.get("strategy", "")
        rows.append((name, verdict, why))
    return rows


def plan_from(facts: Mapping[str, Any]) -> Plan | None:
    """Rebuild the plan of `RunStarted.plan` (its `asdict`), also from JSON; None when there is none."""
    if not {"strategy", "engine", "mesh", "batch_size", "placement"} <= facts.keys():
        return None
    known = {**facts, "estimate": facts.get("estimate") or None}
    return TypeAdapter(Plan).validate_python(known)  # it leaves out fields of later versions


def _degrees(plan: Plan) -> str:
    zero = {"shard": f" (ZeRO-{plan.zero})"} if plan.zero else {}
    degrees = [(name, getattr(plan.mesh, name)) for name in ("pipeline", "data", "shard", "tensor")]
    return " x ".join(f"{name} {degree}{zero.get(name, '')}" for name, degree in degrees if degree > 1)


def _choices(plan: Plan) -> list[str]:
    recompute = "" if plan.recompute == "none" else f"recompute {plan.recompute}"
    offload, sequence = "offload" * plan.offload, "sequence parallel" * plan.sequence
    wire = f"gradients in {plan.wire}" if plan.wire != "full" and not plan.servers else ""
    return [choice for choice in (plan.schedule, recompute, offload, sequence, wire) if choice]


def _layout(plan: Plan) -> list[str]:
    """Return degrees and choices of a plan that is not plain data parallel."""
    plain = plan.mesh == Mesh(data=plan.mesh.data)
    return [*([] if plain else [_degrees(plan)]), *_choices(plan)]


def _server_parts(plan: Plan) -> list[str]:
    """Return servers, consistency and local steps of an asynchronous plan."""
    if not plan.servers:
        return []
    found = [formatting.count(plan.servers, "server"), plan.consistency]
    found += [plan.wire] if plan.wire != "full" else []
    return [*found, f"{plan.local_steps} local steps, {plan.outer}"] if plan.local_steps > 1 else found


def _workers(plan: Plan) -> str:
    place, workers = plan.placement, formatting.count(plan.workers, "worker")
    if place.accelerators:
        devices = f" x {place.accelerators}" if place.accelerators > 1 else ""
        return f"{workers}{devices} on {place.accelerator}"
    devices = f" x {plan.devices_per_worker} logical devices" if plan.devices_per_worker > 1 else ""
    return f"{workers}{devices} x {formatting.count(place.threads, 'thread')} on CPU"


def _reserved(plan: Plan) -> str:
    place = plan.placement
    devices = f", {place.accelerators} {place.accelerator}" if place.accelerators else ""
    servers = f", {place.server_cpus:g} CPU for each server" if plan.servers else ""
    return f"{place.cpus:g} CPU{devices} for each worker{servers}; {place.data_cpus:g} CPU left for data"


def _batch(plan: Plan) -> str:
    ranks, pieces = plan.mesh.data_ranks, [str(plan.mesh.data_ranks)] if plan.mesh.data_ranks > 1 else []
    if plan.accumulation > 1:
        pieces.append(f"{plan.accumulation} micro-batches")
    if not pieces:
        return f"batch {plan.batch_size}"
    each, rest = divmod(plan.batch_size, ranks * plan.accumulation)
    return f"batch {plan.batch_size} = {' x '.join(pieces)} x {f'{each} or {each + 1}' if rest else each}"


def facts_table(rows: Sequence[tuple[str, str]]) -> Table:
    """Return names and values as a table for the terminal."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def estimate_table(estimate: Estimate) -> Table:
    """Return the terms of an estimate with their seconds as bars."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, seconds in estimate.terms.items():
        bar = Text("▇" * round(24 * share_of_step(seconds, estimate)), style="cyan")
        table.add_row(name.replace("_", " "), formatting.duration(seconds), bar)
    return table


def share_of_step(seconds: float, estimate: Estimate) -> float:
    """Return a time as a share of the predicted step."""
    return seconds / estimate.step_s if estimate.step_s > 0 else 0.0


# --- Which rank holds which part of the model and of the batch, and on which node -------------------------------------


_NAMED_NODES = 3  # so many nodes of one row are all named
SHOWN_ROWS = 16  # rows in a terminal, and in a page before the folded ones

_Coordinates = tuple[int, ...]  # coordinates of a rank, by dimension
_CoordinateBox = tuple[tuple[int, ...], ...]  # all points whose coordinates are among these


@dataclass(frozen=True, kw_only=True)
class MeshTable:
    """The ranks of a plan on nodes."""

    # `node`, `ranks`, and the mesh dimensions larger than 1; for a plan with servers, `node` and the roles
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]  # cells; nodes with the same part of each replica are one row


def planned_nodes(plan: Plan, cluster: Cluster) -> dict[str, str]:
    """Return the ranks of a plan for each node of an empty cluster, as `core.plan.ranks_by_node` writes them.

    Empty where they do not fit, and for a plan with servers, which Ray places.
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
    rooms = [together * room for room in slots_per_node(capacities, groups, close=bool(place.accelerators))]
    nodes = assign_nodes(plan.mesh, rooms, plan.devices_per_worker)
    return ranks_by_node(cluster.nodes[node].name for node in nodes)


def mesh_table(plan: Plan, nodes: Mapping[str, str]) -> MeshTable | None:
    """Return the part of model and batch on each node; None for a single worker, or where the ranks do not match.

    Args:
        nodes: the ranks of the workers on each node, as `core.plan.ranks_by_node` writes them.
    """
    if plan.servers:
        return _roles(plan, nodes)
    workers = sum(len(parse_ranges(ranks)) for ranks in nodes.values())
    if workers != plan.workers and plan.mesh == Mesh(data=plan.mesh.data):
        plan = plan.resized(max(workers, 1))
    if workers != plan.workers or workers == 1:
        return None
    mesh, names = plan.mesh, ("data", "stage", "shard", "tensor")
    shown = [number for number, degree in enumerate((mesh.data, mesh.pipeline, mesh.shard, mesh.tensor)) if degree > 1]
    parts = [(node, box) for node, ranks in nodes.items() for box in _boxes(_points(plan, parse_ranges(ranks)))]
    rows = []
    for alike in _group_equal_nodes(parts):
        held = [format_ranges(number for _, box in alike for number in box[column]) for column in shown]
        if len(alike) > 1 and shown and shown[0] == 0:
            held[0] += f", {len(alike[0][1][0])} on each"
        ranks = format_ranges(rank // plan.devices_per_worker for _, box in alike for rank in _ranks(mesh, box))
        rows.append((_node_names([node for node, _ in alike]), ranks, *held))
    return MeshTable(columns=("node", "ranks", *(names[number] for number in shown)), rows=tuple(rows))


def _roles(plan: Plan, nodes: Mapping[str, str]) -> MeshTable | None:
    """Return the ranks of each role by node; None where no node is known."""
    roles = tuple(dict.fromkeys(plan.role_of(rank) for rank in range(plan.processes)))
    rows = [
        (node, *(format_ranges(rank for rank in parse_ranges(ranks) if plan.role_of(rank) == role) for role in roles))
        for node, ranks in nodes.items()
    ]
    return MeshTable(columns=("node", *roles), rows=tuple(rows)) if rows else None


def _points(plan: Plan, workers: Iterable[int]) -> frozenset[_Coordinates]:
    """Return the coordinates (data, stage, shard, tensor) of all ranks of these workers."""
    mesh, devices = plan.mesh, plan.devices_per_worker
    ranks = (rank for worker in workers for rank in range(worker * devices, (worker + 1) * devices))
    return frozenset(_point(mesh, rank) for rank in ranks)


def _point(mesh: Mesh, rank: int) -> _Coordinates:
    data, shard = divmod(mesh.data_rank_of(rank), mesh.shard)
    return data, mesh.stage_of(rank), shard, rank % mesh.tensor


def _ranks(mesh: Mesh, box: _CoordinateBox) -> Iterable[int]:
    """Yield the ranks of all points of a box, as `Mesh` numbers them."""
    for data, stage, shard, tensor in product(*box):
        yield ((stage * mesh.data + data) * mesh.shard + shard) * mesh.tensor + tensor


def _boxes(points: frozenset[_Coordinates]) -> list[_CoordinateBox]:
    """Combine points to few boxes: coordinates with the same rest become one."""
    if () in points:
        return [()]
    rests: dict[int, set[_Coordinates]] = {}
    for first, *rest in sorted(points):
        rests.setdefault(first, set()).add(tuple(rest))
    firsts: dict[frozenset[_Coordinates], list[int]] = {}
    for first, found in rests.items():
        firsts.setdefault(frozenset(found), []).append(first)
    return [(tuple(some), *box) for rest, some in firsts.items() for box in _boxes(rest)]


def _group_equal_nodes(parts: Sequence[tuple[str, _CoordinateBox]]) -> list[list[tuple[str, _CoordinateBox]]]:
    """Group nodes whose only part is the same part of equally many replicas."""
    alone = {node for node, some in groupby(parts, key=lambda part: part[0]) if len(list(some)) == 1}
    found: dict[object, list[tuple[str, _CoordinateBox]]] = {}
    for number, (node, box) in enumerate(parts):
        key = (len(box[0]), box[1:]) if node in alone else number
        found.setdefault(key, []).append((node, box))
    return list(found.values())


def _node_names(nodes: Sequence[str]) -> str:
    if len(nodes) <= _NAMED_NODES:
        return ", ".join(nodes)
    return f"{nodes[0]}, {nodes[1]} … {nodes[-1]} ({len(nodes)} nodes)"


def mesh_text(table: MeshTable) -> Table:
    """Return the table for the terminal: the first rows, and the number of further ones."""
    text = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for name in table.columns:
        text.add_column(name, overflow="fold")
    for row in table.rows[:SHOWN_ROWS]:
        text.add_row(*map(Text, row))
    if len(table.rows) > SHOWN_ROWS:
        text.add_row(Text(f"and {len(table.rows) - SHOWN_ROWS} more", style="dim"))
    return text


def configuration(start: RunStarted) -> dict[str, list[tuple[str, str]]]:
    """Return the fields of the job in order, those that have their defaults apart."""
    fields = sorted((name, str(value)) for name, value in start.shown_job.items())
    usual = {name: str(Job.default(name)) for name in GROUP_OF}
    defaults = [(name, text) for name, text in fields if text in ("", usual.get(name))]
    return {"configuration": [each for each in fields if each not in defaults], "defaults": defaults}
