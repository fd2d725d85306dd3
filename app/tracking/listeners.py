"""Event listeners that send a run's metrics to Prometheus, to TensorBoard and to experiment trackers.

Prometheus gets them from Ray's metrics agent: `METRICS` lists them, and `MetricCollector` computes their values. The
existing writers of TensorBoard files import torch or TensorFlow, which would load a framework into every driver.
"""

from __future__ import annotations

import math
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trainwright.core.errors import StorageError
from trainwright.core.events import (
    Checkpointed,
    Evaluated,
    Event,
    Failed,
    Formed,
    Joined,
    Measured,
    MediaLogged,
    Probed,
    Replanned,
    Resized,
    RunEnded,
    RunStarted,
    Steps,
)
from trainwright.core.redaction import redact
from trainwright.core.tfrecord_framing import frame, message_class
from trainwright.reporting.event_messages import EventFormatter
from trainwright.reporting.plan_view import plan_from
from trainwright.reporting.utilization import UtilizationMeter
from trainwright.storage.object_store import Store
from trainwright.storage.run_summary import RunSummary
from trainwright.tracking.experiment_trackers import Row, RunResult, TrackedRun, Tracker


class PrometheusListener:
    """An event listener that records metrics with Ray's metrics agent of this node, which Prometheus scrapes.

    It takes microseconds an event and makes no call: Ray sends the values every 10 s (`metrics_report_interval_ms`).
    The gauges of a run end with the run. Its counters stay until the cluster ends, as counters must. Ray drops the
    metrics of a dead driver after two reports.

    Args:
        record: sets a gauge, or adds to a counter or histogram, with labels; NaN ends the series of a gauge.
    """

    def __init__(self, record: Callable[[MetricSpec, float, Mapping[str, str]], object] | None = None) -> None:
        self._write = record or _record_with_ray
        self._readings = MetricCollector()
        self._gauges: dict[str, Mapping[str, str]] = {}

    def on(self, event: Event) -> None:
        """Record the metrics that one event changes."""
        readings, strategy = list(self._readings.take(event)), self._readings.strategy
        if not self._readings.run:
            return  # the run has not started
        if any(labels["strategy"] != strategy for labels in self._gauges.values()):
            self.close()
        for name, value in readings:
            self._record(METRICS[name], value, {"run": self._readings.run, "strategy": strategy})

    def _record(self, metric: MetricSpec, value: float, labels: dict[str, str]) -> None:
        if not math.isfinite(value) or (metric.kind == "counter" and value <= 0):
            return
        if metric.kind == "gauge":
            self._gauges[metric.name] = labels
        if metric.labels:
            labels = {**labels, "source": self._readings.source}
        self._write(metric, value, labels)

    def close(self) -> None:
        """End the gauges: a finished run has neither throughput nor workers."""
        for name, labels in self._gauges.items():
            self._write(METRICS[name], math.nan, labels)
        self._gauges.clear()


def _record_with_ray(metric: MetricSpec, value: float, labels: Mapping[str, str]) -> None:
    """Record a value with Ray. Ray 2.60 does not export a gauge whose value is NaN."""
    made, tags = _ray_metric(metric.name), dict(labels)
    match metric.kind:
        case "gauge":
            made.set(value, tags=tags)
        case "counter":
            made.inc(value, tags=tags)
        case "histogram":
            made.observe(value, tags=tags)


@cache
def _ray_metric(name: str) -> Any:
    """Return the metric of this process, which all its runs share."""
    from ray.util import metrics

    metric = METRICS[name]
    options: dict[str, Any] = {"description": metric.text, "tag_keys": (*LABELS, *metric.labels)}
    if metric.kind == "histogram":
        return metrics.Histogram(metric.full_name, boundaries=list(_BUCKETS_S), **options)
    kind: Any = metrics.Gauge if metric.kind == "gauge" else metrics.Counter
    return kind(metric.full_name, **options)


# --- values from events -----------------------------------------------------------------------------------------------


GOODPUT_INTERVAL_S = 10.0  # between computations of goodput, which take milliseconds


