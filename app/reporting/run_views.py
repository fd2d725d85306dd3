"""The views of the commands `runs`, `show` and `logs`, read from storage alone: without Ray and without frameworks.

Each view is a rich renderable with its content as JSON-able `data`. The keys are stable: keys may be added, none is
removed. Times are seconds since the epoch, sizes bytes, durations seconds; unknown values are null.

`runs_view`: a list of {name, state, step, total_steps, loss, metrics, changed_s}.

`run_view`: {name, uri, state, remedy, error, step, total_steps, epoch, epochs, loss, metrics, samples_per_s,
mfu, wait_share, reason, best: {text, goal, step, metrics}, plan, plan_line, mesh: [{node, ranks, data, stage, shard,
tensor}], nodes: {node: ranks}, others, cluster,
dashboard: {url, job, node}, versions, job, checkpoints: [{step, path, size_bytes}], failures: [{time_s, step, worker,
node, cause}], recoveries: [{time_s, step, source, seconds, steps_lost}], steps_lost, seconds: {wall, computing, data,
start, recovery, checkpoint, evaluation, other}, step_parts: [{name, predicted_s, measured_s, note}], noise_scale:
{step, scale, low, high, batch, count}, noise, staleness: {text, mean, counts, unit, dropped, again}, judged: fields of
`reporting.scorecard.Scorecard`, waiting, memory: [{rank,
predicted_bytes, used_bytes, reserved_bytes}], traces: [{rank, node, first, last, path, size_bytes}], notes, report,
changed_s}.

`log_lines`: one stored event a line: {kind, time_s, ...}, see `trainwright.core.events`. As text, steps of up to 10 s
share a line.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core import formatting
from trainwright.core.errors import escape_control_characters
from trainwright.core.events import Event, RunStarted, Steps, TraceWritten
from trainwright.core.metric_goals import best_text
from trainwright.reporting.device_memory import RankMemory, rank_memory
from trainwright.reporting.event_messages import event_line, failure_text, recovery_text, waiting_text
from trainwright.reporting.plan_view import (
    SHOWN_ROWS,
    MeshTable,
    facts_table,
    mesh_table,
    mesh_text,
    other_rows,
    plan_from,
    plan_line,
)
from trainwright.reporting.run_history import (
    TIME_LABELS,
    HistoryReader,
    RunHistory,
    StepPart,
    noise_text,
    read_history,
    state_of,
    step_parts,
)
from trainwright.reporting.scorecard import Scorecard
from trainwright.storage.event_files import EventReader, read_brief_summary
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_control import check_run, is_run
from trainwright.storage.run_log import LogEntry, RunLog, WaitFunction, owner_alive, owners_alive
from trainwright.storage.run_summary import RunState, RunSummary, epoch_of, staleness_of, staleness_text

_COLOURS: dict[RunState, str] = {
    "running": "cyan", "done": "green", "stopped": "yellow", "failed": "red", "interrupted": "red",
}  # fmt: skip
_REMEDIES: dict[RunState, str] = {
    "interrupted": "the driver is gone: run the same command again, it continues from the newest checkpoint",
    "stopped": "run the same command again, it continues from here",
    "failed": "correct the cause that the error names, then run the command again; --resume if the job changes",
}
_FOLLOW_S, _JOINED_S = 2.0, 10.0
_READERS = 32
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class RunView:
    """Something to print: `data` as JSON, or `content` on a rich console."""

    data: Any
    content: RenderableType

    def __rich__(self) -> RenderableType:
        return self.content


def runs_view(storage: str, *, wait: WaitFunction | None = None) -> RunView:
    """Return all runs under a storage URI, the newest change first. Raises StorageError.

    Args:
        wait: waits for some seconds, to find out which drivers on other machines are alive.
    """
    store = open_store(storage)
    with ThreadPoolExecutor(_READERS) as pool:
        found = [row for row in pool.map(partial(_look, store), store.folders()) if row is not None]
    alive = owners_alive(store, {name: head for name, head, _ in found}, wait=wait)
    rows = [
        _summary(
            escape_control_characters(name), RunHistory(summary=summary, state=state_of(summary, head, name in alive))
        )
        for name, head, summary in found
    ]
    rows.sort(key=lambda row: -row["changed_s"])
    return RunView(data=rows, content=_runs_table(rows) if rows else Text(f"no runs in {store.uri_of('')}"))


def _look(store: Store, name: str) -> tuple[str, LogEntry, RunSummary] | None:
    """Return a run with its newest log entry and brief summary; None for a folder that is not a run."""
    head = RunLog(store, name).head() if is_run(store, name) else None
    return None if head is None else (name, head, read_brief_summary(store, name).brief)


def run_view(storage: str, run: str) -> RunView:
    """Return the view of one run. Raises StorageError, also where there is no such run."""
    store = open_store(storage)
    check_run(store, run)
    return _view_of(store, run, read_history(store, run))


def _view_of(store: Store, run: str, history: RunHistory) -> RunView:
    data = run_details(store, run, history)
    return RunView(data=data, content=_show_page(data, history))


def watch_run(
    storage: str, run: str, show: Callable[[RenderableType], object], *, wait: WaitFunction | None = None
) -> None:
    """Show the view of a run again and again, until the run has ended. Raises StorageError."""
    pause, store = wait or threading.Event().wait, open_store(storage)
    check_run(store, run)
    reader = HistoryReader(store, run)
    while True:
        history = reader.read()
        show(_view_of(store, run, history).content)
        if history.state != "running":
            return
        pause(_FOLLOW_S)


def log_lines(
    storage: str,
    run: str,
    *,
    follow: bool = False,
    as_json: bool = False,
    wait: WaitFunction | None = None,
) -> Iterator[str]:
    """Yield one line for each event of a run; with `follow` until the run ends or its driver is gone.

    Args:
        as_json: yield events as stored, as JSON.
        wait: waits for some seconds before storage is read again.

    Raises:
        StorageError: there is no such run, or the store cannot be read.
    """
    store = open_store(storage)
    check_run(store, run)
    return _lines(store, run, follow=follow, as_json=as_json, wait=wait or threading.Event().wait)


def _lines(store: Store, run: str, *, follow: bool, as_json: bool, wait: WaitFunction) -> Iterator[str]:
    reader, log, per_epoch = EventReader(store, run), RunLog(store, run), 0
    while True:
        # Checked before reading, so that the last events of a driver that ends in between are read too.
        alive = follow and owner_alive(store, run, log.head())
        for event in reader.read() if as_json else _with_joined_steps(reader.read()):
            per_epoch = event.steps_per_epoch if isinstance(event, RunStarted) else per_epoch
            yield event.to_json() if as_json else _log_text(event, per_epoch)
        if not alive:
            return
        wait(_FOLLOW_S)


def _with_joined_steps(stored: Iterable[Event]) -> Iterator[Event]:
    """Yield events with `Steps` that follow each other as one, for at most 10 s: a driver stores several a second."""
    held: list[Steps] = []
    for event in stored:
        joins = isinstance(event, Steps) and bool(event.step)
        if held and not (joins and event.time_s - held[0].time_s < _JOINED_S):
            yield _joined(held)
            held = []
        if isinstance(event, Steps) and joins:
            held.append(event)
        else:
            yield event
    if held:
        yield _joined(held)


def _joined(parts: list[Steps]) -> Steps:
    columns = {
        name: [value for part in parts for value in getattr(part, name)]
        for name in ("step", "loss", "samples", "step_s", "wait_s")  # those that a line shows
    }
    return replace(parts[-1], **columns)  # type: ignore[arg-type]


def _log_text(event: Event, steps_per_epoch: int) -> str:
    line = event_line(event, steps_per_epoch)
    detail = "".join(f"\n    {row}" for row in line.detail.rstrip().splitlines())
    return f"{formatting.timestamp(event.time_s)}  {line.text}{detail}"


def _plain(value: Any) -> Any:
    """Return the value with None for NaN, at any depth."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return formatting.finite(value) if isinstance(value, float) else value


