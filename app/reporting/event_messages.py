"""Messages for events: the lines of a training run, one line for each event of `logs`, and the progress figures."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from trainwright.core import formatting
from trainwright.core.events import (
    Checkpointed,
    CheckpointSkipped,
    Evaluated,
    Event,
    Failed,
    Formed,
    Joined,
    Judged,
    Kept,
    Leaving,
    Measured,
    MediaLogged,
    MemoryMeasured,
    Noted,
    Placed,
    Prefetched,
    Printed,
    Probed,
    Promoted,
    Replanned,
    Resized,
    RunEnded,
    RunStarted,
    Stacks,
    Stale,
    Steps,
    Straggling,
    TraceWritten,
    Waiting,
)
from trainwright.core.plan import Plan
from trainwright.reporting.device_memory import memory_text
from trainwright.reporting.loss_curve import LossCurve
from trainwright.reporting.plan_view import plan_from
from trainwright.reporting.utilization import UtilizationMeter
from trainwright.storage.run_summary import epoch_of, noise_of, staleness_of, staleness_text

Tone = Literal["plain", "good", "warning", "bad"]
_RECENT = 50  # steps over which throughput and loss are averaged


@dataclass(frozen=True, kw_only=True)
class OutputLine:
    """One line for the user. `detail` follows it indented: a traceback."""

    text: str
    tone: Tone = "plain"
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class ProgressFigures:
    """The figures of the progress bar. NaN where nothing was measured yet in this session."""

    step: int = 0
    total: int = 0
    epoch: int = 1  # from 1 to `epochs`
    epochs: int = 1
    loss: float = math.nan  # mean of the last steps
    samples_per_s: float = math.nan  # of the last steps
    # share of the last steps' time that waited for data, 0 to 1; NaN for asynchronous workers
    wait_share: float = math.nan
    mfu: float = math.nan  # model FLOPs utilization of the last steps, 0 to 1; NaN where it is not known
    left_s: float = math.nan  # remaining time at the rate of this session, with evaluations and checkpoints
    activity: str = ""  # what the run does instead of training steps; empty while it trains
    curve: LossCurve = field(default_factory=LossCurve)  # of this session; it changes with later events

    def text(self) -> str:
        """Return the figures as one line."""
        parts = [f"step {self.step:,}/{self.total:,}", f"epoch {self.epoch}/{self.epochs}"]
        if math.isfinite(self.samples_per_s):
            parts += [f"loss {formatting.metric(self.loss)}", formatting.throughput(self.samples_per_s)]
            parts += (
                [f"waiting for data {formatting.percent(self.wait_share)}"] if math.isfinite(self.wait_share) else []
            )
            parts += [f"MFU {formatting.percent(self.mfu)}"] if math.isfinite(self.mfu) else []
            parts += [f"{formatting.clock_time(self.left_s)} left"]
        return ", ".join(parts + ([self.activity] if self.activity else []))


class EventFormatter:
    """Turns events into lines and progress figures.

    Args:
        verbose: also show checkpoints, processes, and the tracebacks of failures that the run recovered from.
    """

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose
        self._start = RunStarted()
        self._utilization = UtilizationMeter()
        self._plan: Plan | None = None
        self._told_memory = 0
        self._recent: deque[tuple[float, int, float, float]] = deque(maxlen=_RECENT)
        self._formed = self._told_noise = False
        self._step = self._done = self._began = 0
        self._stepping_since_s = self._stepping_s = 0.0
        self._waited_for = self._activity = self._told_traces = self._told_cause = ""
        self._curve = LossCurve()

    @property
    def figures(self) -> ProgressFigures:
        """The progress figures after the events so far."""
        total, per_epoch = self._start.total_steps, self._start.steps_per_epoch
        seconds = sum(row[2] for row in self._recent)
        measured = bool(self._recent) and seconds > 0
        pace_s = self._stepping_s / self._done if self._done else math.nan
        samples_per_s = sum(row[1] for row in self._recent) / seconds if measured else math.nan
        return ProgressFigures(
            step=self._step,
            total=total,
            # Before the first step the epoch of the next step, later that of the last step.
            epoch=epoch_of(self._step if self._recent else min(self._step + 1, total), per_epoch),
            epochs=epoch_of(total, per_epoch),
            loss=sum(row[0] for row in self._recent) / len(self._recent) if self._recent else math.nan,
            samples_per_s=samples_per_s,
            mfu=self._utilization.at(samples_per_s),
            wait_share=sum(row[3] for row in self._recent) / seconds if measured else math.nan,
            left_s=pace_s * (total - self._step),
            activity=self._activity,
            curve=self._curve,
        )

    def tell(self, event: Event) -> list[OutputLine]:
        """Return the lines to show for an event; none for most events."""
        self._utilization.on(event)
        if isinstance(event, RunStarted | Replanned | Probed):
            self._plan, self._told_memory = plan_from(event.plan), 0
        match event:
            case RunStarted():
                return self._tell_start(event)
            case Waiting():
                return self._tell_waiting(event)
            case Formed():
                return self._tell_formed(event)
            case Steps():
                return self._count(event)
            case Measured():
                return self._tell_measured(event)
            case MemoryMeasured():
                return self._tell_memory(event)
            case TraceWritten() if not self._verbose:
                return self._tell_traces(event)
            case Failed():
                return self._tell_failure(event)
            case RunEnded():
                self._activity = ""
                return [_end_line(event, self._start, self._told_cause, self._began)]
            case Prefetched() | Stale() | Stacks() | Judged() | MediaLogged():
                return []
            case Printed() if self._verbose:
                return []  # Ray already forwards the worker's output
        if isinstance(event, Evaluated):
            self._curve.evaluate(event.step, event.metrics.get("loss", math.nan))
        if isinstance(event, (Placed, Promoted, Checkpointed, Kept)) and not self._verbose:
            return []
        return [event_line(event, self._start.steps_per_epoch)]

    def _tell_start(self, event: RunStarted) -> list[OutputLine]:
        self._start, self._formed, self._activity = event, False, "starting"
        samples = event.job.get("batch_size", "")
        steps = formatting.count(event.total_steps, "step") + (f" of {samples} samples" if samples else "")
        epochs = formatting.count(epoch_of(event.total_steps, event.steps_per_epoch), "epoch")
        return [OutputLine(text=f"run {event.run}: {epochs}, {steps}; {event.cluster}")]

    def _tell_waiting(self, event: Waiting) -> list[OutputLine]:
        self._activity = f"waiting for {event.what}"
        if event.what == self._waited_for:
            return []
        self._waited_for = event.what
        return [OutputLine(text=waiting_text(event))]

    def _tell_formed(self, event: Formed) -> list[OutputLine]:
        again, self._formed, self._activity, self._waited_for = self._formed, True, "", ""
        self._step, self._stepping_since_s = event.step, event.time_s
        self._recent.clear()
        self._curve.rewind(event.step)
        if again:
            return [OutputLine(text=recovery_text(event), tone="good")]
        self._began = event.step
        if event.step or event.source == "checkpoint":
            return [OutputLine(text=self._resuming(event), tone="good")]
        return [
            OutputLine(
                text=f"{formatting.worker_count(event.workers, event.servers)} ready after "
                f"{formatting.duration(event.seconds)}"
            )
        ]

    def _resuming(self, event: Formed) -> str:
        source = source_text(event)
        if event.source == "checkpoint":
            root = str(self._start.job.get("storage", "")).rstrip("/")
            source = "/".join(part for part in (root, self._start.run, event.checkpoint) if part)
        return f"resuming step {event.step:,} from {source} after {formatting.duration(event.seconds)}"

    def _count(self, event: Steps) -> list[OutputLine]:
        self._recent.extend(zip(event.loss, event.samples, event.step_s, event.wait_s, strict=True))
        self._curve.add(event.step, event.loss)
        if event.step:
            self._step, self._activity = event.step[-1], ""
            self._done += len(event.step)
            # Time since the rendezvous or the previous event, so that time between steps counts too.
            self._stepping_s += max(event.time_s - self._stepping_since_s, 0.0)
            self._stepping_since_s = event.time_s
        return []

    def _tell_measured(self, event: Measured) -> list[OutputLine]:
        """Show the measurement when the gradient noise scale is first known."""
        first = bool(event.noise) and not self._told_noise
        self._told_noise = self._told_noise or first
        return [OutputLine(text=_step_phases_text(event))] if first or self._verbose else []

    def _tell_memory(self, event: MemoryMeasured) -> list[OutputLine]:
        """Show the fullest device under each plan once, and again when it has grown by a tenth."""
        most = max(event.allocated_bytes, default=0)
        if most <= 1.1 * self._told_memory and not self._verbose:
            return []
        self._told_memory = most
        return [OutputLine(text=memory_text(self._plan, event))]

    def _tell_traces(self, event: TraceWritten) -> list[OutputLine]:
        """Show the first trace of some steps, for those of all ranks."""
        if event.folder == self._told_traces:
            return []
        self._told_traces = event.folder
        root = "/".join((str(self._start.job.get("storage", "")).rstrip("/"), self._start.run))
        text = f"traces of {event.steps} are in {root}/{event.folder}, a file for each rank; {event.viewer}"
        return [OutputLine(text=text, tone="good")]

    def _tell_failure(self, event: Failed) -> list[OutputLine]:
        self._activity, self._told_cause = "recovering", event.cause
        # If the run ends, the error has the traceback; a failure that the run recovers from gets one line.
        detail = event.detail if self._verbose else ""
        return [OutputLine(text=failure_text(event), tone="bad", detail=detail)]


def _evaluation_text(event: Evaluated, steps_per_epoch: int) -> str:
    """`evaluation at step 235 (epoch 1): loss 0.3312, accuracy 0.8812 (2.1 s)`."""
    where = f"step {event.step:,} (epoch {epoch_of(event.step, steps_per_epoch)})"
    return f"evaluation at {where}: {formatting.metrics(event.metrics)} ({formatting.duration(event.seconds)})"


def prefetch_text(event: Prefetched) -> str:
    """`data is read up to 128 steps ahead (2 chunks of 64 steps, 16 MiB at most)`."""
    chunks = f"{formatting.count(event.chunks, 'chunk')} of {formatting.count(event.chunk_steps, 'step')}"
    held = formatting.size(event.chunks * event.chunk_bytes)
    return f"data is read up to {event.chunks * event.chunk_steps:,} steps ahead ({chunks}, {held} at most)"


def _step_phases_text(event: Measured) -> str:
    """`a step takes forward 3.1 ms, backward 6.2 ms, ...; gradient noise scale 310 samples, 250 to 400`."""
    parts = {**event.phases, "waiting for data": event.data_s}
    took = ", ".join(f"{name.replace('+', ' + ')} {formatting.duration(seconds)}" for name, seconds in parts.items())
    noise = noise_of(event)
    return f"a step takes {took}" + (f"; gradient noise scale {noise.text}" if noise else "")


def failed_rank_text(event: Failed) -> str:
    """`rank 1 (node-a, pid 1234) failed at about step 412`: the newest steps may not have been reported yet."""
    place = ", ".join(part for part in (event.node, f"pid {event.pid}" if event.pid else "") if part)
    who = f"rank {event.rank}" if event.rank >= 0 else "the group"
    return f"{who}{f' ({place})' if place else ''} failed at about step {event.step:,}"


def failure_text(event: Failed) -> str:
    """`rank 1 (node-a, pid 1234) failed at about step 412: killed by SIGKILL`."""
    return f"{failed_rank_text(event)}: {event.cause}"


def recovery_text(event: Formed) -> str:
    """`back at step 412 after 2.1 s, 3 steps lost (413 to 415), state from a checkpoint`."""
    after = formatting.duration(event.seconds)
    return f"back at step {event.step:,} after {after}, {lost_text(event)}, state from {source_text(event)}"


def lost_text(event: Formed) -> str:
    """`3 steps lost (413 to 415)`, `1 step lost (413)` or `0 steps lost`."""
    first, last = event.step + 1, event.step + event.steps_lost
    which = f"{first:,} to {last:,}" if last > first else f"{first:,}"
    return f"{formatting.count(event.steps_lost, 'step')} lost{f' ({which})' if event.steps_lost else ''}"


def source_text(event: Formed) -> str:
    """Return where the state of a rendezvous came from, in words."""
    sources = {
        "replica": "a replica",
        "keeper": "a node's memory",
        "checkpoint": event.checkpoint or "a checkpoint",
        "initial": "the beginning",
    }
    return sources.get(event.source, event.source)


def waiting_text(event: Waiting) -> str:
    """`waiting for 2 GPU, at most 5 min 00 s`; the event's `deadline_s` may be a time or a duration."""
    left_s = event.deadline_s - event.time_s if event.deadline_s > event.time_s else event.deadline_s
    return f"waiting for {event.what}" + (f", at most {formatting.duration(left_s)}" if left_s > 0 else "")