_Samples = Iterator[tuple[str, float]]  # values of metrics by name: set for a gauge, added for other kinds


class MetricCollector:
    """Computes metrics from the events of one driver, given in order.

    Loss, throughput and waiting are those of the progress bar. Goodput is that of the report, for this driver alone.

    Attributes:
        run, strategy: labels of all samples; empty before the run has started.
        source: where the state of the last recovery came from, its label.
    """

    def __init__(self) -> None:
        self.run = self.strategy = self.source = ""
        self._formatter, self._summary, self._workers = EventFormatter(), RunSummary(), _WorkerCount()
        self._goodput_s = -math.inf

    def take(self, event: Event) -> _Samples:
        """Yield the metrics that one event changes. Exhaust the iterator before the next event."""
        summary = self._summary
        lost, recovered = summary.steps_lost, len(summary.recoveries)
        self._formatter.tell(event)
        # No metric needs the logged values, of which there may be hundreds.
        summary.add(replace(event, logged={}) if isinstance(event, Steps) else event)
        self._workers.take(event)
        match event:
            case RunStarted():
                self.run, self.strategy = event.run, str(event.plan.get("strategy", ""))
                yield "total_steps", event.total_steps
            case Replanned() | Probed():
                self.strategy = str(event.plan.get("strategy", self.strategy))
            case Steps():
                yield from _step_samples(event)
            case Failed():
                yield "failures", 1
            case Formed() if len(summary.recoveries) > recovered:
                self.source = event.source
                yield "recoveries", 1
                yield "recovery_seconds", event.seconds
            case Checkpointed():
                yield from _checkpoint_samples(event)
        yield "steps_lost", summary.steps_lost - lost
        yield from self._gauges(event)

    def _gauges(self, event: Event) -> _Samples:
        if isinstance(event, Steps | Formed):
            figures = self._formatter.figures
            yield "step", figures.step
            yield "loss", figures.loss
            yield "samples_per_second", figures.samples_per_s
            yield "data_wait_share", figures.wait_share
            yield "model_flops_utilization", figures.mfu
        if isinstance(event, RunStarted | Formed | Failed | Joined | Resized | Replanned | Probed):
            yield "workers", self._workers.workers
            yield "workers_wanted", self._workers.wanted
        if isinstance(event, RunEnded) or event.time_s >= self._goodput_s + GOODPUT_INTERVAL_S:
            self._goodput_s = event.time_s
            yield "goodput", self._summary.totals().goodput


class _WorkerCount:
    """Counts the workers that take part and those that the plan asks for."""

    def __init__(self) -> None:
        self.wanted = self._formed = self._more = 0
        self._down: set[int] = set()

    @property
    def workers(self) -> int:
        """Workers that take part now."""
        return max(self._formed - len(self._down) + self._more, 0)

    def take(self, event: Event) -> None:
        match event:
            case RunStarted() | Probed():
                plan = plan_from(event.plan)
                self.wanted = plan.workers if plan else 0
            case Replanned():
                self.wanted = event.workers
            case Resized():
                self.wanted = max(self.wanted, event.workers)
            case Formed():
                self._formed, self._more, self._down = event.workers, 0, set()
            case Failed() if event.rank >= 0:
                self._down.add(event.rank)
            case Joined():
                self._more += event.rank not in self._down and event.former < 0
                self._down.discard(event.rank)


def _step_samples(event: Steps) -> _Samples:
    yield "steps", len(event.step)
    yield "samples", sum(event.samples)
    yield "data_wait_seconds", sum(value for value in event.wait_s if math.isfinite(value))
    for seconds in event.step_s:
        yield "step_seconds", seconds


def _checkpoint_samples(event: Checkpointed) -> _Samples:
    yield "checkpoints", 1
    yield "checkpoint_bytes", event.size_bytes
    yield "checkpoint_seconds", event.seconds
    yield "checkpoint_blocked_seconds", event.blocked_s


# --- metrics ----------------------------------------------------------------------------------------------------------


