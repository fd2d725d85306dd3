"""The decision for a plan, and how it is shown: a table in the terminal, HTML in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core import formatting
from trainwright.core.cluster import Cluster
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Estimate, InfeasiblePlan, Plan, RejectedPlan
from trainwright.planning.plan_charts import timeline_svg
from trainwright.reporting.plan_view import (
    estimate_table,
    factor_texts,
    facts_table,
    mesh_html,
    mesh_table,
    mesh_text,
    other_rows,
    plan_line,
    plan_name,
    plan_rows,
    planned_nodes,
    share_of_step,
)
from trainwright.strategies.search.plan_ranking import is_asynchronous


@dataclass(frozen=True, kw_only=True, repr=False)
class Decision:
    """The chosen plan and the others, with reasons. Prints as a table, shows as HTML in a notebook.

    Attributes:
        chosen: the plan.
        rejected: the best plan of each other strategy.
        infeasible: why the other strategies are impossible.
        profile: of the model, divided by layers as the job says.
        cluster: the whole cluster.
        used: the part of it that the job may use.
        contenders: plans to measure before the first step, the chosen one first; empty where none are measured.
    """

    chosen: Plan
    rejected: tuple[RejectedPlan, ...]
    infeasible: tuple[InfeasiblePlan, ...]
    profile: ModelProfile
    cluster: Cluster
    used: Cluster
    contenders: tuple[Plan, ...] = ()

    @property
    def timeline(self) -> str:
        """SVG of the predicted step of the chosen plan; empty where workers step asynchronously."""
        return "" if is_asynchronous(self.chosen) else timeline_svg(self.profile, self.used, self.chosen)

    def __repr__(self) -> str:
        return plan_text(self)

    def _repr_html_(self) -> str:
        return plan_html(self)


def _plan_table(decision: Decision) -> RenderableType:
    """Return the decision for the terminal: the chosen plan with its estimate, then the others with reasons."""
    parts: list[RenderableType] = [
        Text.assemble(("Plan  ", "bold"), (plan_line(decision.chosen), "bold green")),
        Padding(facts_table(_context(decision) + plan_rows(decision.chosen)), (1, 0, 0, 2)),
    ]
    mesh = mesh_table(decision.chosen, planned_nodes(decision.chosen, decision.used))
    if mesh is not None:
        parts.append(Padding(mesh_text(mesh), (1, 0, 0, 2)))
    if decision.chosen.estimate is not None:
        parts.append(Padding(estimate_table(decision.chosen.estimate), (1, 0, 0, 2)))
    others = other_rows(other_plans(decision))
    if others:
        parts.append(Padding(others_table(others), (1, 0, 0, 2)))
    return Group(*parts)


def plan_text(decision: Decision, *, width: int = 110) -> str:
    """Return the decision as plain text without colours."""
    return formatting.plain_text(_plan_table(decision), width)


def plan_html(decision: Decision) -> str:
    """Return the decision as HTML that inherits the colours of the page around it (notebooks, light and dark)."""
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in _context(decision))
    rows += "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in plan_rows(decision.chosen))
    mesh = mesh_table(decision.chosen, planned_nodes(decision.chosen, decision.used))
    parts = [
        f"<style>{_STYLE}</style><div class='tw-plan'>",
        f"<p class='tw-head'>{escape(plan_line(decision.chosen))}</p><table>{rows}</table>",
        mesh_html(mesh) if mesh else "",
        *([_estimate_html(decision.chosen.estimate), decision.timeline] if decision.chosen.estimate else []),
        _others_html(other_rows(other_plans(decision))),
        "</div>",
    ]
    return "".join(parts)


def other_plans(decision: Decision) -> list[dict[str, str]]:
    """Return rejected and infeasible plans as facts for `RunStarted.rejected`: strategy, plan, reason, hint."""
    rejected = [
        {"strategy": item.plan.strategy, "plan": f"{item.plan.strategy}: {plan_name(item.plan)}", "reason": item.reason}
        for item in decision.rejected
    ]
    return rejected + [
        {"strategy": item.strategy, "reason": item.reason, "hint": item.hint} for item in decision.infeasible
    ]


def compare_plans(plan: Plan, best: Plan) -> str:
    """Compare a plan with the best one: by step time, or by time to the same loss where these differ."""
    own, other = plan.estimate, best.estimate
    assert own is not None and other is not None, "both were ranked"
    if not own.factors and not other.factors:
        return f"predicted {own.step_s / other.step_s:.2f} times the step time of {best.strategy}"
    took = f"predicted {own.target_s / other.target_s:.2f} times the time of {best.strategy} to the same loss"
    steps = f"{own.step_s / other.step_s:.2f} times its step time"
    return f"{took} ({', '.join([steps, *factor_texts(own)])})"


def _context(decision: Decision) -> list[tuple[str, str]]:
    profile = decision.profile
    parameters = f"{formatting.count(profile.parameters, 'parameter')} ({formatting.size(profile.parameter_bytes)})"
    return [("model", f"{parameters}, {profile.framework}"), ("cluster", str(decision.cluster))]


def others_table(rows: Sequence[tuple[str, str, str]]) -> Table:
    """Return plans that were not chosen: name, verdict and reason of each."""
    table = Table(title="Not chosen", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for name in ("plan", "", "why"):
        table.add_column(name, header_style="dim", overflow="fold")
    for plan, verdict, why in rows:
        table.add_row(Text(plan), Text(verdict, style="red" if verdict == "not possible" else "yellow"), Text(why))
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
        f"<td><span class='tw-bar' style='width:{12 * share_of_step(seconds, estimate):.2f}em'></span></td></tr>"
        for name, seconds in estimate.terms.items()
    )
    return f"<table>{rows}</table>" if rows else ""


def _others_html(rows: Sequence[tuple[str, str, str]]) -> str:
    if not rows:
        return ""
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<p class='tw-head'>Not chosen</p><table>{body}</table>"
