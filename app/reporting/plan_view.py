"""A plan as people read it: one line, a table in the terminal, HTML in notebooks and reports."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core.plan import Estimate, Infeasible, Mesh, Placement, Plan
from trainwright.reporting import formatting
from trainwright.reporting.mesh_view import mesh_html, mesh_table, mesh_text, planned_nodes
from trainwright.strategies import current_engine

if TYPE_CHECKING:
    from trainwright.planning.planner import Decision

Fact = TypeVar("Fact")


def compared(plan: Plan, best: Plan) -> str:
    """What a plan takes beside the best: by step, or where that is not all, to the same loss."""
    own, other = plan.estimate, best.estimate
    assert own is not None and other is not None, "both were ranked"
    if not own.factors and not other.factors:
        return f"predicted {own.step_s / other.step_s:.2f} times the step time of {best.strategy}"
    took = f"predicted {own.target_s / other.target_s:.2f} times the time of {best.strategy} to the same loss"
    steps = f"{own.step_s / other.step_s:.2f} times its step time"
    return f"{took} ({', '.join([steps, *factors_of(own)])})"


def factors_of(estimate: Estimate) -> list[str]:
    """By what the same loss takes longer: `staleness x 1.15`."""
    return [f"{name.replace('_', ' ')} x {factor:.2f}" for name, factor in estimate.factors.items()]


def plan_line(plan: Plan) -> str:
    """One line: strategy, workers, where, batch and predicted step time.

    Example: `data_parallel: 2 workers x 1 thread on CPU, batch 256 = 2 x 128, est. 14 ms/step`.
    """
    parts = [f"{plan.strategy}: {_workers(plan)}", *_layout(plan), *_apart(plan), _batch(plan)]
    if plan.precision != "fp32":
        parts.append(plan.precision)
    if plan.estimate is not None:
        parts.append(f"est. {formatting.duration(plan.estimate.step_s)}/step")
    return ", ".join(parts)


def name_of(plan: Plan) -> str:
    """Degrees and choices in words: `pipeline 8 x data 16 (ZeRO-1) x tensor 8, micro-batch 2, 1f1b, recompute full`."""
    rows = plan.micro_batch or plan.micro_batches(plan.batch_size)[1]
    parts = [_degrees(plan) or "one device", f"micro-batch {rows}", *_choices(plan), *_apart(plan)]
    return ", ".join(filter(None, parts))


def misfit_name(misfit: Infeasible) -> str:
    """What cannot be: the strategy, and the plan where there is one."""
    return f"{misfit.strategy}: {name_of(misfit.plan)}" if misfit.plan else misfit.strategy


def plan_table(decision: Decision) -> RenderableType:
    """The decision for the terminal: the chosen plan and what it costs, then the others with reasons."""
    parts: list[RenderableType] = [
        Text.assemble(("Plan  ", "bold"), (plan_line(decision.chosen), "bold green")),
        Padding(_facts_table(_context(decision) + plan_rows(decision.chosen)), (1, 0, 0, 2)),
    ]
    mesh = mesh_table(decision.chosen, planned_nodes(decision.chosen, decision.used))
    if mesh is not None:
        parts.append(Padding(mesh_text(mesh), (1, 0, 0, 2)))
    if decision.chosen.estimate is not None:
        parts.append(Padding(estimate_table(decision.chosen.estimate), (1, 0, 0, 2)))
    others = other_rows(others_of(decision))
    if others:
        parts.append(Padding(_others_table(others), (1, 0, 0, 2)))
    return Group(*parts)


def plan_text(decision: Decision, *, width: int = 110) -> str:
    """The table of `plan_table` as plain text without colours."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False, force_jupyter=False).print(
        plan_table(decision)
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def plan_html(decision: Decision) -> str:
    """The decision as HTML that inherits the colours of the page around it (notebooks, light and dark)."""
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in _context(decision))
    rows += "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in plan_rows(decision.chosen))
    mesh = mesh_table(decision.chosen, planned_nodes(decision.chosen, decision.used))
    parts = [
        f"<style>{_STYLE}</style><div class='tw-plan'>",
        f"<p class='tw-head'>{escape(plan_line(decision.chosen))}</p><table>{rows}</table>",
        mesh_html(mesh) if mesh else "",
        *([_estimate_html(decision.chosen.estimate), decision.timeline] if decision.chosen.estimate else []),
        _others_html(other_rows(others_of(decision))),
        "</div>",
    ]
    return "".join(parts)


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """Names and values of a plan, in reading order, for tables."""
    rows = [
        ("mesh", _degrees(plan) or "one device"),
        ("workers", _workers(plan)),
        ("reserved", _reserved(plan)),
        ("batch", _batch(plan).removeprefix("batch ")),
        ("precision", plan.precision),
    ]
    if plan.servers:
        rows += _alone_rows(plan)
    if plan.stages:
        rows.append(("layers by stage", runs_of(plan.stages)))
    if plan.cuts:
        rows.append(("cut before", ", ".join(plan.cuts)))
    if plan.schedule:
        rows.append(("schedule", plan.schedule))
    if plan.sequence:
        rows.append(("sequence parallel", "tokens divided between the layers that are"))
    if plan.offload:
        rows.append(("in host memory", "parameters, gradients and the optimizer's state"))
    if plan.recompute != "none":
        rows.append(("recomputed", {"full": "all activations", "selective": "attention's scores"}[plan.recompute]))
    if plan.estimate is not None:
        low, high = formatting.duration(plan.estimate.low_s), formatting.duration(plan.estimate.high_s)
        rows.append(("step, predicted", f"{formatting.duration(plan.estimate.step_s)} ({low} to {high})"))
        if plan.estimate.factors:
            said = f"{', '.join(factors_of(plan.estimate))} (a model, not verified)"
            rows.append(("to the same loss", said))
        rows.append(("memory by stage" if plan.mesh.pipeline > 1 else "memory", memory_of(plan.estimate)))
    return rows + [("note", note) for note in plan.notes]


