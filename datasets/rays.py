"""Delivery through Ray Data: a feeder actor that runs the pipeline, and the fetcher by which consumers ask it.

Blocks are found by their label, never by the order of arrival. The feeder keeps those of a bounded window; what lies
outside it, or was lost, is computed again by a pipeline that starts there.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, ObjectLostError, RayActorError

from trainwright.core.errors import DataError, HangError, ResourceError, TrainwrightError
from trainwright.datasets.columns import Arrays
from trainwright.datasets.index import Index
from trainwright.datasets.schedule import Schedule
from trainwright.datasets.sources import Dataset
from trainwright.datasets.stream import schedule_of

_CHUNK_ROWS = 1024  # of the global batch, in one chunk
_REPLAY_CHUNKS = 4  # kept behind what a rank asked for last
_AHEAD_CHUNKS = 4  # computed ahead of the first rank
_RETRY_S = 1.0
_SLACK_S = 30.0  # a consumer waits this much longer than the feeder, which knows more about the reason

Label = tuple[int, int]  # first step of a chunk, rank


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Blocks (reference, row) of a share, in order, or why there are none."""

    blocks: tuple[tuple[Any, int], ...] = ()
    error: TrainwrightError | None = None


@dataclass(kw_only=True)
class _Window:
    """What one pipeline has delivered so far and may still deliver. Changed by the event loop alone.

    Attributes:
        number: of the pipeline.
        start: first step of the pipeline.
        total: data ranks it deals to.
        parts: finished pieces by label.
        asked: by rank, the chunk asked for last.
        floors: by rank, the first chunk still kept.
        waits: consumers that wait for one of its shares.
        error: why the pipeline ended early.
    """

    number: int
    start: int
    total: int
    parts: dict[Label, dict[int, tuple[Any, int]]] = field(default_factory=dict)
    counts: dict[Label, int] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    floors: dict[int, int] = field(default_factory=dict)
    waits: int = 0
    error: TrainwrightError | None = None

    def complete(self, label: Label) -> bool:
        """All pieces of the share are here."""
        return label in self.counts and len(self.parts[label]) == self.counts[label]

    def wants(self, step: int, ahead: int) -> bool:
        """The chunk at `step` is not too far ahead of those asked for."""
        return step <= max(self.asked.values(), default=self.start) + ahead

    def covers(self, step: int, rank: int, total: int, ahead: int) -> bool:
        """The share is here or will come soon."""
        return total == self.total and self.floors.get(rank, self.start) <= step and self.wants(step, ahead)

    def trim(self, step: int, rank: int, replay: int) -> None:
        """Forget what this rank will not ask for again."""
        self.floors[rank] = max(self.floors.get(rank, self.start), step - replay)
        for label in [label for label in self.parts if label[1] == rank and label[0] < self.floors[rank]]:
            del self.parts[label], self.counts[label]


