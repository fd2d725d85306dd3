"""Diagnose this machine, the connected cluster or a cluster file, and show the findings.

Keys of the JSON: {subject, verdict, counts: {bad, doubtful, good}, findings: [{subject, verdict, what, where,
remedy}], notes}.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core import formatting
from trainwright.core.errors import Finding, JobError, ResourceError, Severity
from trainwright.diagnostics.cluster_probe import check_cluster, probe_cluster
from trainwright.diagnostics.machine_checks import check_machine
from trainwright.diagnostics.machine_probe import ProbeOptions, dataset_paths, probe_machine
from trainwright.storage.object_store import canonical_uri

_CLUSTER_FILE_SUFFIXES = (".yaml", ".yml", ".sbatch")
_CONNECT_S = 5.0
_NO_STORAGE = "No storage was tried: name one with --storage URI, or a job with --job FILE.py."


def probe_options(storage: str, job: Any, *, imports: bool, deadline_s: float) -> ProbeOptions:
    """Return what to probe: a storage by its URI or that of a job, and the paths of the job's data."""
    uri = storage or (job.storage if job is not None else "")
    paths = dict.fromkeys((*dataset_paths(job.train), *dataset_paths(job.evaluate))) if job is not None else ()
    return ProbeOptions(
        storage=canonical_uri(uri) if uri else "", data_paths=tuple(paths), imports=imports, deadline_s=deadline_s
    )


def diagnose_file(path: str) -> Diagnosis:
    """Check a cluster file. Raises JobError for files of other kinds."""
    if not path.endswith(_CLUSTER_FILE_SUFFIXES):
        suffixes = ", ".join(_CLUSTER_FILE_SUFFIXES)
        raise JobError([f"{path} is not a cluster file ({suffixes}); to check a job: trainwright doctor --job {path}"])
    from trainwright.cluster_files.validation import check

    return Diagnosis(subject=path, findings=tuple(check(path)))


def diagnose(options: ProbeOptions, address: str = "") -> Diagnosis:
    """Diagnose the named or connected cluster; without one, or if it is unreachable, this machine."""
    address = address or os.environ.get("RAY_ADDRESS", "")
    notes = () if options.storage else (_NO_STORAGE,)
    if address in ("", "local") and not _is_connected():
        return replace(_diagnose_machine(options), notes=notes)
    try:
        started = _connect(address)
    except ResourceError as error:
        fault = Finding(subject="Ray", verdict="bad", what=error.what, where=error.where, remedy=error.remedy)
        alone = _diagnose_machine(options)
        return replace(alone, findings=(fault, *alone.findings), notes=notes)
    try:
        return replace(_diagnose_cluster(options), notes=notes)
    finally:
        if started:
            import ray

            ray.shutdown()


def _diagnose_machine(options: ProbeOptions) -> Diagnosis:
    return Diagnosis(subject="this machine", findings=tuple(check_machine(probe_machine(options))))


def _diagnose_cluster(options: ProbeOptions) -> Diagnosis:
    cluster = probe_cluster(options)
    each = [
        finding
        for name, machine in cluster.machines.items()
        for finding in check_machine(machine, where=name, in_cluster=True)
    ]
    nodes = formatting.count(len(cluster.machines) + len(cluster.unreachable), "node")
    return Diagnosis(subject=f"{nodes} of the cluster", findings=(*check_cluster(cluster), *each))


def _is_connected() -> bool:
    """Return whether this process has called `ray.init`, without importing Ray."""
    ray = sys.modules.get("ray")
    return bool(ray is not None and ray.is_initialized())


def _connect(address: str) -> bool:
    """Connect to a running cluster; return whether this call did it. Raises ResourceError within seconds."""
    if _is_connected():
        return False
    _check_port(address)
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _unreachable(address, lines[0][:200]) from error
    return True