def _summary(name: str, history: RunHistory) -> dict[str, Any]:
    summary = history.summary
    return {
        "name": name,
        "state": history.state,
        "step": summary.step,
        "total_steps": summary.start.total_steps,
        "loss": formatting.finite(history.loss),
        "metrics": {name: formatting.finite(value) for name, value in history.metrics.items()},
        "changed_s": summary.last_s,
    }


def run_details(store: Store, run: str, history: RunHistory) -> dict[str, Any]:
    """Return what `run_view` has as `data`. Raises StorageError."""
    summary, start = history.summary, history.summary.start
    plan, report = plan_from(start.plan), f"{run}/report.html"
    mesh = mesh_table(plan, summary.nodes) if plan else None
    return {
        **_summary(run, history),
        "uri": store.uri_of(run),
        "remedy": _REMEDIES.get(history.state, ""),
        "error": history.error,
        "reason": history.reason,
        "best": _best(history),
        "epoch": epoch_of(summary.step, start.steps_per_epoch),
        "epochs": epoch_of(start.total_steps, start.steps_per_epoch),
        "samples_per_s": formatting.finite(history.samples_per_s),
        "mfu": formatting.finite(history.mfu),
        "wait_share": formatting.finite(history.wait_share),
        "plan": start.plan,
        "plan_line": plan_line(plan) if plan else "",
        "mesh": [dict(zip(mesh.columns, row, strict=True)) for row in mesh.rows] if mesh else [],
        "nodes": dict(summary.nodes),
        "others": start.rejected,
        "cluster": start.cluster,
        "dashboard": start.dashboard or None,
        "versions": start.versions,
        "job": start.shown_job,
        "checkpoints": _checkpoints(store, run),
        "failures": [
            {"time_s": f.time_s, "step": f.step, "worker": f.worker, "node": f.node, "cause": f.cause}
            for f in summary.failures
        ],
        "recoveries": [
            {
                "time_s": recovery.formed.time_s,
                "step": recovery.formed.step,
                "cause": recovery.failure.cause if recovery.failure else "",
                "source": recovery.formed.source,
                "seconds": recovery.formed.seconds,
                "steps_lost": recovery.formed.steps_lost,
            }
            for recovery in summary.recoveries
        ],
        "goodput": formatting.finite(history.totals.goodput),
        "steps_lost": summary.steps_lost,
        "seconds": {name.removesuffix("_s"): value for name, value in asdict(history.totals).items()},
        "step_parts": [asdict(row) for row in step_parts(history, plan)],
        "noise_scale": {"step": history.noise[0], **asdict(history.noise[1])} if history.noise else None,
        "noise": noise_text(history, plan),
        "staleness": _staleness(history),
        "judged": _plain(summary.judged.verdict) if summary.judged else None,
        "waiting": waiting_text(summary.waiting) if summary.waiting and history.state == "running" else "",
        "memory": [asdict(each) for each in rank_memory(plan, summary.memory)],
        "traces": [_trace(trace) for trace in summary.traces.values()],
        "notes": [note.text for note in summary.notes],
        "report": store.uri_of(report) if store.exists(report) else None,
    }


