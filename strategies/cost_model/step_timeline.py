"""The timeline of one step: what each pipeline stage does when, and what it waits for.

`estimator` adds up a step by formulas. Here its operations run in the order of the schedule, each as soon as its stage
is free and its input has arrived. Both agree for equal stages; for unequal stages the waiting here is exact.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Literal, NamedTuple

from trainwright.core.plan import STREAMED_SCHEDULES, section_of
from trainwright.strategies.cost_model.estimator import LAST_BUCKET_SHARE, StageTimes, stage_times
from trainwright.strategies.cost_model.machine_model import DEFAULT, Calibration, Vector
from trainwright.strategies.cost_model.pipeline_schedules import (
    Operation,
    OperationKind,
    required_operation,
    stage_operations,
)
from trainwright.strategies.cost_model.step_work import StepWork

SpanKind = Literal[
    "forward", "recompute", "backward", "inputs", "weights", "gather", "send", "reduction", "optimizer", "other", "idle"
]
GRADIENT_BUCKETS = round(1 / LAST_BUCKET_SHARE)  # of gradients; `estimator` never hides the last one
_WEIGHT_GRADIENT_SHARE = 0.5  # of a split backward (Qi et al., 2023: as long as the gradients of inputs)
_FORWARD_GATHERS = 1 / 3  # ZeRO-3 gathers for forward, gathers for backward, and scatters gradients
_STEPS, _SHOWN = 4, 2  # of a pipeline that does not drain: steps until it repeats, and the step that is shown
_OVERLAPPED_SENDS = "gpipe"  # sends while the next micro-batch is computed, see `estimator`


class Span(NamedTuple):
    """An interval of a stage."""

    stage: int  # from 0
    # a `reduction` overlaps the others, which follow each other; `inputs` and `weights` are the halves of a split
    # backward; `gather` is the communication of ZeRO-3; `other` is the rest of a step
    kind: SpanKind
    micro_batch: int | None  # from 0; None for what happens once a step
    chunk: int | None  # of the stage; None for what happens once a step, except reductions
    # begin_s, end_s: since the step began
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The timeline of one step; of a pipeline that does not drain, a window as long as a step, with parts of two."""

    lanes: tuple[tuple[Span, ...], ...]  # of each stage, its spans in order without gaps: compute, sends and idle time
    reductions: tuple[tuple[Span, ...], ...]  # of each stage's gradients, which overlap its lane
    step_s: float  # end of the last stage

    def share(self, kind: SpanKind) -> float:
        """Return the share of all stages' time that is spent in one kind."""
        spent = sum(span.seconds for span in chain(*self.lanes, *self.reductions) if span.kind == kind)
        return spent / (self.step_s * len(self.lanes))


def timeline(work: StepWork, calibration: Calibration = DEFAULT) -> Timeline:
    """Return the timeline of a step; it is about as long as `estimator.expected_terms` says."""
    residual, _ = calibration.residual(work.shape, work.kind)
    made = stage_times(work, calibration.efficiencies).times(math.exp(residual))
    hidden_s = calibration.efficiencies["overlap"] * work.by_stage(made.backward + made.recompute) / work.plan.chunks
    if work.plan.schedule in STREAMED_SCHEDULES:
        return _steady_step(work, *_stream(work, made, hidden_s))
    lanes = _lanes(work, made)
    spent = zip(lanes, made.reduction.tolist(), hidden_s.tolist(), strict=True)
    reductions = [_reductions(lane, reduced_s, under_s) for lane, reduced_s, under_s in spent]
    reduced_s = max(span.end_s for span in chain(*lanes, *reductions))  # clipping waits for all gradients
    updated_s = reduced_s + float(made.optimizer.max())
    for stage, lane in enumerate(lanes):
        end_s = reduced_s + float(made.optimizer[stage])
        lane.append(Span(stage, "optimizer", None, None, reduced_s, end_s))
        lane.append(Span(stage, "other", None, None, updated_s, updated_s + made.other))
    step_s = updated_s + made.other
    return Timeline(
        lanes=tuple(tuple(_with_idle(lane, stage, step_s)) for stage, lane in enumerate(lanes)),
        reductions=tuple(map(tuple, reductions)),
        step_s=step_s,
    )