LABELS = ("run", "strategy")  # every metric has these
_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """One metric."""

    name: str
    # a gauge is the current value, a counter only grows, a histogram counts values by size
    kind: Literal["gauge", "counter", "histogram"]
    text: str
    labels: tuple[str, ...] = ()  # in addition to those of every metric

    @property
    def full_name(self) -> str:
        """The name for Ray."""
        return f"trainwright_{self.name}"


_TEXTS: dict[Literal["gauge", "counter", "histogram"], dict[str, str]] = {
    "gauge": {
        "step": "Steps completed that count; less after a recovery that lost some",
        "total_steps": "Steps of the whole run",
        "loss": "Training loss, mean of the last 50 steps",
        "samples_per_second": "Samples a second while stepping, over the last 50 steps",
        "data_wait_share": "Share of the last 50 steps that waited for data, 0 to 1",
        "model_flops_utilization": "Model FLOPs utilization (MFU) of the last 50 steps, 0 to 1",
        "goodput": "Share of this driver's time spent computing steps that count, 0 to 1",
        "workers": "Workers that take part now, without lost ones",
        "workers_wanted": "Workers of the plan",
        "checkpoint_bytes": "Size of the newest checkpoint in bytes",
    },
    "counter": {
        "steps": "Steps done, repeated ones included",
        "samples": "Samples trained on, those of repeated steps included",
        "data_wait_seconds": "Seconds of steps that waited for data",
        "failures": "Failures",
        "recoveries": "Recoveries by where the state came from",
        "recovery_seconds": "Seconds from failures to the next rendezvous",
        "steps_lost": "Completed steps that had to be repeated",
        "checkpoints": "Checkpoints committed",
        "checkpoint_seconds": "Seconds that it took to store checkpoints",
        "checkpoint_blocked_seconds": "Seconds that steps waited for checkpoints",
    },
    "histogram": {
        "step_seconds": "Seconds of a step",
    },
}
METRICS = {
    name: MetricSpec(name=name, kind=kind, text=text, labels=("source",) if name == "recoveries" else ())
    for kind, texts in _TEXTS.items()
    for name, text in texts.items()
}


# --- TensorBoard: the files are TFRecord files of messages of tensorflow/core/util/event.proto ------------------------


MAX_WAITING_BYTES = 64 << 20  # limit of bytes that wait for the store
_START, _STRING, _RGBA = 1, 7, 4  # SessionLog.START, DT_STRING, a colorspace
_SCHEMA = {
    "Image": {
        "height": (1, "int32"),
        "width": (2, "int32"),
        "colorspace": (3, "int32"),
        "encoded_image_string": (4, "bytes"),
    },
    "PluginData": {"plugin_name": (1, "string")},
    "SummaryMetadata": {"plugin_data": (1, "PluginData")},
    "TensorProto": {"dtype": (1, "int32"), "string_val": (8, "repeated bytes")},
    "Value": {
        "tag": (1, "string"),
        "simple_value": (2, "oneof float"),
        "image": (4, "oneof Image"),
        "tensor": (8, "oneof TensorProto"),
        "metadata": (9, "SummaryMetadata"),
    },
    "Summary": {"value": (1, "repeated Value")},
    "SessionLog": {"status": (1, "int32")},
    "Event": {
        "wall_time": (1, "double"),
        "step": (2, "int64"),
        "file_version": (3, "oneof string"),
        "summary": (5, "oneof Summary"),
        "session_log": (7, "oneof SessionLog"),
    },
}


