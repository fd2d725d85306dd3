"""Show outcomes of simulations: JSON, a table in the terminal, an HTML page.

Keys: {workers, steps, seed, target, outcomes: [{consistency, servers, wire, local_steps, outer, seconds, steps_per_s,
waited, staleness: {unit, mean, p50, p95, most}, dropped, again, busy, busiest, workers_lost, servers_lost,
learning_rate, loss, target_s, curve: [[seconds, loss]]}], paying: {consistency: servers}}. Shares are from 0 to 1;
without learning the last four are null or empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from markupsafe import Markup
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core import formatting
from trainwright.core.topology import StalenessCounts
from trainwright.reporting.html.run_charts import curves_chart
from trainwright.reporting.html.templates import render_page, render_template
from trainwright.simulator.event_simulator import SimulationResult

_SHOWN = 1.25  # times the least loss that a run of `sync`, or the first, comes to: the target
_NUMBER_COLUMNS = ("steps/s", "waiting", "stale, mean", "95%", "most", "rate", "loss", "to target")
_HEADINGS = ("consistency", "servers", *_NUMBER_COLUMNS[:5], "servers' busiest", *_NUMBER_COLUMNS[5:])
_ASSUMPTIONS = "simulated on a virtual clock with the real lease table and update admission; nothing here was measured"
_WAITED = "waiting is for other workers and for fresh parameters; what links take is not part of it"
_LEARNED = (
    "the loss is of a noisy quadratic of 24 numbers, each row at its own best of 8 learning rates: it compares forms "
    "of consistency, and says nothing of your model's loss"
)


def _target_of(outcomes: Sequence[SimulationResult]) -> float | None:
    """Return the target loss: a little above the final loss of `sync`, else of the first; None without learning."""
    learnt = [one for one in outcomes if one.losses]
    sync = [one for one in learnt if one.scenario.consistency.bound == 0 and not one.scenario.consistency.backup]
    return _SHOWN * (sync or learnt)[0].losses[-1][1] if learnt else None


def as_data(outcomes: Sequence[SimulationResult]) -> dict[str, Any]:
    """Return the outcomes as data for JSON."""
    first, target = outcomes[0].scenario, _target_of(outcomes)
    return {
        "workers": first.workers,
        "steps": first.steps,
        "seed": first.seed,
        "target": target,
        "outcomes": [_facts(one, target) for one in outcomes],
        "paying": dict(fewest_servers(outcomes)),
    }


def _facts(one: SimulationResult, target: float | None) -> dict[str, Any]:
    scenario, staleness = one.scenario, one.staleness
    return {
        "consistency": str(scenario.consistency),
        "servers": scenario.servers,
        "wire": str(scenario.wire),
        "local_steps": scenario.local_steps,
        "outer": str(scenario.outer) if scenario.local_steps > 1 else None,
        "seconds": one.seconds,
        "steps_per_s": one.steps_per_s,
        "waited": one.waited,
        "staleness": {
            "unit": staleness.unit,
            "mean": staleness.mean,
            "p50": staleness_percentile(staleness, 0.5),
            "p95": staleness_percentile(staleness, 0.95),
            "most": staleness_percentile(staleness, 1.0),
        },
        "dropped": staleness.dropped,
        "again": staleness.again,
        "busy": one.busy,
        "busiest": one.busiest,
        "workers_lost": one.lost[0],
        "servers_lost": one.lost[1],
        "learning_rate": one.rates[one.best] if one.rates else None,
        "loss": one.losses[-1][1] if one.losses else None,
        "target_s": one.reaches(target) if target is not None else None,
        "curve": [[seconds, formatting.finite(loss)] for seconds, loss in one.losses],
    }


def staleness_percentile(staleness: StalenessCounts, part: float) -> int:
    """Return the staleness that a share of the pushes does not exceed; 0 without pushes."""
    return next((age for age, share in _cumulated(staleness) if share >= part), 0)


def _cumulated(staleness: StalenessCounts) -> list[tuple[int, float]]:
    """Return staleness and the share of pushes that were no staler."""
    counts = sorted(staleness.counts.items())
    total = sum(count for _, count in counts)
    return [(age, seen / total) for (age, _), seen in zip(counts, accumulate(n for _, n in counts), strict=True)]


def fewest_servers(outcomes: Sequence[SimulationResult]) -> Mapping[str, int]:
    """Return by consistency the fewest servers whose time is within 5% of the fastest."""
    found: dict[str, int] = {}
    for name in dict.fromkeys(str(one.scenario.consistency) for one in outcomes):
        mine = [one for one in outcomes if str(one.scenario.consistency) == name]
        most = max(one.steps_per_s for one in mine)
        found[name] = min(one.scenario.servers for one in mine if 1.05 * one.steps_per_s >= most)
    return found


def _rows(outcomes: Sequence[SimulationResult]) -> list[tuple[str, ...]]:
    """Return the cells of a row below `_HEADINGS`."""
    target = _target_of(outcomes)
    return [_row(one, target) for one in outcomes]


def _row(one: SimulationResult, target: float | None) -> tuple[str, ...]:
    staleness, reached = one.staleness, one.reaches(target) if target is not None else None
    stale = (
        f"{staleness.mean:.1f} {staleness.unit}",
        *(str(staleness_percentile(staleness, part)) for part in (0.95, 1.0)),
    )
    learnt = (f"{one.rates[one.best]:.3g}", formatting.metric(one.losses[-1][1])) if one.losses else ("-", "-")
    return (
        _name(one),
        str(one.scenario.servers),
        f"{one.steps_per_s:.3g}",
        formatting.percent(one.waited),
        *stale,
        f"{one.busiest} {formatting.percent(one.busy)}",
        *learnt,
        formatting.duration(reached) if reached is not None else "-",
    )


def _name(one: SimulationResult) -> str:
    local = one.scenario.local_steps
    rounds = f", {local} local steps, {one.scenario.outer}" if local > 1 else ""
    return f"{one.scenario.consistency}{rounds}"


def _sentences(outcomes: Sequence[SimulationResult]) -> list[str]:
    """Return notes on assumptions and results."""
    target, found = _target_of(outcomes), [_ASSUMPTIONS, _WAITED]
    if target is not None:
        found.append(_LEARNED)
        of = _name(outcomes[0])
        found.append(
            f"target: a loss of {formatting.metric(target)}, {_SHOWN:g} times the last of {of}; - if not reached"
        )
    counts = {one.scenario.servers for one in outcomes}
    if len(counts) > 1:
        found += [_paid(name, enough, max(counts)) for name, enough in fewest_servers(outcomes).items()]
    lost = [one for one in outcomes if any(one.lost)]
    found += [
        f"{_name(one)}: {formatting.count(one.lost[0], 'death')} of workers and {one.lost[1]} of servers, "
        f"{formatting.count(one.staleness.again, 'unit')} handed out again"
        for one in lost
    ]
    return found


def _paid(name: str, enough: int, most: int) -> str:
    if enough == most:
        return f"{name}: {formatting.count(most, 'server')} pay, the most that were tried"
    return f"{name}: more than {formatting.count(enough, 'server')} add less than 5%"


def _headline(outcomes: Sequence[SimulationResult]) -> str:
    """Return a line that describes the scenario."""
    first = outcomes[0].scenario
    slow = f" ({len(first.slow)} of them up to {max(first.slow):g} times slower)" if first.slow else ""
    return (
        f"{formatting.count(first.workers, 'worker')}{slow}, {formatting.size(first.parameter_bytes)} of parameters, "
        f"{formatting.count(first.steps, 'step')} of {formatting.duration(first.compute_s)} each, seed {first.seed}"
    )


def as_table(outcomes: Sequence[SimulationResult]) -> RenderableType:
    """Return the outcomes for the terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in _HEADINGS:
        table.add_column(heading, header_style="dim", justify="right" if heading in _NUMBER_COLUMNS else "left")
    for row in _rows(outcomes):
        table.add_row(*map(Text, row))
    notes = Text("\n".join(_sentences(outcomes)), style="dim")
    return Group(Text.assemble(("Simulated  ", "bold"), _headline(outcomes)), Padding(table, (1, 0, 1, 2)), notes)


