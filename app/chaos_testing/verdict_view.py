"""A verdict as JSON-able data and for the terminal.

Keys: {job, seed, passed, agrees, verdict, differences, since_step, repeatable, steps, steps_lost, faults: [{fault,
time_s, step, whom, detection_s, recovery_s, steps_lost, source, checkpoints_skipped}], missed, leftovers, changed,
goodput, unbroken_goodput, seconds, unbroken_seconds, kept}. Times are seconds since the epoch, durations seconds; what
is not known is null.
"""

from __future__ import annotations

import math
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.chaos_testing.verdict import Cost, Verdict
from trainwright.reporting import formatting


def as_data(verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON-able data."""
    return {
        "job": verdict.job,
        "seed": verdict.seed,
        "passed": verdict.passed,
        "agrees": verdict.agrees,
        "verdict": verdict.sentence,
        "differences": list(verdict.differences),
        "since_step": verdict.since_step,
        "repeatable": verdict.repeatable,
        "steps": verdict.steps,
        "steps_lost": sum(cost.steps_lost for cost in verdict.costs),
        "faults": [_fault(cost) for cost in verdict.costs],
        "missed": list(verdict.missed),
        "leftovers": list(verdict.leftovers),
        "changed": list(verdict.changed),
        "goodput": _known(verdict.goodput),
        "unbroken_goodput": _known(verdict.unbroken_goodput),
        "seconds": verdict.seconds,
        "unbroken_seconds": verdict.unbroken_seconds,
        "kept": verdict.kept,
    }


def _fault(cost: Cost) -> dict[str, Any]:
    return {
        "fault": cost.given.fault,
        "time_s": cost.given.time_s,
        "step": cost.given.step,
        "whom": list(cost.given.whom),
        "detection_s": cost.detection_s,
        "recovery_s": cost.recovery_s,
        "steps_lost": cost.steps_lost,
        "source": cost.source,
        "checkpoints_skipped": cost.checkpoints_skipped,
    }


def _known(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def as_table(verdict: Verdict) -> RenderableType:
    """The verdict for the terminal."""
    head = Text(verdict.sentence, style="bold green" if verdict.passed else "bold red")
    parts: list[RenderableType] = [head]
    parts += [Text(f"  {line}", style="red") for line in (*verdict.differences, *verdict.leftovers)]
    if verdict.costs:
        parts.append(Padding(_costs(verdict), (1, 0, 0, 2)))
    parts.append(Padding(_facts(verdict), (1, 0, 0, 2)))
    return Group(*parts)


def _costs(verdict: Verdict) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for name in ("fault", "step", "noticed after", "recovery", "steps lost", "state from"):
        right = name in ("step", "noticed after", "recovery", "steps lost")
        table.add_column(name, no_wrap=True, justify="right" if right else "left")
    table.add_column("struck", overflow="fold")
    for cost in verdict.costs:
        table.add_row(
            cost.given.fault, f"{cost.given.step:,}", _seconds(cost.detection_s), _seconds(cost.recovery_s),
            f"{cost.steps_lost:,}", cost.source or "-", Text("\n".join(cost.given.whom)),
        )  # fmt: skip
    return table


def _seconds(seconds: float | None) -> str:
    return formatting.duration(seconds) if seconds is not None else "-"


def _facts(verdict: Verdict) -> Table:
    table = Table.grid(padding=(0, 2))
    skipped = sum(cost.checkpoints_skipped for cost in verdict.costs)
    repeats = {True: "two unbroken runs agree", False: "two unbroken runs differ", None: ""}[verdict.repeatable]
    rows = [
        ("goodput", f"{formatting.share(verdict.goodput)}, unbroken {formatting.share(verdict.unbroken_goodput)}"),
        ("time", f"{formatting.duration(verdict.seconds)}, unbroken {formatting.duration(verdict.unbroken_seconds)}"),
        ("checkpoints", f"{skipped} did not become durable" if skipped else ""),
        ("repeatable", repeats),
        ("not given", ", ".join(verdict.missed)),
        ("changed", f"{', '.join(verdict.changed)} for the run under faults" if verdict.changed else ""),
        ("runs", verdict.kept),
        ("seed", str(verdict.seed)),
    ]
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        if value:
            table.add_row(name, Text(value))
    return table