def _end_line(event: RunEnded, start: RunStarted, told_cause: str = "", began: int = 0) -> OutputLine:
    """Return how the run ended, after how long where its start is known, and its error unless it was told already.

    Args:
        began: the step from which this session went on.
    """
    took = formatting.duration(event.time_s - start.time_s) if start.time_s else ""
    seconds = f" after {took}" if took else ""
    steps = f"at step {event.step:,} of {start.total_steps:,}" if start.total_steps else f"at step {event.step:,}"
    best = f"; best {event.best}" if event.best else ""
    if event.outcome == "done":
        early = f": {event.reason}" if event.reason else ""
        own = f", {event.step - began:,} of them now, in {took}" if took and began else seconds
        return OutputLine(text=f"done: {formatting.count(event.step, 'step')}{own}{early}{best}", tone="good")
    if event.outcome == "stopped":
        return OutputLine(text=f"stopped {steps}{seconds}; the same command continues from here{best}", tone="warning")
    first = event.error.strip().splitlines()[0] if event.error.strip() else "see the error"
    known = told_cause and first.startswith(told_cause)
    left = f"last checkpoint {steps}" if event.step else "before its first checkpoint"
    return OutputLine(text=f"failed{seconds}, {left}" + ("" if known else f": {first}"), tone="bad")