class Feeder:
    """The actor's class. One for each data set; asynchronous, so that any number of consumers may wait.

    Args:
        recipe: a pickled pipeline.Recipe.
        free: CPUs and GPUs that Ray Data may use.
    """

    def __init__(self, recipe: bytes, free: Mapping[str, float]) -> None:
        self._recipe, self._free = cloudpickle.loads(recipe), free
        self._stored = ray.put(recipe)
        self._window: _Window | None = None
        self._news = asyncio.Event()
        self._pipelines = itertools.count()

    async def admit(self, pipeline: int, step: int) -> bool:
        """Wait until pieces of the chunk at `step` are wanted of a pipeline; False where it was replaced."""
        while (window := self._window) is not None and window.number == pipeline:
            if window.wants(step, self._steps(_AHEAD_CHUNKS)):
                return True
            await self._news.wait()
        return False

    async def chunk(self, step: int, rank: int, total: int, deadline_s: float, lost: bool = False) -> Answer:
        """The share that data rank `rank` of `total` has of the chunk that starts at `step`.

        Args:
            step: first step of a chunk.
            rank: data rank.
            total: number of data ranks; another number is another pipeline.
            deadline_s: to wait for it.
            lost: the blocks given before are gone; compute them again.
        """
        until = time.monotonic() + deadline_s
        if lost and self._window is not None:
            self._window.trim(step + 1, rank, 0)
        try:
            while True:
                window = self._window
                if window is not None and window.covers(step, rank, total, self._steps(_AHEAD_CHUNKS)):
                    if window.complete((step, rank)):
                        return self._given(window, step, rank)
                    if window.error is not None:
                        self._window = None
                        return Answer(error=window.error)
                    await self._wait(until, window)
                elif window is None or not window.waits:
                    self._start(step, total)
                else:  # those who wait for the pipeline that runs are served first
                    await self._wait(until, None)
        except TimeoutError:
            return Answer(error=_late(step, rank, deadline_s, self._free))
        finally:
            self._tell()

    async def _wait(self, until: float, window: _Window | None) -> None:
        """Wait for news; counted among those who wait for `window`."""
        if window is not None:
            window.waits += 1
        try:
            await asyncio.wait_for(self._news.wait(), until - time.monotonic())
        finally:
            if window is not None:
                window.waits -= 1

    def _given(self, window: _Window, step: int, rank: int) -> Answer:
        parts = window.parts[step, rank]
        window.asked[rank] = step
        window.trim(step, rank, self._steps(_REPLAY_CHUNKS))
        return Answer(blocks=tuple(parts[number] for number in sorted(parts)))

    def _start(self, step: int, total: int) -> None:
        """Start a pipeline at a chunk; the one before ends at its next piece."""
        self._window = _Window(number=next(self._pipelines), start=step, total=total)
        arguments = self._window, asyncio.get_running_loop(), self._handle()
        threading.Thread(target=self._pump, args=arguments, name="trainwright-pump", daemon=True).start()

    def _pump(self, window: _Window, loop: asyncio.AbstractEventLoop, handle: Any) -> None:
        """Take blocks from the pipeline until it is replaced. Runs in a thread."""
        from trainwright.datasets import pipeline

        error: TrainwrightError
        try:
            pieces = self._recipe.pieces(window.start, window.total)
            gate = pipeline.Gate(handle, window.number)
            for block in pipeline.run(self._stored, pieces, self._free, gate):
                found = pipeline.labels(ray.get(block))
                loop.call_soon_threadsafe(self._arrived, window, block, found)
                if self._window is not window:
                    return
            error = DataError(
                "Ray Data ended before all data was delivered", remedy="run again with -v and look at its log"
            )
        except Exception as raised:  # of Ray Data: it goes to those who wait
            error = DataError(
                f"the Ray Data pipeline failed: {type(raised).__name__}",
                remedy="see the error above",
                detail=traceback.format_exc(),
            )
        loop.call_soon_threadsafe(self._ended, window, error)

    def _arrived(self, window: _Window, block: Any, found: list[Any]) -> None:
        for row, piece in enumerate(found):
            label = piece.step, piece.rank
            if piece.step >= window.floors.get(piece.rank, window.start):
                window.counts[label] = piece.parts
                window.parts.setdefault(label, {})[piece.part] = block, row
        self._tell()

    def _ended(self, window: _Window, error: TrainwrightError) -> None:
        window.error = error
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _handle(self) -> Any:
        return ray.get_runtime_context().current_actor

    def _steps(self, chunks: int) -> int:
        return int(chunks * self._recipe.length)


