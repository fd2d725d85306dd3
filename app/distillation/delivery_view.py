"""What each way to ask the teachers would take, as people read it: a table in the terminal, HTML in notebooks."""

from __future__ import annotations

import io
from html import escape
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.reporting import formatting
from trainwright.reporting.plan_view import plan_html, plan_table
from trainwright.strategies.search.ranking import estimate_of

if TYPE_CHECKING:
    from trainwright.distillation.delivery_choice import Weighed
    from trainwright.distillation.delivery_cost import Cost

HEADINGS = ("way", "samples/s", "first step after", "whole run", "memory", "kept", "why")
_NUMBERS = HEADINGS[1:6]


def way_rows(weighed: Weighed) -> list[tuple[str, ...]]:
    """A row for each way, under `HEADINGS`."""
    return [_row(weighed, cost) for cost in weighed.costs]


def _row(weighed: Weighed, cost: Cost) -> tuple[str, ...]:
    if cost.refused:
        return (cost.way, "-", "-", "-", "-", "-", f"cannot be: {cost.refused}")
    rate = formatting.rate(weighed.batch_size / cost.step_s).removesuffix(" samples/s")
    memory = max(estimate_of(cost.decision.chosen).stage_memory_bytes) if cost.decision else 0
    why = f"chosen; {cost.note}" if cost is weighed.costs[0] else cost.note
    return (
        cost.way, rate, formatting.duration(cost.setup_s), formatting.duration(cost.total_s(weighed.steps)),
        formatting.size(memory), formatting.size(cost.stored_bytes) if cost.stored_bytes else "-", why,
    )  # fmt: skip


def ways_table(weighed: Weighed) -> RenderableType:
    """The ways for the terminal, and the students' plan under the chosen one."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in HEADINGS:
        justify = "right" if heading in _NUMBERS else "left"
        table.add_column(heading, header_style="dim", overflow="fold", justify=justify)  # type: ignore[arg-type]
    for row in way_rows(weighed):
        table.add_row(*map(Text, row))
    head = Text.assemble(("Teachers  ", "bold"), (f"{weighed.chosen}, {weighed.source}", "bold green"))
    return Group(head, Padding(table, (1, 0, 1, 2)), plan_table(weighed.decision))


def ways_text(weighed: Weighed, *, width: int = 110) -> str:
    """The table as plain text without colours."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, force_jupyter=False)
    console.print(ways_table(weighed))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def ways_html(weighed: Weighed) -> str:
    """The same as HTML that inherits the colours of the page around it."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in HEADINGS)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in way_rows(weighed))
    said = escape(f"Teachers: {weighed.chosen}, {weighed.source}")
    ways = f"<div class='tw-plan'><p class='tw-head'>{said}</p><table><tr>{head}</tr>{body}</table></div>"
    return plan_html(weighed.decision) + ways
