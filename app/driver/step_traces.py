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


def on_state_restored(transition: Transition, step: int) -> None:
    """Say which of the chosen steps are not recorded: those already taken, or never, or cut off by a failure."""
    steps, length, high = transition.settings.length.profile, transition.settings.length, transition.state.position.high
    first_time = not transition.state.traces.restored
    transition.change(restored=True)
    if not steps:
        return
    first, last = max(steps[0], step + 1), min(steps[-1], length.total_steps)
    if not first_time:
        if steps[0] <= high < last and step < last:
            cut = f"the traces of steps {steps[0]} to {high} were dropped, because a failure cut them off"
            transition.emit(Noted(text=f"{cut}; steps {first} to {last} are traced from here on"))
    elif first > last:
        where = f"has {length.total_steps} steps" if steps[0] > length.total_steps else f"is at step {step} already"
        transition.emit(Noted(text=f"profile={_as_given(steps)}: nothing is traced, because the run {where}"))
    elif (first, last) != (steps[0], steps[-1]):
        text = f"only steps {first} to {last} are traced: the others are not taken by this run, or were taken before"
        transition.emit(Noted(text=f"profile={_as_given(steps)}: {text}"))


def on_run_returned(transition: Transition, event: m.CallReturned) -> None:
    """Ask a rank that has recorded steps to write its trace."""
    report: m.SegmentReport = event.value
    rank = transition.state.membership.rank_of[event.worker]
    if report.untraced:
        transition.emit(Noted(text=f"rank {rank} wrote no trace: {report.untraced}"))
    if report.traced:
        tracing = transition.state.traces.tracing  # one of earlier steps may still be on its way
        transition.change(tracing=tracing.put(event.worker, (*tracing.get(event.worker, ()), rank)))
        transition.call([event.worker], "trace", rank)


def on_trace_returned(transition: Transition, event: m.CallReturned) -> None:
    """Report a trace that is in the store."""
    trace: m.StoredTrace = event.value
    rank, node = _settle(transition, event.worker)
    transition.emit(
        TraceWritten(
            rank=rank, node=node, first=trace.steps[0], last=trace.steps[-1], path=trace.path,
            size_bytes=trace.size_bytes,
        )
    )  # fmt: skip


def on_trace_raised(transition: Transition, event: m.CallRaised) -> None:
    """Report a trace that could not be written."""
    rank, _ = _settle(transition, event.worker)
    transition.emit(Noted(text=f"the trace of rank {rank} was dropped: {event.failure.error.summary}"))


def drop_workers(transition: Transition, workers: frozenset[int], why: str) -> None:
    """Give up the traces of these workers."""
    for worker in sorted(workers & {*transition.state.traces.tracing}):
        for _ in transition.state.traces.tracing[worker]:
            rank, _ = _settle(transition, worker)
            transition.emit(Noted(text=f"the trace of rank {rank} was dropped: {why}"))


def delays_end(transition: Transition) -> bool:
    """Whether the end of the run waits for traces; it does so for a bounded time."""
    waits = bool(transition.state.traces.tracing)
    if waits and "trace" not in transition.state.timers:
        transition.arm("trace", _END_DEADLINE_S)
    return waits


def on_end_deadline(transition: Transition) -> None:
    """End the run without the missing traces."""
    drop_workers(
        transition, frozenset(transition.state.traces.tracing), f"it was not written within {_END_DEADLINE_S:g} s"
    )


def _as_given(steps: range) -> str:
    """Return a range of steps as users give it: `20:25`."""
    return f"{steps.start}:{steps.stop}"


def _settle(transition: Transition, worker: int) -> tuple[int, str]:
    """Forget the oldest trace that a worker owes; return the rank that it recorded and its node."""
    tracing, members = transition.state.traces.tracing, transition.state.membership.members
    rank, *later = tracing[worker]
    transition.change(tracing=tracing.put(worker, tuple(later)) if later else tracing.without({worker}))
    node = next((member.node for member in members if member.worker == worker), "")
    return rank, node
