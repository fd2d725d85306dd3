"""What a doctor says: as a table, as HTML, as JSON-able data.

Keys: {subject, verdict, counts: {bad, doubtful, good}, findings: [{subject, verdict, what, where, remedy}], notes}.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core.finding import Finding, Verdict
from trainwright.reporting import formatting

_ORDER: tuple[Verdict, ...] = ("bad", "doubtful", "good")
_COLOURS: dict[Verdict, str] = {"bad": "bold red", "doubtful": "yellow", "good": "green"}
_NUMBERS = re.compile(r"\d[\d.,e+-]*")
_WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class Line:
    """Findings that are shown as one, and the places where they were made."""

    finding: Finding
    places: tuple[str, ...]
    alike: bool = False

    @property
    def where(self) -> str:
        """All places by name; of good findings, of which there may be many, their number."""
        if self.finding.verdict == "good" and len(self.places) > 1:
            return formatting.count(len(self.places), "node")
        return ", ".join(self.places)

    @property
    def what(self) -> str:
        """Of the first; others differ in their figures alone."""
        return f"{self.finding.what} (others alike)" if self.alike else self.finding.what


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings, and the verdict over them; prints as a table.

    Attributes:
        subject: what was looked at.
        notes: what was not looked at, and how to have it looked at.
    """

    subject: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst of all findings."""
        return next((verdict for verdict in _ORDER if self.count(verdict)), "good")

    def count(self, verdict: Verdict) -> int:
        """How many findings came to this."""
        return sum(finding.verdict == verdict for finding in self.findings)

    @property
    def sentence(self) -> str:
        """`this machine: 1 bad, 2 doubtful, 9 good`."""
        counts = ", ".join(f"{self.count(verdict)} {verdict}" for verdict in _ORDER if self.count(verdict))
        return f"{self.subject}: {counts or 'nothing was looked at'}"

    def data(self) -> dict[str, Any]:
        """As JSON has it; every finding, none grouped."""
        return {
            "subject": self.subject,
            "verdict": self.verdict,
            "counts": {verdict: self.count(verdict) for verdict in _ORDER},
            "findings": [asdict(finding) for finding in self.findings],
            "notes": list(self.notes),
        }

    def __rich__(self) -> RenderableType:
        return _table(self)

    def __repr__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=_WIDTH, color_system=None, force_terminal=False, force_jupyter=False)
        console.print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _repr_html_(self) -> str:
        rows = "".join(_html_row(line) for line in grouped(self.findings))
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<p><b>{escape(self.sentence)}</b></p><table>{rows}</table>{notes}"


def grouped(findings: Iterable[Finding]) -> tuple[Line, ...]:
    """The worst first, and findings that say the same in several places as one.

    Good ones are the same too where they differ in their figures alone; others only where every letter is.
    """
    found: dict[tuple[str, ...], list[Finding]] = {}
    for each in sorted(findings, key=lambda finding: _ORDER.index(finding.verdict)):
        good = each.verdict == "good" and bool(each.where)
        what = _NUMBERS.sub("#", each.what) if good else each.what
        key = (each.verdict, each.subject, what, each.remedy, "" if each.where else "here")
        found.setdefault(key, []).append(each)
    return tuple(
        Line(
            finding=same[0],
            places=tuple(dict.fromkeys(each.where for each in same if each.where)),
            alike=len({each.what for each in same}) > 1,
        )
        for same in found.values()
    )


def _table(diagnosis: Diagnosis) -> RenderableType:
    lines = grouped(diagnosis.findings)
    placed = any(line.where for line in lines)
    table = Table.grid(padding=(0, 2))
    for width in ("verdict", "subject", *(["where"] if placed else [])):
        table.add_column(no_wrap=width != "where", max_width=34 if width == "where" else None, overflow="fold")
    table.add_column(overflow="fold")
    for line in lines:
        finding = line.finding
        what = Text(line.what)
        if finding.remedy:
            what.append(f"\n-> {finding.remedy}", style="cyan")
        where = [Text(line.where, style="dim")] if placed else []
        table.add_row(Text(finding.verdict, style=_COLOURS[finding.verdict]), Text(finding.subject), *where, what)
    head = Text(diagnosis.sentence, style=_COLOURS[diagnosis.verdict])
    parts: list[RenderableType] = [head, Padding(table, (1, 0, 0, 2))]
    parts += [Text(f"\n{note}", style="dim") for note in diagnosis.notes]
    return Group(*parts)


def _html_row(line: Line) -> str:
    finding = line.finding
    remedy = f"<br>→ {escape(finding.remedy)}" if finding.remedy else ""
    cells = (escape(finding.verdict), escape(finding.subject), escape(line.where), escape(line.what) + remedy)
    return "<tr>" + "".join(f'<td style="text-align:left;vertical-align:top">{cell}</td>' for cell in cells) + "</tr>"