class TensorBoardWriter:
    """An event listener that writes scalars, and images and texts of callbacks, to `<run>/tensorboard`.

    In a folder one file grows during the run. An object store cannot append, so each checkpoint and the end add a file;
    TensorBoard reads the files of a directory in order of their names. After a resume or a recovery the curves continue
    at the resumed step, without repeated points.
    """

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._prefix = store, f"{run}/tensorboard"
        self._folder = _folder(store.uri_of(self._prefix))
        self._token = self._part = 0
        self._utilization = UtilizationMeter()
        self._last_s = 0.0
        self._buffer = bytearray()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainwright-tensorboard")
        self._writes: deque[Future[int]] = deque()
        self._waiting_bytes = 0

    def on(self, event: Event) -> None:
        """Take one event. Files are written by a separate thread: a network folder may block."""
        self._last_s = event.time_s
        self._utilization.on(event)
        match event:
            case RunStarted():
                self._token, self._part = event.token, 0
            case Formed():
                self._add(_session_start(event.step + 1, event.time_s))
            case Steps():
                for step, scalars in _step_scalars(event, self._utilization):
                    self._add(_scalar_event(step, event.time_s, scalars))
            case Measured() if event.noise:
                self._add(_scalar_event(event.step, event.time_s, {"train/gradient_noise_scale": event.noise["scale"]}))
            case Evaluated():
                scalars = {f"evaluation/{name}": value for name, value in event.metrics.items()}
                self._add(_scalar_event(event.step, event.time_s, scalars))
            case MediaLogged() if event.image or event.text:
                self._add(_media_event(event))
        if isinstance(event, (Checkpointed, RunEnded)) or self._folder is not None:
            self._write()

    def close(self) -> None:
        """Write the rest and wait until it is written."""
        wait(self._writes)
        self._write()
        self._thread.shutdown()
        self._write()

    def _add(self, message: bytes) -> None:
        self._buffer += frame(message)

    def _write(self) -> None:
        """Queue the buffer for writing. Raises the error of an earlier write."""
        while self._writes and self._writes[0].done():
            self._waiting_bytes -= self._writes.popleft().result()  # after an error the event log removes this listener
        if self._waiting_bytes > MAX_WAITING_BYTES:
            raise StorageError("the store does not answer; too many TensorBoard records wait", where=self._prefix)
        if not self._buffer:
            return
        data, name = bytes(self._buffer), f"events.out.tfevents.{self._token:010d}.{self._part:06d}"
        self._buffer.clear()
        self._waiting_bytes += len(data)
        if self._folder is not None:
            self._writes.append(self._thread.submit(_append, self._folder / name, data, self._last_s))
        else:
            self._writes.append(self._thread.submit(self._put, f"{self._prefix}/{name}", data, self._last_s))
            self._part += 1

    def _put(self, path: str, data: bytes, time_s: float) -> int:
        self._store.put(path, frame(_version_event(time_s)) + data)
        return len(data)


def _folder(uri: str) -> Path | None:
    """Return the folder of a URI on this machine; None for an object store."""
    path = uri.removeprefix("file://")
    return None if "://" in path else Path(path)


def _append(path: Path, data: bytes, time_s: float) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write((frame(_version_event(time_s)) if file.tell() == 0 else b"") + data)
    return len(data)


def _step_scalars(event: Steps, utilization: UtilizationMeter) -> list[tuple[int, dict[str, float]]]:
    """Return the scalars of each step; those that are not finite are left out."""
    rows = []
    norms = event.gradient_norm or [None] * len(event.step)
    for index, step in enumerate(event.step):
        step_s, norm = event.step_s[index], norms[index]
        samples_per_s = event.samples[index] / step_s if step_s > 0 else math.nan
        scalars = {
            "train/loss": event.loss[index],
            "train/learning_rate": event.learning_rate[index],
            "train/gradient_norm": math.nan if norm is None else norm,
            "speed/samples_per_s": samples_per_s,
            "speed/mfu": utilization.at(samples_per_s),
            "speed/wait_share": event.wait_s[index] / step_s if step_s > 0 else math.nan,
            **{f"train/{name}": values[index] for name, values in event.logged.items()},
        }
        rows.append((step, {name: value for name, value in scalars.items() if math.isfinite(value)}))
    return rows


def _version_event(time_s: float) -> bytes:
    """The `Event` that every file begins with."""
    return _event(time_s, file_version="brain.Event:2")


def _session_start(step: int, time_s: float) -> bytes:
    """The `Event` at which readers forget all points from `step` on (`SessionLog.START`)."""
    return _event(time_s, step=step, session_log={"status": _START})


def _scalar_event(step: int, time_s: float, scalars: Mapping[str, float]) -> bytes:
    """The `Event` of some scalars at a step."""
    values = [{"tag": tag, "simple_value": value} for tag, value in scalars.items()]
    return _event(time_s, step=step, summary={"value": values})