def _alone_rows(plan: Plan) -> list[tuple[str, str]]:
    """Of workers that step alone."""
    rows = [("servers", str(plan.servers)), ("consistency", plan.consistency)]
    if plan.wire != "full":
        rows.append(("on the wire", plan.wire))
    if plan.local_steps > 1:
        rows.append(("local steps", f"{plan.local_steps}, then {plan.outer}"))
    return rows


def memory_of(estimate: Estimate) -> str:
    """What each stage takes, of what a device has: `1.2 GiB to 3.4 GiB of 80 GiB`."""
    low, high = min(estimate.stage_memory_bytes), max(estimate.stage_memory_bytes)
    taken = formatting.size(high) if low == high else f"{formatting.size(low)} to {formatting.size(high)}"
    return f"{taken} of {formatting.size(estimate.device_memory_bytes)}" if estimate.device_memory_bytes else taken


def runs_of(stages: Iterable[int]) -> str:
    """`4, 6 x 3, 5`: equal neighbours together."""
    sizes = ((size, len(list(same))) for size, same in groupby(stages))
    return ", ".join(f"{size} x {count}" if count > 1 else str(size) for size, count in sizes)


def others_of(decision: Decision) -> list[dict[str, str]]:
    """Rejected and infeasible plans as facts for `RunStarted.rejected`: strategy, plan, reason, hint."""
    rejected = [
        {"strategy": item.plan.strategy, "plan": f"{item.plan.strategy}: {name_of(item.plan)}", "reason": item.reason}
        for item in decision.rejected
    ]
    return rejected + [
        {"strategy": item.strategy, "reason": item.reason, "hint": item.hint} for item in decision.infeasible
    ]


def other_rows(facts: Sequence[Mapping[str, str]]) -> list[tuple[str, str, str]]:
    """Strategy, `rejected` or `not possible`, and why, of each plan that was not chosen."""
    rows = []
    for fact in facts:
        verdict = "not possible" if fact.get("hint") else "rejected"
        why = "; ".join(part for part in (fact.get("reason", ""), fact.get("hint", "")) if part)
        name = fact.get("plan") or fact.get("strategy", "")
        rows.append((name, verdict, why))
    return rows


