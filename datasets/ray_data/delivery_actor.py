"""The delivery actor: it runs the pipelines of a run's heavy data sets, and keeps the blocks that they deliver.

Blocks are found by their label, never by the order of arrival. Those of a bounded window are kept; a pipeline that
starts there computes lost blocks, and those outside the window, again.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ObjectLostError

from trainwright.core.errors import DataError, HangError, TrainwrightError
from trainwright.core.pickling import loads
from trainwright.datasets.ops.row_transforms import function_name
from trainwright.datasets.ray_data import delivery_pipeline
from trainwright.datasets.ray_data.actor_pools import TransformPool, allocate_actors, pool_groups
from trainwright.datasets.ray_data.delivery_pipeline import PART_ROWS, DeliveryReply, PipelineSpec
from trainwright.datasets.ray_data.hang_timeout import BatchDurations
from trainwright.datasets.ray_data.piece_blocks import Piece, piece_summary

_REPLAY_CHUNKS = 4  # kept before the last chunk that a rank has requested
_AHEAD_CHUNKS = 4  # computed ahead of the first rank, or more
_AHEAD_PIECES = 2  # for each process of the stages, so that none is idle
_AHEAD_SHARE = 0.25  # of the cluster's object store, which the pieces ahead may take

_Label = tuple[int, int]  # first step of a chunk, rank


@dataclass(kw_only=True)
class _PipelineWindow:
    """What one pipeline has delivered so far and may still deliver. Only the event loop changes it."""

    number: int
    start: int  # first step
    total: int  # number of data ranks
    parts: dict[_Label, dict[int, Any]] = field(default_factory=dict)  # blocks of finished pieces, by label
    counts: dict[_Label, int] = field(default_factory=dict)
    delivered_steps: dict[int, int] = field(default_factory=dict)  # by rank, the last chunk delivered
    floors: dict[int, int] = field(default_factory=dict)  # by rank, the first chunk still kept
    waits: int = 0  # consumers that wait for one of its shares
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # pieces on their way through pool actors
    error: TrainwrightError | None = None  # why the pipeline ended early

    def complete(self, label: _Label) -> bool:
        """Whether all pieces of the share have arrived."""
        return label in self.counts and len(self.parts[label]) == self.counts[label]

    def wants(self, step: int, ahead: int) -> bool:
        """Whether the chunk at `step` is at most `ahead` steps after the last delivered one."""
        return step <= max(self.delivered_steps.values(), default=self.start) + ahead

    def covers(self, step: int, rank: int, total: int, ahead: int) -> bool:
        """Whether the share is here or will come soon."""
        return total == self.total and self.floors.get(rank, self.start) <= step and self.wants(step, ahead)

    def trim(self, step: int, rank: int, replay: int) -> None:
        """Forget what this rank will not ask for again."""
        self.floors[rank] = max(self.floors.get(rank, self.start), step - replay)
        for label in [label for label in self.parts if label[1] == rank and label[0] < self.floors[rank]]:
            del self.parts[label], self.counts[label]


@dataclass(frozen=True, kw_only=True)
class StageProgress:
    """The progress of a stage."""

    name: str  # of its function; `delivery_pipeline.READING` for the stage before the first heavy one
    slots: int  # processes that it may use at a time
    seconds: float  # of computation, over all processes
    elapsed_s: float  # since the first request of a piece

    @property
    def busy(self) -> float:
        """Fraction of the time that its processes computed, from 0 to 1."""
        return min(self.seconds / (self.slots * self.elapsed_s), 1.0) if self.elapsed_s > 0 else 0.0


class DeliveryActor:
    """Class of the actor: a `DatasetDelivery` for each heavy data set, and the pools of actors that they share.

    Asynchronous, so that any number of consumers may wait.

    Args:
        recipes: pickled `PipelineSpec` of each data set; its number here identifies a data set.
        free: CPUs and GPUs that Ray Data may use.
        piece_s: longest time that a pool actor may take for a piece; see `BatchDurations`.
    """

    def __init__(self, recipes: Sequence[bytes], free: Mapping[str, float], piece_s: float = math.inf) -> None:
        delivery_pipeline.allow_blocking_get()
        specs: list[PipelineSpec] = [loads(recipe) for recipe in recipes]
        stored = [ray.put(recipe) for recipe in recipes]
        sizes, left = allocate_actors(specs, free)
        self._pools = list[TransformPool]()
        self._notes, self._noted = list[str](), asyncio.Event()
        shared: dict[tuple[int, int], TransformPool] = {}
        for size, (step, slots) in zip(sizes, pool_groups(specs), strict=True):
            source, stage = slots[0]
            pace = BatchDurations(most_s=piece_s)
            pool = TransformPool(step=step, recipe=stored[source], stage=stage, size=size, pace=pace, note=self._note)
            self._pools.append(pool)
            shared.update(dict.fromkeys(slots, pool))
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        room_bytes = _AHEAD_SHARE * resources.get("object_store_memory", math.inf) / len(specs)
        light = sum(not recipe.read_by_one for recipe in specs)  # their readers hold CPUs side by side
        shares = {name: amount / max(light, 1) for name, amount in left.items()}
        self.feeders = []
        for number, recipe in enumerate(specs):
            pools = [shared[number, stage] for stage in recipe.on_actors]
            resources_of_reader = left if recipe.read_by_one else shares
            self.feeders.append(DatasetDelivery(number, recipe, stored[number], resources_of_reader, pools, room_bytes))

    async def open(self) -> None:
        """Start the actors of all pools, so that they open while the workers do."""
        for pool in self._pools:
            pool.open()

    async def admit(self, source: int, number: int, step: int) -> bool:
        """See `DatasetDelivery.admit`."""
        return await self.feeders[source].admit(number, step)

    async def chunk(
        self, source: int, step: int, rank: int, total: int, deadline_s: float, lost: bool = False
    ) -> DeliveryReply:
        """See `DatasetDelivery.chunk`."""
        return await self.feeders[source].chunk(step, rank, total, deadline_s, lost)

    async def stages(self, source: int) -> list[StageProgress]:
        """Return the progress of each stage of a data set."""
        return self.feeders[source].stages()

    async def news(self) -> list[str]:
        """Wait for notes to the user."""
        await self._noted.wait()
        notes, self._notes, self._noted = self._notes, [], asyncio.Event()
        return notes

    async def close(self) -> None:
        """End the actors of all pools, each after the `close` of its transform."""
        self._noted.set()  # ends a waiting `news`
        for pool in self._pools:
            await pool.close()

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._noted.set()


class DatasetDelivery:
    """Delivers one data set.

    Args:
        source: its number.
        recipe: its pipeline; `stored` references the pickled pipeline.
        free: CPUs and GPUs of tasks.
        pools: actors of its stages on actors.
        room_bytes: limit of the pieces ahead of the consumers; the pieces of one chunk may exceed it.
    """

    def __init__(
        self,
        source: int,
        recipe: PipelineSpec,
        stored: Any,
        free: Mapping[str, float],
        pools: list[TransformPool],
        room_bytes: float = math.inf,
    ) -> None:
        self._source, self._recipe, self._stored, self._free = source, recipe, stored, free
        self._pools = dict(zip(recipe.on_actors, pools, strict=True))
        self._room_bytes, self._piece_bytes = room_bytes, 0
        self._spent: dict[str, float] = {}
        self._begun_s = 0.0
        self._window: _PipelineWindow | None = None
        self._news = asyncio.Event()
        self._pipelines = itertools.count()

    def stages(self) -> list[StageProgress]:
        """Return the progress of each stage."""
        elapsed_s = time.monotonic() - self._begun_s if self._begun_s else 0.0
        slots = {delivery_pipeline.READING: self._recipe.readers(self._free)}
        for number in range(1, len(self._recipe.stages)):
            step, pool = self._recipe.heavy(number), self._pools.get(number)
            slots[function_name(step.function)] = (
                pool.size if pool else delivery_pipeline.max_concurrency(step, self._free)
            )
        return [
            StageProgress(name=name, slots=count, seconds=self._spent.get(name, 0.0), elapsed_s=elapsed_s)
            for name, count in slots.items()
        ]

    async def admit(self, number: int, step: int) -> bool:
        """Wait until a pipeline may compute the chunk at `step`. Returns False if it was replaced."""
        while (window := self._window) is not None and window.number == number:
            if window.wants(step, self._ahead()):
                return True
            await self._news.wait()
        return False

    async def chunk(self, step: int, rank: int, total: int, deadline_s: float, lost: bool = False) -> DeliveryReply:
        """Return the share of data rank `rank` of `total` in the chunk that starts at `step`.

        Args:
            total: number of data ranks; another number starts another pipeline.
            deadline_s: to wait for the share.
            lost: the blocks of an earlier answer are lost; compute them again.
        """
        end_s = time.monotonic() + deadline_s
        if lost and self._window is not None:
            self._window.trim(step + 1, rank, 0)
        try:
            while True:
                window = self._window
                if window is not None and window.covers(step, rank, total, self._ahead()):
                    if window.complete((step, rank)):
                        return self._answer(window, step, rank)
                    if window.error is not None:
                        self._window = None
                        return DeliveryReply(error=window.error)
                    await self._wait(end_s, window)
                elif window is None or not window.waits:
                    self._start(step, total)
                else:  # consumers of the current pipeline come first
                    await self._wait(end_s, None)
        except TimeoutError:
            resources = f" with {self._resources_text()}" if self._resources_text() else ""
            error = HangError(
                f"Ray Data{resources} delivered nothing within {deadline_s:g} s",
                where=f"data rank {rank}, step {step}",
                remedy="leave more CPUs free for Ray Data (fewer workers), or make the transform quicker",
            )
            return DeliveryReply(error=error)
        finally:
            self._notify()

    async def _wait(self, end_s: float, window: _PipelineWindow | None) -> None:
        """Wait for a change; counted among the consumers that wait for `window`."""
        if window is not None:
            window.waits += 1
        try:
            await asyncio.wait_for(self._news.wait(), end_s - time.monotonic())
        finally:
            if window is not None:
                window.waits -= 1

    def _resources_text(self) -> str:
        """Describe the resources, for an error."""
        pools = {pool.name: pool for pool in self._pools.values()}
        opening = [
            f"{pool.opening} of {pool.size} actors of {name} not open" for name, pool in pools.items() if pool.opening
        ]
        return ", ".join([*(f"{number:g} {name}s" for name, number in self._free.items()), *opening])

    def _answer(self, window: _PipelineWindow, step: int, rank: int) -> DeliveryReply:
        parts = window.parts[step, rank]
        window.delivered_steps[rank] = step
        window.trim(step, rank, self._steps(_REPLAY_CHUNKS))
        return DeliveryReply(blocks=tuple(parts[number] for number in sorted(parts)))

    def _start(self, step: int, total: int) -> None:
        """Start a pipeline at a chunk; the previous pipeline ends at its next piece."""
        self._begun_s = self._begun_s or time.monotonic()
        self._window = _PipelineWindow(number=next(self._pipelines), start=step, total=total)
        arguments = self._window, asyncio.get_running_loop(), self._handle()
        threading.Thread(target=self._pump, args=arguments, name="trainwright-pump", daemon=True).start()

    def _pump(self, window: _PipelineWindow, loop: asyncio.AbstractEventLoop, handle: Any) -> None:
        """Take blocks from the pipeline until it is replaced. Runs in a thread."""
        error: TrainwrightError
        try:
            pieces = self._recipe.pieces(window.start, window.total)
            gate = delivery_pipeline.ReadGate(handle, window.number, self._source)
            for block in delivery_pipeline.run_pipeline(self._stored, pieces, self._free, gate):
                loop.call_soon_threadsafe(self._take_block, window, block, piece_summary(ray.get(block)))
                if self._window is not window:
                    return
            error = DataError(
                "Ray Data ended before all data was delivered", remedy="run again with -v and look at its log"
            )
        except Exception as raised:  # an error of Ray Data, which the consumers raise
            error = delivery_pipeline.as_our_error(raised, "the Ray Data pipeline")
        loop.call_soon_threadsafe(self._ended, window, error)

    def _take_block(self, window: _PipelineWindow, block: Any, piece: Piece) -> None:
        """Pass a block from Ray Data through the stages on actors."""
        if not self._pools:
            self._arrived(window, block, piece)
            return
        task = asyncio.create_task(self._advance(window, block, piece))
        window.tasks.add(task)
        task.add_done_callback(window.tasks.discard)

    async def _advance(self, window: _PipelineWindow, block: Any, piece: Piece) -> None:
        """Pass a piece through the stages on actors."""
        try:
            for stage, pool in self._pools.items():
                result = await pool.compute(self._stored, block, stage, piece.label, lambda: self._window is window)
                if result is None:
                    return
                block, piece = result
            self._arrived(window, block, piece)
        except ObjectLostError:  # a node was lost: all consumers send new requests
            if self._window is window:
                self._window = None
                self._notify()
        except Exception as raised:
            self._failed(window, delivery_pipeline.as_our_error(raised, f"the actors of {self._recipe.dataset!r}"))

    def _arrived(self, window: _PipelineWindow, block: Any, piece: Piece) -> None:
        self._piece_bytes = max(self._piece_bytes, piece.size_bytes)
        for name, seconds in piece.spent:
            self._spent[name] = self._spent.get(name, 0.0) + seconds
        step, rank, _, part, parts = piece.label
        if step >= window.floors.get(rank, window.start):
            window.counts[step, rank] = parts
            window.parts.setdefault((step, rank), {})[part] = block
        self._notify()

    def _ended(self, window: _PipelineWindow, error: TrainwrightError) -> None:
        """Report the error after the last block of Ray Data, once all pieces have passed the actors."""
        if window.tasks:
            next(iter(window.tasks)).add_done_callback(lambda _: self._ended(window, error))
        else:
            self._failed(window, error)

    def _failed(self, window: _PipelineWindow, error: TrainwrightError) -> None:
        window.error = window.error or error
        self._notify()

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _handle(self) -> Any:
        return ray.get_runtime_context().current_actor

    def _ahead(self) -> int:
        """Return how many steps may be computed ahead: enough for all processes, within the memory limit."""
        chunk_rows = self._recipe.length * self._recipe.schedule.batch_size
        ranks = self._window.total if self._window else 1
        pieces = ranks * -(-chunk_rows // (ranks * PART_ROWS))  # of a chunk
        busy = _AHEAD_PIECES * sum(stage.slots for stage in self.stages()) / pieces
        room = self._room_bytes / max(self._piece_bytes, 1) / pieces
        return self._steps(max(int(min(max(busy, _AHEAD_CHUNKS), room)), 1))

    def _steps(self, chunks: int) -> int:
        return int(chunks * self._recipe.length)