def _stream(work: StepWork, made: StageTimes, hidden_s: Vector) -> tuple[list[list[Span]], list[list[Span]]]:
    """Return lanes and reductions of several steps without a drain: a stage updates once its gradients are reduced."""
    reductions: list[list[Span]] = [[] for _ in range(work.plan.mesh.pipeline)]

    def updated(lane: list[Span]) -> None:
        stage = lane[-1].stage
        reduced = _reductions(lane, float(made.reduction[stage]), float(hidden_s[stage]))
        reductions[stage] += reduced
        begin_s = max(span.end_s for span in (lane[-1], *reduced))
        end_s = begin_s + float(made.optimizer[stage])
        lane.append(Span(stage, "optimizer", None, None, begin_s, end_s))
        lane.append(Span(stage, "other", None, None, end_s, end_s + made.other))

    return _lanes(work, made, _STEPS, updated), reductions


def _steady_step(work: StepWork, lanes: list[list[Span]], reductions: list[list[Span]]) -> Timeline:
    """Return the window from one step's first loss to the next step's, with each step's micro-batches from 0."""
    count = work.micro_batches
    losses = (span for span in lanes[-1] if span.kind == "forward" and not (span.micro_batch or 0) % count)
    begin_s, end_s = (span.begin_s for span in list(losses)[_SHOWN : _SHOWN + 2])

    def seen(spans: list[Span]) -> Iterator[Span]:
        for span in spans:
            first_s, last_s = max(span.begin_s, begin_s), min(span.end_s, end_s)
            if first_s < last_s:
                number = None if span.micro_batch is None else span.micro_batch % count
                yield span._replace(micro_batch=number, begin_s=first_s - begin_s, end_s=last_s - begin_s)

    return Timeline(
        lanes=tuple(tuple(_with_idle(seen(lane), stage, end_s - begin_s)) for stage, lane in enumerate(lanes)),
        reductions=tuple(tuple(seen(spans)) for spans in reductions),
        step_s=end_s - begin_s,
    )


def _lanes(
    work: StepWork, made: StageTimes, steps: int = 1, ended: Callable[[list[Span]], None] | None = None
) -> list[list[Span]]:
    """Return the spans of each stage before gradients are reduced; a stage runs as soon as its input has arrived.

    There are several steps without a drain between them. `ended` gets a stage's lane at the end of each step.
    """
    stages, chunks, count = work.plan.mesh.pipeline, work.plan.chunks, work.micro_batches
    todo = [deque(_operations(work, stage, steps)) for stage in range(stages)]
    lanes: list[list[Span]] = [[] for _ in range(stages)]
    parts = cache(lambda stage, kind, chunk: tuple(_parts(work, made, stage, kind, chunk)))
    come_s: dict[tuple[int, Operation], float] = {}
    waiting: dict[tuple[int, Operation], int] = {}
    able = deque(range(stages))
    while able:
        stage = able.popleft()
        lane = lanes[stage]
        while todo[stage]:
            operation = todo[stage][0]
            source = required_operation(
                operation, schedule=work.plan.schedule, stage=stage, stages=stages, chunks=chunks
            )
            if source is not None and source not in come_s:
                waiting[source] = stage
                break
            todo[stage].popleft()
            now_s = max(lane[-1].end_s if lane else 0.0, come_s[source] if source else 0.0)
            for kind, seconds in parts(stage, operation.kind, operation.chunk):
                begin_s, now_s = now_s, now_s + seconds
                lane.append(Span(stage, kind, operation.micro_batch, operation.chunk, begin_s, now_s))
            late_s = _message_s(made, stage, operation.kind) if work.plan.schedule == _OVERLAPPED_SENDS else 0.0
            come_s[stage, operation] = now_s + late_s
            if ended is not None and operation.kind == "backward" and not (operation.micro_batch + 1) % count:
                ended(lane)
            if (stage, operation) in waiting:
                able.append(waiting.pop((stage, operation)))
    assert not any(todo), "stages wait for each other in a cycle"
    return lanes