def _media_event(media: MediaLogged) -> bytes:
    """The `Event` of an image or a text."""
    value: dict[str, Any] = {"tag": media.name}
    if media.image:
        size = {"height": media.height, "width": media.width, "colorspace": _RGBA}
        value["image"] = {**size, "encoded_image_string": media.image}
    else:
        value["tensor"] = {"dtype": _STRING, "string_val": [media.text.encode()]}
        value["metadata"] = {"plugin_data": {"plugin_name": "text"}}
    return _event(media.time_s, step=media.step, summary={"value": [value]})


def _event(time_s: float, **fields: Any) -> bytes:
    serialized: bytes = _event_class()(wall_time=time_s, **fields).SerializeToString()
    return serialized


@cache
def _event_class() -> Any:
    return message_class("Event", _SCHEMA)


# --- Experiment trackers, each on a thread of its own: a slow or failing one neither slows nor ends training ----------


_MOST_WAITING_STEPS = 10_000  # steps that wait for a slow tracker; an image or a text counts as some
_MEDIA_STEPS = 100
_CLOSE_TIMEOUT_S = 30.0  # for the last rows when the run has ended
_EMPTY = ("", "()", "None")
_RELEVANT_EVENTS = (
    RunStarted, Formed, Replanned, Probed, Steps, Evaluated, MediaLogged, Checkpointed, RunEnded,
)  # fmt: skip
_END_EVENTS = (Checkpointed, RunEnded)  # what the end of a record needs, also where the tracker failed before


class TrackerThread:
    """An event listener that sends the run to one tracker.

    Args:
        store: where the run is stored; also keeps the identity of the tracker's record.
        room_steps: limit of steps that wait; further steps are dropped, which is reported.
        patience_s: how long to wait for the tracker when the run has ended.
    """

    def __init__(
        self,
        tracker: Tracker,
        store: Store,
        run: str,
        *,
        say: Callable[[str], object],
        room_steps: int = _MOST_WAITING_STEPS,
        patience_s: float = _CLOSE_TIMEOUT_S,
    ) -> None:
        self._tracker, self._store, self._run, self._say = tracker, store, run, say
        self._name = type(tracker).__name__
        self._room_steps, self._patience_s = room_steps, patience_s
        self._change = threading.Condition()
        self._waiting: deque[Event] = deque()
        self._waiting_steps = 0
        self._closing = self._off = self._lagging = self._begun = False
        self._taken = _TrackerPosition()
        self._thread = threading.Thread(target=self._work, name=f"trainwright-{self._name}", daemon=True)

    def on(self, event: Event) -> None:
        """Queue an event for the thread."""
        if not isinstance(event, _END_EVENTS if self._off else _RELEVANT_EVENTS):
            return
        with self._change:
            steps = len(event.step) if isinstance(event, Steps) else _MEDIA_STEPS * isinstance(event, MediaLogged)
            full = bool(steps) and self._waiting_steps + steps > self._room_steps
            if not full:
                self._waiting.append(event)
                self._waiting_steps += steps
                self._change.notify()
        if isinstance(event, RunStarted):
            self._thread.start()
        if full and not self._lagging:
            self._lagging = True
            self._say(f"the tracker {self._name} is too slow: some steps are not sent to it; training continues")

    def close(self) -> None:
        """Wait for the tracker, for a limited time."""
        with self._change:
            self._closing = True
            self._change.notify()
        if self._thread.ident is None:
            return  # the run did not start
        self._thread.join(self._patience_s)
        if self._thread.is_alive():
            self._off = True
            late = f"did not finish within {self._patience_s:.0f} s after the end of the run"
            self._say(f"the tracker {self._name} {late}; its last rows may be missing")

    def _work(self) -> None:
        while (events := self._next()) is not None:
            try:
                self._tell(events)
            except Exception as error:  # a tracker may raise any exception
                self._switch_off("failed and is switched off; training continues", error)
        try:
            if self._begun:
                self._tracker.end(self._taken.ending(self._store, self._run))
        except Exception as error:
            self._switch_off("could not finish its record", error)

    def _switch_off(self, what: str, error: Exception) -> None:
        if self._off:
            return  # that it failed, or was late, was reported
        self._off = True
        cause = redact(f"{type(error).__name__}: {error}".strip())
        self._say(f"the tracker {self._name} {what}: {cause[:500]}")

    def _next(self) -> list[Event] | None:
        """Wait for events and return them; None at the end."""
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._closing)
            events = list(self._waiting)
            self._waiting.clear()
            self._waiting_steps = 0
        return events or None

    def _tell(self, events: list[Event]) -> None:
        rows: list[Row] = []
        media: list[MediaLogged] = []
        for event in events:
            if isinstance(event, RunStarted):
                known = TrackedRun(name=self._run, id=_identity(self._store, event), total_steps=event.total_steps)
                self._taken.begin(self._tracker.begin(known, params_of(event)))
                self._begun = True
            rows += self._taken.rows(event)
            media += self._taken.media(event)
        if rows and not self._off:
            self._tracker.log(rows)
        log_media = getattr(self._tracker, "log_media", None)
        if media and log_media is not None and not self._off:
            log_media(media)