def as_page(outcomes: Sequence[SimulationResult]) -> str:
    """Return the outcomes as a page: charts of loss and staleness, and a table."""
    several = len({one.scenario.servers for one in outcomes}) > 1
    names = [f"{_name(one)}, {one.scenario.servers} srv." if several else _name(one) for one in outcomes]
    losses = {name: one.losses for name, one in zip(names, outcomes, strict=True)}
    stale = {
        name: [(float(age), share) for age, share in _cumulated(one.staleness)] if one.staleness.mean else []
        for name, one in zip(names, outcomes, strict=True)
    }
    body = render_template(
        "tables.html.j2",
        headline=f"Simulated: {_headline(outcomes)}",
        charts=[
            ("Loss of the stand-in problem", _drawn("loss by virtual time", losses, "virtual seconds", log=True)),
            (
                "Share of pushes that were no staler",
                _drawn("staleness", stale, "staleness, in updates for async, else in steps", log=False),
            ),
        ],
        tables=[("Figures", _HEADINGS, _rows(outcomes))],
        numbers=_NUMBER_COLUMNS,
        sentences=_sentences(outcomes),
    )
    return render_page("trainwright simulate", body)


def _drawn(name: str, curves: dict[str, list[tuple[float, float]]], xlabel: str, *, log: bool) -> Markup:
    return Markup(curves_chart(name, curves, xlabel, log=log) if any(curves.values()) else "")
