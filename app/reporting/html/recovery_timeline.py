"""Recoveries of a run on wall time: when a worker failed, when that was detected, who joined, when steps went on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from trainwright.core import formatting
from trainwright.core.events import Failed, Formed, Placed, Promoted
from trainwright.reporting.event_messages import failed_rank_text, lost_text, source_text
from trainwright.reporting.run_history import RunHistory
from trainwright.storage.run_summary import RecoveryRecord

_MOST_SHOWN, _MOST_ARRIVALS = 20, 4


class Milestone(NamedTuple):
    """A moment of a recovery.

    Attributes:
        after_s: seconds since the failure was detected; negative before.
        colour: of the time before it.
    """

    after_s: float
    name: str
    text: str
    colour: str


class BarSegment(NamedTuple):
    """The time between two moments, in per cent of the whole picture."""

    left: float
    width: float
    colour: str
    text: str
    label: str = ""  # drawn into it, where there is room


class RecoveryPicture(NamedTuple):
    """One recovery, as it is drawn. `ended` is False while it lasts."""

    title: str
    summary: str
    milestones: list[Milestone]
    segments: list[BarSegment]
    ended: bool


def recoveries(history: RunHistory, now_s: float) -> list[RecoveryPicture]:
    """Return the newest recoveries, the newest first; the one that lasts is drawn up to `now_s`."""
    summary = history.summary
    shown = [_recovery(record, record.failure) for record in reversed(summary.recoveries[-_MOST_SHOWN:])]
    if summary.cause is not None:
        arrivals = tuple(summary.arrivals)
        record = RecoveryRecord(formed=Formed(), arrivals=arrivals, last_step_s=summary.last_step_s)
        end_s = now_s if history.state == "running" else summary.last_s
        shown.insert(0, _recovery(record, summary.cause, end_s, history.state == "running"))
    return shown


def wall_s(history: RunHistory, now_s: float) -> float:
    """Return the seconds from the first driver's start to the end, or to now."""
    sessions = history.summary.time.sessions
    ends = [each.ended_s for each in sessions] + ([now_s] if history.state == "running" else [])
    return max(ends) - sessions[0].started_s if sessions else 0.0


def run_segments(history: RunHistory, now_s: float) -> list[BarSegment]:
    """Return the whole run in per cent of its wall time: sessions of drivers, and the recoveries within them."""
    sessions, running = history.summary.time.sessions, history.state == "running"
    if not sessions:
        return []
    begin_s = sessions[0].started_s
    whole_s = max(wall_s(history, now_s), 1e-9)
    end_s = begin_s + whole_s

    def segment(start_s: float, stop_s: float, colour: str, text: str) -> BarSegment:
        return BarSegment(100 * (start_s - begin_s) / whole_s, 100 * (stop_s - start_s) / whole_s, colour, text)

    found = []
    for number, session in enumerate(sessions, 1):
        stop_s = end_s if running and session is sessions[-1] else session.ended_s
        text = f"session {number}: {formatting.duration(stop_s - session.started_s)}"
        found.append(segment(session.started_s, stop_s, "series-1", text))
    for record in history.summary.recoveries:
        stop_s = max(record.first_step_s, record.formed.time_s)
        start_s = record.formed.time_s - record.formed.seconds
        text = f"{_title(record.failure, record.formed.step)}: {formatting.duration(stop_s - start_s)}"
        found.append(segment(start_s, stop_s, "bad", text))
    if history.summary.cause is not None:
        cause = history.summary.cause
        found.append(segment(cause.time_s, max(end_s, cause.time_s), "bad", failed_rank_text(cause)))
    return found


def _recovery(
    record: RecoveryRecord, failure: Failed | None, end_s: float = 0.0, running: bool = True
) -> RecoveryPicture:
    """Return one recovery; with `end_s` it has no rendezvous yet."""
    formed = record.formed
    zero_s = failure.time_s if failure else formed.time_s - formed.seconds
    found = [*_milestones(record, failure, zero_s)]
    if end_s:
        after_s = max(end_s - zero_s, found[-1].after_s)
        last = Milestone(after_s, "recovering" if running else "ended", "no rendezvous yet", "bad")
        found.append(last)
        said = f"{last.name} for {formatting.duration(after_s)}" if running else "the run ended before it recovered"
    else:
        first = f", first step after {formatting.duration(found[-1].after_s)}" if record.first_step_s else ""
        said = f"back after {formatting.duration(formed.seconds)}{first}, {lost_text(formed)}"
    first_s, last_s = found[0].after_s, found[-1].after_s
    whole_s = max(last_s - first_s, 1e-9)
    segments = []
    for before, after in pairwise(found):
        seconds, width = after.after_s - before.after_s, 100 * (after.after_s - before.after_s) / whole_s
        text = f"{before.name} to {after.name}: {formatting.duration(seconds)}"
        label = formatting.duration(seconds) if width >= 14 else ""
        segments.append(BarSegment(100 * (before.after_s - first_s) / whole_s, width, after.colour, text, label))
    return RecoveryPicture(_title(failure, formed.step), said, found, segments, not end_s)


def _milestones(record: RecoveryRecord, failure: Failed | None, zero_s: float) -> Iterator[Milestone]:
    """Yield the moments of a recovery in order of time."""
    if 0 < record.last_step_s < zero_s:
        yield Milestone(
            record.last_step_s - zero_s, "last step", "the last one before the failure that the driver heard of", "soft"
        )
    text = failure.cause if failure else "no cause was reported"
    yield Milestone(0.0, "failure detected", text, "soft")
    for event in _shown_arrivals(record.arrivals):
        yield Milestone(event.time_s - zero_s, *_arrival(event), "series-4")
    formed = record.formed
    if formed.time_s:
        text = f"{formatting.count(formed.workers, 'worker')} at step {formed.step:,}, state from {source_text(formed)}"
        yield Milestone(formed.time_s - zero_s, "resumed", text, "series-3")
    if record.first_step_s:
        text = f"step {formed.step + 1:,} is complete"
        yield Milestone(record.first_step_s - zero_s, "first step", text, "good")


def _shown_arrivals(arrivals: tuple[Placed | Promoted, ...]) -> list[Placed | Promoted]:
    """Return the processes that joined, without new standbys; of many the first and the last ones."""
    joined = [event for event in arrivals if isinstance(event, Promoted) or not event.spare]
    return joined if len(joined) <= _MOST_ARRIVALS else [*joined[: _MOST_ARRIVALS - 1], joined[-1]]


def _arrival(event: Placed | Promoted) -> tuple[str, str]:
    place = f" on {event.node}" if event.node else ""
    if isinstance(event, Promoted):
        return "spare joined", f"worker {event.worker}{place}, a warm standby, takes rank {event.rank}"
    return "worker started", f"worker {event.worker}{place}, a new process"


def _title(failure: Failed | None, step: int) -> str:
    return failed_rank_text(failure) if failure else f"recovery at step {step:,}"