class _TrackerPosition:
    """What a tracker has recorded, so that each step is sent once, and the result for the end."""

    def __init__(self) -> None:
        self._step = self._evaluated = 0
        self._utilization = UtilizationMeter()
        self._media = dict[str, int]()  # step of the last image or text of each name
        self._end = RunEnded(outcome="failed")
        self._checkpoint = ""

    def begin(self, step: int | None) -> None:
        """Set the last recorded step. The evaluation after this step may be missing."""
        self._step, self._evaluated = step or 0, (step or 0) - 1

    def rows(self, event: Event) -> Iterator[Row]:
        """Yield the rows of an event that are not recorded yet."""
        self._utilization.on(event)
        match event:
            case Steps():
                for step, values in _step_scalars(event, self._utilization):
                    if step > self._step:
                        self._step = step
                        yield Row(step=step, time_s=event.time_s, values=values)
            case Evaluated() if event.step > self._evaluated:
                self._evaluated = event.step
                values = {f"evaluation/{name}": value for name, value in event.metrics.items() if value == value}
                yield Row(step=event.step, time_s=event.time_s, values=values)
            case Checkpointed():
                self._checkpoint = event.path
            case RunEnded():
                self._end = event

    def media(self, event: Event) -> Iterator[MediaLogged]:
        """Yield an image or text that is not recorded yet."""
        if (
            isinstance(event, MediaLogged)
            and (event.image or event.text)
            and event.step > self._media.get(event.name, -1)
        ):
            self._media[event.name] = event.step
            yield event

    def ending(self, store: Store, run: str) -> RunResult:
        """Return how the session of the driver ended."""
        paths = {"folder": run, "report": f"{run}/report.html"}
        if self._checkpoint:
            paths["checkpoint"] = f"{run}/{self._checkpoint}"
        state: Any = self._end.outcome
        return RunResult(state=state, links={name: redact(store.uri_of(path)) for name, path in paths.items()})


def params_of(event: RunStarted) -> Mapping[str, str]:
    """Return the facts of job and plan that are not empty."""
    plan = plan_from(event.plan)
    facts = {"plan": plan.name, "workers": str(plan.workers)} if plan else {}
    job = {f"job.{name}": str(value) for name, value in event.shown_job.items() if str(value) not in _EMPTY}
    return {name: redact(value) for name, value in {**job, **facts, "cluster": event.cluster}.items() if value}


def _identity(store: Store, event: RunStarted) -> str:
    """Return the identity of a run since its last fresh start: created by the first driver, read by later ones."""
    folder = f"{event.run}/trackers/"
    tokens = [int(path.rpartition("/")[2]) for path, _ in store.list(folder)]
    token = event.token if event.fresh else max(tokens, default=event.token)
    path = f"{folder}{token:08d}"
    store.create(path, f"{event.run}-{uuid.uuid4().hex[:8]}".encode())  # unless the thread of another tracker did
    return store.get(path).decode()