def event_line(event: Event, steps_per_epoch: int = 0) -> OutputLine:
    """Return one line for any event, independent of other events, for `logs`."""
    match event:
        case RunStarted():
            return OutputLine(
                text=f"driver {event.token} took run {event.run}: {event.total_steps:,} steps; {event.cluster}"
            )
        case Waiting():
            return OutputLine(text=waiting_text(event))
        case Placed():
            role = " as a warm standby" if event.spare else ""
            return OutputLine(text=f"worker {event.worker} is up{role}: pid {event.pid} on {event.node}")
        case Promoted():
            place = f" on {event.node}" if event.node else ""
            return OutputLine(text=f"worker {event.worker}, a warm standby{place}, takes rank {event.rank}")
        case Leaving() | Straggling():
            return OutputLine(text=event.text, tone="warning")
        case Resized():
            return _resized_line(event)
        case Replanned():
            return OutputLine(text=event.text, tone="warning" if event.why else "good")
        case Probed() | Joined() | Judged():
            return OutputLine(text=event.text, tone="good")
        case Formed():
            begins = event.source == "initial" and event.step == 0
            state = f"after {formatting.duration(event.seconds)}" if begins else f"again: {recovery_text(event)}"
            return OutputLine(
                text=f"{formatting.worker_count(event.workers, event.servers)} ready {state}", tone="good"
            )
        case Steps():
            return OutputLine(text=_steps_text(event))
        case Evaluated():
            return OutputLine(text=_evaluation_text(event, steps_per_epoch))
        case Checkpointed():
            return OutputLine(text=_checkpoint_text(event))
        case Kept():
            return OutputLine(text=_memory_checkpoint_text(event))
        case CheckpointSkipped():
            return OutputLine(text=f"no checkpoint at step {event.step:,}: {event.reason}", tone="warning")
        case Prefetched():
            return OutputLine(text=prefetch_text(event))
        case Measured():
            return OutputLine(text=_step_phases_text(event))
        case MemoryMeasured():
            return OutputLine(text=memory_text(None, event))
        case Stale():
            return OutputLine(text=f"staleness: {staleness_text(staleness_of([event])) or 'nothing was pushed'}")
        case Failed():
            return OutputLine(text=failure_text(event), tone="bad", detail=event.detail)
        case Stacks():
            return OutputLine(text=f"stack of rank {event.rank} ({event.node}):", detail=event.text)
        case Printed() | TraceWritten():
            return OutputLine(text=event.text)
        case MediaLogged():
            return OutputLine(text=f"step {event.step:,}: {'image' if event.width else 'text'} {event.name!r} logged")
        case Noted():
            return OutputLine(text=f"note: {event.text}", tone="warning")
        case RunEnded():
            return _end_line(event, RunStarted())
    return OutputLine(text=event.kind)


