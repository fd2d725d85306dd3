"""Pools of actors for heavy transforms that are slow to open, such as a model: each actor opens its own once.

They belong to the delivery actor and outlive executions of Ray Data: a pipeline that starts at another step, another
number of data ranks, the next evaluation. Data sets with the same class and arguments share a pool. An actor that dies,
or is silent for many times as long as a piece took so far, is replaced, and its pieces are computed again; consumers
have not received any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import RayActorError, RayError

from trainwright.core.errors import HangError, ResourceError, TrainwrightError, UserCodeError
from trainwright.datasets.ops.row_transforms import BatchMap, StatefulFunction, function_name
from trainwright.datasets.ray_data.delivery_pipeline import PipelineSpec, as_our_error, open_stage, run_stage
from trainwright.datasets.ray_data.hang_timeout import CHECK_INTERVAL_S, BatchDurations, SilenceTimer
from trainwright.datasets.ray_data.piece_blocks import Piece, SharePart, piece_summary

MAX_DEATHS = 3  # in a row, while opening or with one piece, after which the user's code counts as the cause
_PIECES_IN_FLIGHT = 2  # pieces of an actor at a time, so that it does not wait for the next one
_CLOSE_S = 5.0  # for the user's `close`

_StageKey = tuple[int, int]  # number of a data set, number of a stage


class _TransformActor:
    """Class of a pool's actor: one object of the user's class, and the light transforms after it."""

    def __init__(self) -> None:
        self._function: Any = None

    def open(self, recipe: Sequence[Any], stage: int) -> TrainwrightError | str:
        """Open the heavy transform of a stage. Returns node and process, or the error."""
        try:
            self._function = open_stage(recipe[0], stage)
        except TrainwrightError as error:
            return error
        return f"{socket.gethostname()}, pid {os.getpid()}"

    def compute(self, recipe: Sequence[Any], block: pa.Table, stage: int) -> tuple[pa.Table, Piece]:
        """Apply a stage to the piece of a block. Returns the block, and the piece without its rows."""
        result = run_stage(recipe[0], block, stage)
        return result, piece_summary(result)

    def close(self) -> None:
        """Close the object of the user's class."""
        if isinstance(self._function, StatefulFunction):
            self._function.close()


@dataclass(kw_only=True, eq=False)
class _PendingPiece:
    """One piece on its way through a pool."""

    place: tuple[int, ...]  # in the order in which consumers need the pieces
    arguments: tuple[Any, ...]  # of `_TransformActor.compute`
    wanted: Callable[[], bool]  # whether a consumer still waits for it
    done: asyncio.Future[Any]  # result of `TransformPool.compute`
    deaths: int = 0  # of actors that computed it


@dataclass(kw_only=True, eq=False)
class _InFlight:
    """The pieces of an actor, in order. The actor computes the first; `silence` starts once it can begin."""

    works: list[_PendingPiece] = field(default_factory=list)
    silence: SilenceTimer = field(default_factory=lambda: SilenceTimer(looked_s=time.monotonic()))

    def add(self, work: _PendingPiece) -> None:
        """Add a piece."""
        if not self.works:
            self.silence.end(time.monotonic())
        self.works.append(work)

    def done(self, work: _PendingPiece) -> float:
        """Remove a finished piece, and return the seconds that it took."""
        self.works.remove(work)
        return self.silence.end(time.monotonic())

    async def silent(self, pace: BatchDurations) -> float:
        """Wait until the silence lasts too long, and return its limit in seconds."""
        while True:
            if self.works and self.silence.look(time.monotonic()) >= (limit_s := pace.limit_s(self.works[0].deaths)):
                return limit_s
            await asyncio.sleep(CHECK_INTERVAL_S)