def _check_port(address: str) -> None:
    """Check that a process listens at the address: Ray itself would try for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        if address != "auto":
            raise _unreachable(address, "this is not HOST:PORT")
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        why = (
            f"no answer within {_CONNECT_S:.0f} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
        )
        raise _unreachable(address, why) from error


def _unreachable(address: str, why: str) -> ResourceError:
    return ResourceError(
        f"the cluster cannot be reached: {why}",
        where=address,
        remedy="start it with ray start --head; give HOST:6379 of its head as --address, or unset RAY_ADDRESS",
    )


# --- The diagnosis, and how it is shown -------------------------------------------------------------------------------


_ORDER: tuple[Severity, ...] = ("bad", "doubtful", "good")
_COLOURS: dict[Severity, str] = {"bad": "bold red", "doubtful": "yellow", "good": "green"}
_NUMBERS = re.compile(r"\d[\d.,e+-]*")
_WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class _FindingGroup:
    """Findings that are shown as one, with their places."""

    finding: Finding
    places: tuple[str, ...]
    alike: bool = False

    @property
    def where(self) -> str:
        """Return all places by name; for good findings in several places their number."""
        if self.finding.verdict == "good" and len(self.places) > 1:
            return formatting.count(len(self.places), "node")
        return ", ".join(self.places)

    @property
    def what(self) -> str:
        """Return the text of the first finding; the others may differ in figures."""
        return f"{self.finding.what} (others alike)" if self.alike else self.finding.what


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings about a machine, a cluster or a file; prints as a table."""

    subject: str
    findings: tuple[Finding, ...]  # in order of the checks
    notes: tuple[str, ...] = ()  # what was not checked, and how to check it

    @property
    def verdict(self) -> Severity:
        """Return the worst severity of the findings."""
        return next((verdict for verdict in _ORDER if self.count(verdict)), "good")

    def count(self, verdict: Severity) -> int:
        """Return the number of findings of a severity."""
        return sum(finding.verdict == verdict for finding in self.findings)

    @property
    def sentence(self) -> str:
        """Return a summary such as `this machine: 1 bad, 2 doubtful, 9 good`."""
        counts = ", ".join(f"{self.count(verdict)} {verdict}" for verdict in _ORDER if self.count(verdict))
        return f"{self.subject}: {counts or 'nothing was checked'}"

    def data(self) -> dict[str, Any]:
        """Return the diagnosis as data for JSON, with each finding."""
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
        return formatting.plain_text(self, _WIDTH)

    def _repr_html_(self) -> str:
        rows = "".join(_html_row(line) for line in group_findings(self.findings))
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<p><b>{escape(self.sentence)}</b></p><table>{rows}</table>{notes}"


def group_findings(findings: Iterable[Finding]) -> tuple[_FindingGroup, ...]:
    """Group equal findings of several places, worst first.

    Good findings count as equal if they differ in figures only; others only if the whole text is equal.
    """
    found: dict[tuple[str, ...], list[Finding]] = {}
    for each in sorted(findings, key=lambda finding: _ORDER.index(finding.verdict)):
        good = each.verdict == "good" and bool(each.where)
        what = _NUMBERS.sub("#", each.what) if good else each.what
        key = (each.verdict, each.subject, what, each.remedy, "" if each.where else "here")
        found.setdefault(key, []).append(each)
    return tuple(
        _FindingGroup(
            finding=same[0],
            places=tuple(dict.fromkeys(each.where for each in same if each.where)),
            alike=len({each.what for each in same}) > 1,
        )
        for same in found.values()
    )


def _table(diagnosis: Diagnosis) -> RenderableType:
    lines = group_findings(diagnosis.findings)
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


def _html_row(line: _FindingGroup) -> str:
    finding = line.finding
    remedy = f"<br>→ {escape(finding.remedy)}" if finding.remedy else ""
    cells = (escape(finding.verdict), escape(finding.subject), escape(line.where), escape(line.what) + remedy)
    return "<tr>" + "".join(f'<td style="text-align:left;vertical-align:top">{cell}</td>' for cell in cells) + "</tr>"