def _resized_line(event: Resized) -> OutputLine:
    """`continuing with 3 workers instead of 4: no more started within 30 s; the global batch size does not change`."""
    smaller = event.workers < event.former
    verb = "continuing" if smaller else "growing: continuing"
    workers = formatting.count(event.workers, "worker")
    text = f"{verb} with {workers} instead of {event.former}: {event.why}; the global batch size does not change"
    return OutputLine(text=text, tone="warning" if smaller else "good")


def _checkpoint_text(event: Checkpointed) -> str:
    """`checkpoint at step 235: 1.2 MiB, steps waited 3 ms, stored in 120 ms`."""
    return (
        f"checkpoint at step {event.step:,}: {formatting.size(event.size_bytes)}, "
        f"steps waited {formatting.duration(event.blocked_s)}, stored in {formatting.duration(event.seconds)}"
    )


def _memory_checkpoint_text(event: Kept) -> str:
    """`state of step 235 kept in memory on node-a: 1.2 MiB, steps waited 3 ms`."""
    place = f" on {', '.join(event.nodes)}" if event.nodes else ""
    size, waited = formatting.size(event.size_bytes), formatting.duration(event.blocked_s)
    return f"state of step {event.step:,} kept in memory{place}: {size}, steps waited {waited}"


def _steps_text(event: Steps) -> str:
    if not event.step:
        return "no steps"
    seconds = sum(event.step_s)
    pace = formatting.throughput(sum(event.samples) / seconds if seconds > 0 else math.nan)
    mean = sum(event.loss) / len(event.loss)
    first, last = event.step[0], event.step[-1]
    which = f"step {last:,}" if first == last else f"steps {first:,} to {last:,}"
    share = sum(event.wait_s) / (seconds or 1.0)
    waited = f", waiting for data {formatting.percent(share)}" if math.isfinite(share) else ""
    return f"{which}: loss {formatting.metric(mean)}, {pace}{waited}"