class RayFetcher:
    """A consumer's side of the feeder. Picklable; each consumer uses a copy of its own.

    Args:
        feeder: handle of the Feeder actor.
        schedule: of the steps.
        length: steps of a chunk.
        deadline_s: to wait for one share.
    """

    def __init__(self, feeder: Any, schedule: Schedule, length: int, deadline_s: float) -> None:
        self._feeder, self._schedule, self._length, self._deadline_s = feeder, schedule, length, deadline_s
        self._asked: dict[tuple[int, int, int], Any] = {}

    def fetch(self, step: int, rank: int, total: int) -> tuple[range, Arrays]:
        """Columns of the share that data rank `rank` of `total` has of the chunk that holds `step`, and that chunk.

        Raises:
            UserCodeError, DataError: as the transform or the source raised it, wherever that was.
            HangError: nothing came within the deadline.
        """
        chunk = self._schedule.chunk(step, self._length)
        until, lost = time.monotonic() + self._deadline_s, False
        asked = self._asked.pop((chunk.start, rank, total), None)
        self._asked = {key: reference for key, reference in self._asked.items() if key[0] == chunk.start}
        while True:
            try:
                asked = asked or self._ask(chunk.start, rank, total, lost)
                found = self._take(asked, chunk.start, rank)
                break
            except ObjectLostError:
                asked, lost = None, True
            except (ActorUnavailableError, RayActorError) as error:
                asked = None
                if getattr(error, "actor_init_failed", False):
                    raise DataError(
                        "the data set cannot be opened where Ray Data runs",
                        remedy="install what its functions import on every node",
                        detail=str(error),
                    ) from error
                if time.monotonic() > until:
                    raise HangError(f"the feeder is gone: {error}", remedy="run the same command again") from error
                time.sleep(_RETRY_S)
        if chunk.stop < self._schedule.total_steps:
            self._asked[chunk.stop, rank, total] = self._ask(chunk.stop, rank, total, False)
        return chunk, found

    def close(self) -> None:
        """End the feeder and its pipeline, for all consumers."""
        ray.kill(self._feeder)

    def _ask(self, step: int, rank: int, total: int, lost: bool) -> Any:
        return self._feeder.chunk.remote(step, rank, total, self._deadline_s, lost)

    def _take(self, asked: Any, step: int, rank: int) -> Arrays:
        from trainwright.datasets import pipeline

        try:
            answer: Answer = ray.get(asked, timeout=self._deadline_s + _SLACK_S)
            if answer.error is not None:
                raise answer.error
            blocks = ray.get([block for block, _ in answer.blocks], timeout=self._deadline_s)
        except GetTimeoutError as error:
            raise _late(step, rank, self._deadline_s, {}) from error
        found = [pipeline.content(block, row) for block, (_, row) in zip(blocks, answer.blocks, strict=True)]
        for piece in found:
            if piece.error is not None:
                raise piece.error
        return {name: np.concatenate([piece.columns[name] for piece in found]) for name in found[0].columns}

    def __reduce__(self) -> tuple[Any, ...]:
        return RayFetcher, (self._feeder, self._schedule, self._length, self._deadline_s)


def start_feeder(
    dataset: Dataset,
    index: Index,
    *,
    batch_size: int,
    cpus: float,
    gpus: float = 0.0,
    epochs: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    epoch_samples: int | None = None,
    columns: Iterable[str] | None = None,
    window: int | None = None,
    deadline_s: float = 300.0,
) -> RayFetcher:
    """Start the feeder of a heavy data set; the driver's part. Give the fetcher to every `Stream` of the run.

    Args:
        dataset: with a transform that asks for CPUs or GPUs.
        index: of the data set.
        batch_size: global; this and the rest as given to `Stream`.
        cpus: that Ray Data may use; the workers must have left them free.
        gpus: the same.
        deadline_s: for a consumer to wait for one share.

    Raises:
        ResourceError: a transform asks for more than Ray Data has.
    """
    from trainwright.datasets.pipeline import Recipe

    free = {"CPU": cpus, "GPU": gpus}
    for name, need in dataset.needs.items():
        if need > free[name]:
            raise ResourceError(
                f"a transform of {dataset!r} asks for {need:g} {name}s and {free[name]:g} are left for Ray Data",
                remedy=f"declare {free[name]:g} {name}s or fewer, or leave more: set fewer workers",
            )
    schedule = schedule_of(
        index, batch_size=batch_size, epochs=epochs, seed=seed, shuffle=shuffle, drop_last=drop_last,
        epoch_samples=epoch_samples, window=window,
    )  # fmt: skip
    length = max(_CHUNK_ROWS // batch_size, 1)
    names = None if columns is None else tuple(columns)
    recipe = Recipe(dataset=dataset, index=index, columns=names, schedule=schedule, length=length)
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Feeder)
    return RayFetcher(actor.remote(cloudpickle.dumps(recipe), free), schedule, length, deadline_s)


def _late(step: int, rank: int, deadline_s: float, free: Mapping[str, float]) -> HangError:
    given = " with " + ", ".join(f"{number:g} {name}s" for name, number in free.items()) if free else ""
    return HangError(
        f"Ray Data{given} delivered nothing within {deadline_s:g} s",
        where=f"data rank {rank}, step {step}",
        remedy="leave more CPUs free for Ray Data (fewer workers), or make the transform quicker",
    )