def _operations(work: StepWork, stage: int, steps: int) -> Iterator[Operation]:
    """Yield the operations of a stage in several steps; micro-batches are numbered through."""
    for step in range(steps):
        for each in stage_operations(
            work.plan.schedule,
            stage=stage,
            stages=work.plan.mesh.pipeline,
            micro_batches=work.micro_batches,
            chunks=work.plan.chunks,
            begun=step > 0,
            followed=step < steps - 1,
        ):
            yield each._replace(micro_batch=each.micro_batch + step * work.micro_batches)


def _parts(
    work: StepWork, made: StageTimes, stage: int, kind: OperationKind, chunk: int
) -> Iterator[tuple[SpanKind, float]]:
    """Yield the parts of an operation with their seconds; sending occupies the sender, except in GPipe."""
    section = section_of(work.plan.schedule, stage=stage, stages=work.plan.mesh.pipeline, chunk=chunk)
    if made.gather and kind != "weights":
        yield (
            "gather",
            made.gather / work.plan.chunks * (_FORWARD_GATHERS if kind == "forward" else 1 - _FORWARD_GATHERS),
        )
    if kind in ("backward", "inputs") and made.recompute[section]:
        yield "recompute", float(made.recompute[section])
    if kind == "forward":
        yield kind, float(made.forward[section])
    else:
        halved = {"inputs": 1 - _WEIGHT_GRADIENT_SHARE, "weights": _WEIGHT_GRADIENT_SHARE}
        yield kind, float(made.backward[section]) * halved.get(kind, 1.0)
    message_s = _message_s(made, section, kind)
    if work.plan.schedule != _OVERLAPPED_SENDS and message_s:
        yield "send", message_s


def _message_s(made: StageTimes, section: int, kind: OperationKind) -> float:
    """Return the seconds to send a section's activations on, or their gradients back; 0 at the ends of the model."""
    cut = section if kind == "forward" else section - 1
    return float(made.send[cut]) if kind != "weights" and 0 <= cut < len(made.send) else 0.0


def _reductions(lane: list[Span], spent_s: float, hidden_s: float) -> list[Span]:
    """Return the reductions of a stage's gradients, by chunk and bucket, each after its bucket and the one before.

    All take `spent_s`. Buckets become ready evenly over the last `hidden_s` of each chunk's last backward.
    """
    done = {span.chunk: span for span in lane if span.kind in ("backward", "weights")}  # the last of each chunk
    if not spent_s:
        return []
    each_s, found = spent_s / len(done) / GRADIENT_BUCKETS, list[Span]()
    for last in sorted(done.values(), key=lambda span: span.end_s):
        for bucket in range(1, GRADIENT_BUCKETS + 1):
            made_s = last.end_s - hidden_s * (1 - bucket / GRADIENT_BUCKETS)
            begin_s = max(made_s, found[-1].end_s if found else 0.0)
            found.append(Span(last.stage, "reduction", None, last.chunk, begin_s, begin_s + each_s))
    return found


def _with_idle(lane: Iterable[Span], stage: int, end_s: float) -> Iterator[Span]:
    """Yield the spans, and idle time between and after them."""
    now_s = 0.0
    for span in lane:
        if span.begin_s > now_s:
            yield Span(stage, "idle", None, None, now_s, span.begin_s)
        yield span
        now_s = span.end_s
    if now_s < end_s:
        yield Span(stage, "idle", None, None, now_s, end_s)