def plan_from(facts: Mapping[str, Any]) -> Plan | None:
    """The plan of `RunStarted.plan` (its `asdict`), also after a trip through JSON; None when it holds no plan."""
    if not {"strategy", "engine", "mesh", "batch_size", "placement"} <= facts.keys():
        return None
    estimate = facts.get("estimate")
    if estimate:
        memory = tuple(estimate.get("stage_memory_bytes", ()))
        estimate = _known(Estimate, {**estimate, "stage_memory_bytes": memory})
    return _known(
        Plan,
        {
            **facts,
            "engine": current_engine(facts["engine"]),
            "mesh": _known(Mesh, facts["mesh"]),
            "placement": _known(Placement, facts["placement"]),
            "estimate": estimate or None,
            "notes": tuple(facts.get("notes", ())),
            "stages": tuple(facts.get("stages", ())),
            "cuts": tuple(facts.get("cuts", ())),
        },
    )


def _known(kind: type[Fact], facts: Mapping[str, Any]) -> Fact:
    """An object of the fields that this version knows; a later version may have written more."""
    names = {item.name for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in facts.items() if name in names})


def _context(decision: Decision) -> list[tuple[str, str]]:
    profile = decision.profile
    parameters = f"{formatting.count(profile.parameters, 'parameter')} ({formatting.size(profile.parameter_bytes)})"
    return [("model", f"{parameters}, {profile.framework}"), ("cluster", str(decision.cluster))]


def _degrees(plan: Plan) -> str:
    zero = {"shard": f" (ZeRO-{plan.zero})"} if plan.zero else {}
    degrees = [(name, getattr(plan.mesh, name)) for name in ("pipeline", "data", "shard", "tensor")]
    return " x ".join(f"{name} {degree}{zero.get(name, '')}" for name, degree in degrees if degree > 1)


def _choices(plan: Plan) -> list[str]:
    recompute = "" if plan.recompute == "none" else f"recompute {plan.recompute}"
    offload, sequence = "offload" * plan.offload, "sequence parallel" * plan.sequence
    return [choice for choice in (plan.schedule, recompute, offload, sequence) if choice]


def _layout(plan: Plan) -> list[str]:
    """What the number of workers does not say."""
    plain = plan.mesh == Mesh(data=plan.mesh.data)
    return [*([] if plain else [_degrees(plan)]), *_choices(plan)]


def _apart(plan: Plan) -> list[str]:
    """Of workers that step alone, in a few words."""
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


def _facts_table(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def estimate_table(estimate: Estimate) -> Table:
    """Terms with their seconds as bars."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, seconds in estimate.terms.items():
        bar = Text("▇" * round(24 * _part(seconds, estimate)), style="cyan")
        table.add_row(name.replace("_", " "), formatting.duration(seconds), bar)
    return table


def _part(seconds: float, estimate: Estimate) -> float:
    return seconds / estimate.step_s if estimate.step_s > 0 else 0.0


def _others_table(rows: Sequence[tuple[str, str, str]]) -> Table:
    table = Table(title="Not chosen", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for name in ("plan", "", "why"):
        table.add_column(name, header_style="dim", overflow="fold")
    for plan, verdict, why in rows:
        table.add_row(Text(plan), Text(verdict, style="yellow" if verdict == "rejected" else "red"), Text(why))
    return table


_STYLE = (
    ".tw-plan{font:13px/1.5 system-ui,sans-serif;max-width:60em}.tw-plan .tw-head{font-weight:600;margin:.3em 0}"
    ".tw-plan table{border-collapse:collapse;margin:.3em 0 .8em}.tw-plan th,.tw-plan td{text-align:left;border:0;"
    "padding:.1em 1em .1em 0;vertical-align:top;background:none}.tw-plan th{font-weight:400;opacity:.65}"
    ".tw-plan .tw-bar{display:inline-block;height:.6em;border-radius:2px;background:#2a78d6}"
)


def _estimate_html(estimate: Estimate) -> str:
    rows = "".join(
        f"<tr><th>{escape(name.replace('_', ' '))}</th><td>{formatting.duration(seconds)}</td>"
        f"<td><span class='tw-bar' style='width:{12 * _part(seconds, estimate):.2f}em'></span></td></tr>"
        for name, seconds in estimate.terms.items()
    )
    return f"<table>{rows}</table>" if rows else ""


def _others_html(rows: Sequence[tuple[str, str, str]]) -> str:
    if not rows:
        return ""
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<p class='tw-head'>Not chosen</p><table>{body}</table>"
