"""Traces of chosen steps: the ranks record them while they step, and write them to the store while steps go on.

A segment ends with the last of the chosen steps. Then each rank that has recorded some is asked for its trace. Nothing
waits for the answers but the end of the run. A trace never ends a run: one that is lost or cannot be written is
reported.
"""

from __future__ import annotations

from trainwright.core.events import Noted, TraceWritten
from trainwright.driver import messages as m
from trainwright.driver.driver_state import Transition

_END_DEADLINE_S = 120.0  # for traces that are missing when the run ends


def on_state_restored(turn: Transition, step: int) -> None:
    """Say which of the chosen steps are not recorded: those already taken, or never, or cut off by a failure."""
    steps, length, high = turn.settings.length.profile, turn.settings.length, turn.state.position.high
    first_time = not turn.state.traces.restored
    turn.change(restored=True)
    if not steps:
        return
    first, last = max(steps[0], step + 1), min(steps[-1], length.total_steps)
    if not first_time:
        if steps[0] <= high < last and step < last:
            cut = f"the traces of steps {steps[0]} to {high} were dropped, because a failure cut them off"
            turn.emit(Noted(text=f"{cut}; steps {first} to {last} are traced from here on"))
    elif first > last:
        where = f"has {length.total_steps} steps" if steps[0] > length.total_steps else f"is at step {step} already"
        turn.emit(Noted(text=f"profile={_as_given(steps)}: nothing is traced, because the run {where}"))
    elif (first, last) != (steps[0], steps[-1]):
        text = f"only steps {first} to {last} are traced: the others are not taken by this run, or were taken before"
        turn.emit(Noted(text=f"profile={_as_given(steps)}: {text}"))


def on_run_returned(turn: Transition, event: m.CallReturned) -> None:
    """Ask a rank that has recorded steps to write its trace."""
    report: m.SegmentReport = event.value
    rank = turn.state.membership.rank_of[event.worker]
    if report.untraced:
        turn.emit(Noted(text=f"rank {rank} wrote no trace: {report.untraced}"))
    if report.traced:
        tracing = turn.state.traces.tracing  # one of earlier steps may still be on its way
        turn.change(tracing=tracing.put(event.worker, (*tracing.get(event.worker, ()), rank)))
        turn.call([event.worker], "trace", rank)


def on_trace_returned(turn: Transition, event: m.CallReturned) -> None:
    """Report a trace that is in the store."""
    trace: m.StoredTrace = event.value
    rank, node = _settle(turn, event.worker)
    turn.emit(
        TraceWritten(
            rank=rank, node=node, first=trace.steps[0], last=trace.steps[-1], path=trace.path,
            size_bytes=trace.size_bytes,
        )
    )  # fmt: skip


def on_trace_raised(turn: Transition, event: m.CallRaised) -> None:
    """Report a trace that could not be written."""
    rank, _ = _settle(turn, event.worker)
    turn.emit(Noted(text=f"the trace of rank {rank} was dropped: {event.failure.error.summary}"))


def drop_workers(turn: Transition, workers: frozenset[int], why: str) -> None:
    """Give up the traces of these workers."""
    for worker in sorted(workers & {*turn.state.traces.tracing}):
        for _ in turn.state.traces.tracing[worker]:
            rank, _ = _settle(turn, worker)
            turn.emit(Noted(text=f"the trace of rank {rank} was dropped: {why}"))


def delays_end(turn: Transition) -> bool:
    """Whether the end of the run waits for traces; it does so for a bounded time."""
    waits = bool(turn.state.traces.tracing)
    if waits and "trace" not in turn.state.timers:
        turn.arm("trace", _END_DEADLINE_S)
    return waits


def on_end_deadline(turn: Transition) -> None:
    """End the run without the missing traces."""
    drop_workers(turn, frozenset(turn.state.traces.tracing), f"it was not written within {_END_DEADLINE_S:g} s")


def _as_given(steps: range) -> str:
    """Return a range of steps as users give it: `20:25`."""
    return f"{steps.start}:{steps.stop}"


def _settle(turn: Transition, worker: int) -> tuple[int, str]:
    """Forget the oldest trace that a worker owes; return the rank that it recorded and its node."""
    tracing, members = turn.state.traces.tracing, turn.state.membership.members
    rank, *later = tracing[worker]
    turn.change(tracing=tracing.put(worker, tuple(later)) if later else tracing.without({worker}))
    node = next((member.node for member in members if member.worker == worker), "")
    return rank, node
