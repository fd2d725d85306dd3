"""TensorBoard files, written from the events of a run.

The files are TFRecord files of messages of `tensorflow/core/util/event.proto` and `.../framework/summary.proto`. The
existing writers import torch or TensorFlow, which would load a framework into the driver of every job.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

from trainwright.core.errors import StorageError
from trainwright.core.events import Checkpointed, Evaluated, Event, Formed, Measured, RunEnded, RunStarted, Steps
from trainwright.core.tfrecord_framing import frame, message_class
from trainwright.storage.object_store import Store

MAX_WAITING_BYTES = 64 << 20  # limit of bytes that wait for the store
_START = 1  # SessionLog.START
_SCHEMA = {
    "Value": {"tag": (1, "string"), "simple_value": (2, "oneof float")},
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
    """An event listener that writes scalars to `<run>/tensorboard`.

    In a folder one file grows during the run. An object store cannot append, so each checkpoint and the end add a file;
    TensorBoard reads the files of a directory in order of their names. After a resume or a recovery the curves continue
    at the resumed step, without repeated points.

    Args:
        store: where the run is stored.
        run: name of the run.
    """

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._prefix = store, f"{run}/tensorboard"
        self._folder = _folder(store.uri_of(self._prefix))
        self._token = self._part = 0
        self._last_s = 0.0
        self._buffer = bytearray()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainwright-tensorboard")
        self._writes: deque[Future[int]] = deque()
        self._waiting_bytes = 0

    def on(self, event: Event) -> None:
        """Take one event. Files are written by a separate thread: a network folder may block."""
        self._last_s = event.time_s
        match event:
            case RunStarted():
                self._token, self._part = event.token, 0
            case Formed():
                self._add(_session_start(event.step + 1, event.time_s))
            case Steps():
                for step, scalars in step_scalars(event):
                    self._add(_scalar_event(step, event.time_s, scalars))
            case Measured() if event.noise:
                self._add(_scalar_event(event.step, event.time_s, {"train/gradient_noise_scale": event.noise["scale"]}))
            case Evaluated():
                scalars = {f"evaluation/{name}": value for name, value in event.metrics.items()}
                self._add(_scalar_event(event.step, event.time_s, scalars))
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


def step_scalars(event: Steps) -> list[tuple[int, dict[str, float]]]:
    """Return the scalars of each step; those that are not finite are left out."""
    rows = []
    norms = event.gradient_norm or [None] * len(event.step)
    for index, step in enumerate(event.step):
        step_s, norm = event.step_s[index], norms[index]
        scalars = {
            "train/loss": event.loss[index],
            "train/learning_rate": event.learning_rate[index],
            "train/gradient_norm": math.nan if norm is None else norm,
            "speed/samples_per_s": event.samples[index] / step_s if step_s > 0 else math.nan,
            "speed/wait_share": event.wait_s[index] / step_s if step_s > 0 else math.nan,
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


def _event(time_s: float, **fields: Any) -> bytes:
    serialized: bytes = _event_class()(wall_time=time_s, **fields).SerializeToString()
    return serialized


@cache
def _event_class() -> Any:
    return message_class("Event", _SCHEMA)