@dataclass(kw_only=True, eq=False)
class TransformPool:
    """Actors for one heavy transform. Used within one event loop."""

    step: BatchMap  # the transform
    recipe: Any  # reference of a pickled `PipelineSpec` with the transform
    stage: int  # its number there
    size: int  # number of actors
    pace: BatchDurations  # durations of pieces, and their limit
    note: Callable[[str], object]  # called with a text when an actor is replaced
    _queue: asyncio.PriorityQueue[tuple[tuple[int, ...], int, _PendingPiece]] = field(
        default_factory=asyncio.PriorityQueue
    )
    _numbers: Any = field(default_factory=itertools.count)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _actors: list[Any] = field(default_factory=list)
    _open: int = 0
    _deaths: int = 0
    _failed: TrainwrightError | None = None

    @property
    def name(self) -> str:
        """Name of the transform, for messages."""
        return function_name(self.step.function)

    @property
    def opening(self) -> int:
        """Actors that are not open yet."""
        return self.size - self._open

    def open(self) -> None:
        """Start the actors, unless that was done."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._keep_running()) for _ in range(self.size)]

    async def compute(
        self, recipe: Any, block: Any, stage: int, label: SharePart, wanted: Callable[[], bool]
    ) -> tuple[Any, Piece] | None:
        """Return the output block of a stage, and its piece without the rows.

        Returns None if no consumer waits for it any more.

        Raises:
            UserCodeError, DataError: the user's class cannot be opened, or ends each process that it runs in.
            RayError: the input block is lost.
        """
        self.open()
        if self._failed is not None:
            raise self._failed
        done = asyncio.get_running_loop().create_future()
        place = (label.step, label.rank, label.part)
        self._enqueue(_PendingPiece(place=place, arguments=([recipe], block, stage), wanted=wanted, done=done))
        result: tuple[Any, Piece] | None = await done
        return result

    async def close(self) -> None:
        """End the actors, each after the `close` of its transform."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        closing = [asyncio.create_task(_suppress_ray_error(actor.close.remote())) for actor in self._actors]
        if closing:
            await asyncio.wait(closing, timeout=_CLOSE_S)
        for actor in self._actors:
            ray.kill(actor)

    def _enqueue(self, work: _PendingPiece) -> None:
        self._queue.put_nowait((work.place, next(self._numbers), work))

    async def _keep_running(self) -> None:
        """Keep one actor running: start another when it dies."""
        kind: Any = ray.remote(num_cpus=self.step.cpus, num_gpus=self.step.gpus, max_restarts=0, max_task_retries=0)(
            _TransformActor
        )
        while self._failed is None:
            actor = kind.remote()
            self._actors.append(actor)
            try:
                if where := await self._open_on_actor(actor):
                    self._open += 1
                    try:
                        await self._serve(actor, where)
                    finally:
                        self._open -= 1
            except Exception as error:  # the task's result is never read
                self._fail(as_our_error(error, f"the actors of the transform {self.name}"))
            self._actors.remove(actor)
            ray.kill(actor)

    async def _open_on_actor(self, actor: Any) -> str:
        """Open the transform on an actor. Returns node and process; an empty text if it failed or died."""
        try:
            answer: TrainwrightError | str = await actor.open.remote([self.recipe], self.stage)
        except RayActorError as death:
            self._deaths += 1
            if self._deaths >= MAX_DEATHS:
                self._fail(_lost_actor_error(self.name, "died", "while it was opened", str(death)))
            return ""
        if isinstance(answer, TrainwrightError):
            self._fail(answer)
            return ""
        self._deaths = 0
        return answer

    async def _serve(self, actor: Any, where: str) -> None:
        """Send pieces to an actor until it dies or hangs, and put its pieces back in the queue."""
        flight = _InFlight()
        tasks = [asyncio.create_task(self._compute_pieces(actor, flight)) for _ in range(_PIECES_IN_FLIGHT)]
        tasks.append(asyncio.create_task(self._watch(flight)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        end = next(error for error in ended if isinstance(error, Exception))
        if not isinstance(end, RayActorError | HangError):
            raise end
        how, why = ("hung", end.what) if isinstance(end, HangError) else ("died", "")
        again = f", and what it had ({len(flight.works)} pieces) begins again" if flight.works else ""
        self.note(f"an actor of {self.name} {how} ({where}){why and f': {why}'}; it is replaced{again}")
        for number, work in enumerate(flight.works):
            work.deaths += number == 0  # the other pieces waited for this one
            if work.deaths < MAX_DEATHS:
                self._enqueue(work)
            else:
                when = f"each time it was given this batch ({_rows(work)})"
                work.done.set_exception(_lost_actor_error(self.name, how, when, why or str(end)))

    async def _compute_pieces(self, actor: Any, flight: _InFlight) -> None:
        while True:
            _, _, work = await self._queue.get()
            if not work.wanted():
                work.done.set_result(None)
                continue
            flight.add(work)
            try:
                block, piece = actor.compute.options(num_returns=2).remote(*work.arguments)
                result = block, await piece
            except RayActorError:
                raise
            except RayError as error:
                work.done.set_exception(error)
            else:
                work.done.set_result(result)
            self.pace.took(flight.done(work))

    async def _watch(self, flight: _InFlight) -> None:
        """Raise HangError once an actor is silent for too long."""
        limit_s = await flight.silent(self.pace)
        raise HangError(f"nothing came of {_rows(flight.works[0])} within {limit_s:g} s{self.pace.usual}")

    def _fail(self, error: TrainwrightError) -> None:
        """Fail all waiting pieces, and later ones: no actor can be opened."""
        self._failed = self._failed or error
        while not self._queue.empty():
            self._queue.get_nowait()[2].done.set_exception(self._failed)


def pool_groups(recipes: Sequence[PipelineSpec]) -> list[tuple[BatchMap, list[_StageKey]]]:
    """Return heavy transforms on actors, each with the stages of its pool: the same class, arguments and needs."""
    groups: dict[tuple[Any, ...], tuple[BatchMap, list[_StageKey]]] = {}
    for source, recipe in enumerate(recipes):
        for stage in recipe.on_actors:
            step = recipe.heavy(stage)
            key = getattr(step.function, "key", (source, stage)), step.cpus, step.gpus
            groups.setdefault(key, (step, []))[1].append((source, stage))
    return list(groups.values())


def allocate_actors(recipes: Sequence[PipelineSpec], free: Mapping[str, float]) -> tuple[list[int], dict[str, float]]:
    """Divide the CPUs and GPUs for Ray Data: return the actors of each of `pool_groups`, and the rest for tasks.

    Each pool gets one actor, and further ones in turn while resources are left. The tasks count as one more pool, whose
    members need as much as the largest task.

    Raises:
        ResourceError: the resources do not suffice for one each.
    """
    first = [step for step, _ in pool_groups(recipes)]
    tasks = [recipe.heavy(stage) for recipe in recipes for stage in range(1, recipe.on_actors.start)]
    members = [step.needs for step in first]
    if tasks:
        members.append({name: max(step.needs[name] for step in tasks) for name in free})
    for name in free:
        _require_resources(name, sum(needs[name] for needs in members), free[name], [*first, *tasks])
    counts, left = [0] * len(members), dict(free)

    def fits(needs: Mapping[str, float]) -> bool:
        return all(left[name] + 1e-6 >= needs[name] for name in left)

    while any(map(fits, members)):
        for number, needs in enumerate(members):
            if fits(needs):
                left = {name: left[name] - needs[name] for name in left}
                counts[number] += 1
    for needs, count in zip(members[len(first) :], counts[len(first) :], strict=True):
        left = {name: left[name] + count * needs[name] for name in left}
    return counts[: len(first)], left


def _require_resources(name: str, need: float, available: float, steps: Sequence[BatchMap]) -> None:
    if need <= available + 1e-6:
        return
    asking = list(dict.fromkeys(function_name(step.function) for step in steps if step.needs[name]))
    raise ResourceError(
        f"{_asking_text(asking)} for {need:g} {name}s and {available:g} are left for Ray Data",
        where="map_batches",
        remedy=f"declare {available:g} {name}s or fewer in all, or leave more: set fewer workers",
    )


def _asking_text(names: Sequence[str]) -> str:
    """`the transform a asks`, `the transforms a and b ask`."""
    if len(names) == 1:
        return f"the transform {names[0]} asks"
    return f"the transforms {', '.join(names[:-1])} and {names[-1]} ask"


def _rows(work: _PendingPiece) -> str:
    step, rank, part = work.place
    return f"rows {part} of data rank {rank} at step {step}"


def _lost_actor_error(name: str, how: str, when: str, detail: str) -> UserCodeError:
    remedies = {
        "died": "look for too little memory, of the machine or the accelerator, or a crash in native code",
        "hung": "look for a deadlock, or raise hang_deadline_s to twice what a batch may take",
    }
    return UserCodeError(
        f"the process of the transform {name} {how} {MAX_DEATHS} times {when}",
        where="Ray Data",
        remedy=remedies[how],
        detail=detail,
    )


async def _suppress_ray_error(closing: Any) -> None:
    """Wait for an actor's `close`; an actor that dies of it is closed as well."""
    with contextlib.suppress(RayError):
        await closing