def _best(history: RunHistory) -> dict[str, Any] | None:
    """Return the best evaluation of a run with `best=`; None without one."""
    if history.best is None:
        return None
    goal, best = history.best
    return {"text": best_text(goal, best), "goal": goal, "step": best.step, "metrics": _plain(best.metrics)}


def _trace(trace: TraceWritten) -> dict[str, Any]:
    return {name: getattr(trace, name) for name in ("rank", "node", "first", "last", "path", "size_bytes")}


def _staleness(history: RunHistory) -> dict[str, Any] | None:
    """Return the staleness of asynchronous workers; None for synchronous ones."""
    found = staleness_of(history.summary.stale)
    if not found.counts:
        return None
    return {"text": staleness_text(found), "mean": found.mean, **asdict(found)}


def _checkpoints(store: Store, run: str) -> list[dict[str, Any]]:
    """Return the checkpoints that the run log names and that have files, with the size of all their files."""
    head, sizes = RunLog(store, run).head(), Counter[str]()
    for path, size_bytes in store.list(f"{run}/checkpoints"):
        sizes["/".join(path.removeprefix(f"{run}/").split("/")[:2])] += size_bytes
    return [
        {"step": item.step, "path": escape_control_characters(item.path), "size_bytes": sizes[item.path]}
        for item in (head.checkpoints if head else ())
        if item.path in sizes
    ]


def _runs_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("run", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("step", no_wrap=True, justify="right")
    table.add_column("loss", no_wrap=True, justify="right")
    table.add_column("metrics", overflow="fold")
    table.add_column("changed", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(row["name"], style="bold"),
            Text(row["state"], style=_COLOURS[row["state"]]),
            f"{row['step']:,}/{row['total_steps']:,}",
            _figure(row["loss"]),
            Text(formatting.metrics(row["metrics"])),
            formatting.timestamp(row["changed_s"]),
        )
    return table


def _show_page(data: dict[str, Any], history: RunHistory) -> RenderableType:
    head = Text.assemble((data["name"], "bold"), "  ", (data["state"], f"bold {_COLOURS[history.state]}"))
    parts: list[RenderableType] = [head]
    if data["remedy"]:
        parts.append(Text(f"-> {data['remedy']}", style="yellow"))
    if data["error"] and data["state"] == "failed":
        parts.append(Padding(Text(data["error"], style="red"), (1, 0, 0, 2)))
    parts.append(Padding(facts_table(_facts(data, history)), (1, 0, 0, 2)))
    if data["mesh"]:
        columns, rows = tuple(data["mesh"][0]), tuple(tuple(row.values()) for row in data["mesh"])
        table = mesh_text(MeshTable(columns=columns, rows=rows))
        parts += [Text("\nRanks", style="bold"), Padding(table, (0, 0, 0, 2))]
    if data["step_parts"]:
        parts += [Text("\nStep: predicted and measured", style="bold"), Padding(_step_table(data), (0, 0, 0, 2))]
    for title, lines in _lists(data, history):
        if lines:
            parts += [Text(f"\n{title}", style="bold"), *(Text(f"  {line}") for line in lines)]
    return Group(*parts)


def _facts(data: dict[str, Any], history: RunHistory) -> list[tuple[str, str]]:
    seconds = data["seconds"]
    spent = ", ".join(
        f"{TIME_LABELS[name]} {formatting.duration(value)}"
        for name, value in seconds.items()
        if name != "wall" and value
    )
    rows = [
        ("plan", data["plan_line"]),
        ("cluster", data["cluster"]),
        ("progress", f"step {data['step']:,}/{data['total_steps']:,}, epoch {data['epoch']}/{data['epochs']}"),
        ("waiting", data["waiting"]),
        ("loss", f"{_figure(data['loss'])}  {formatting.sparkline([record.loss for record in history.records])}"),
        ("metrics", formatting.metrics(data["metrics"])),
        ("best", (data["best"] or {}).get("text", "")),
        ("ended", data["reason"]),
        ("speed", _speed(data)),
        ("time", f"{formatting.duration(seconds['wall'])}: {spent}" if spent else ""),
        ("noise scale", data["noise"]),
        ("staleness", (data["staleness"] or {}).get("text", "")),
        ("recoveries", f"{len(data['recoveries'])}, {formatting.count(data['steps_lost'], 'step')} lost"),
        ("folder", data["uri"]),
        ("report", data["report"] or ""),
        ("dashboard", dashboard_text(data["dashboard"] or {})),
    ]
    return [(name, value) for name, value in rows if value]


def dashboard_text(facts: Mapping[str, str]) -> str:
    """Return the dashboard's address as one line; empty where there is no dashboard.

    `http://127.0.0.1:8265/#/jobs/01000000 on 10.0.0.5 (from elsewhere: ray dashboard cluster.yaml, or ssh -L ...)`.
    """
    if not facts:
        return ""
    parts = urlsplit(facts["url"])
    if parts.hostname not in _LOOPBACK:
        return facts["url"]
    tunnel = f"ssh -L {parts.port}:127.0.0.1:{parts.port} {facts['node']}"
    return f"{facts['url']} on {facts['node']} (from elsewhere: ray dashboard cluster.yaml, or {tunnel})"


def _lists(data: dict[str, Any], history: RunHistory) -> list[tuple[str, list[str]]]:
    summary = history.summary
    incidents = [(failure.time_s, failure_text(failure)) for failure in summary.failures]
    traces = [*summary.traces.values()]
    incidents += [(recovery.formed.time_s, recovery_text(recovery.formed)) for recovery in summary.recoveries]
    judged = Scorecard.read(summary.judged.verdict) if summary.judged else None
    return [
        ("Students compared with their teachers", str(judged).splitlines() if judged else []),
        (
            "Checkpoints",
            [f"step {c['step']:,}  {formatting.size(c['size_bytes'])}  {c['path']}" for c in data["checkpoints"]],
        ),
        ("Failures and recoveries", [f"{formatting.timestamp(time_s)}  {text}" for time_s, text in sorted(incidents)]),
        ("Peak memory of devices", [RankMemory(**each).text for each in data["memory"][:SHOWN_ROWS]]),
        ("Traces of steps", [*(trace.text for trace in traces), *dict.fromkeys(trace.viewer for trace in traces)]),
        ("Notes", data["notes"]),
        ("Plans not chosen", [f"{name} ({verdict}): {why}" for name, verdict, why in other_rows(data["others"])]),
    ]


def _step_table(data: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for name in ("part", "predicted", "measured", "ratio", ""):
        table.add_column(name, justify="right" if name in ("predicted", "measured", "ratio") else "left")
    for part in data["step_parts"]:
        table.add_row(*map(Text, StepPart(**part).cells()))
    return table


def _figure(value: float | None) -> str:
    return formatting.metric(value) if value is not None else "-"


def _speed(data: dict[str, Any]) -> str:
    if data["samples_per_s"] is None:
        return ""
    waited = data["wait_share"]
    waiting = f", waiting for data {formatting.percent(waited)}" if waited is not None else ""
    mfu = f", MFU {formatting.percent(data['mfu'])}" if data["mfu"] is not None else ""
    return formatting.throughput(data["samples_per_s"]) + mfu + waiting
