"""A pool of Ray actors that compute ranges of rows. The range of a lost actor goes to another one.

An actor that is silent for many times as long as a batch took so far counts as lost. Storing a part has the timeout of
the store (`trainwright.storage.object_store`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from trainwright.core.errors import HangError, ResourceError, StorageError, TrainwrightError, WorkerLost
from trainwright.datasets.ray_data.hang_timeout import CHECK_INTERVAL_S, BatchDurations, SilenceTimer
from trainwright.inference.prediction_worker import (
    PredictorConfig,
    PredictorProcess,
    Range,
    StoredPart,
    check_schema,
    located_error,
)
from trainwright.ray_cluster.placement_groups import worker_resources
from trainwright.strategies.common.user_code_errors import first_line

_MAX_FAILED_STARTS = 3  # processes in a row that may end before they are ready
_START_S = 600.0  # to import the framework and load a checkpoint


class RangeQueue:
    """The ranges that wait for a worker.

    Args:
        ranges: to be computed, in order.
        attempts: workers that may be lost with one range before all is given up.
    """

    def __init__(self, ranges: Iterable[Range], attempts: int) -> None:
        self._waiting = deque(ranges)
        self._attempts = attempts
        self._out: set[Range] = set()
        self._lost: dict[Range, list[str]] = {}

    @property
    def open(self) -> int:
        """Ranges that are not done."""
        return len(self._waiting) + len(self._out)

    def take(self) -> Range | None:
        """Return the next range to compute; None while workers have all."""
        if not self._waiting:
            return None
        part = self._waiting.popleft()
        self._out.add(part)
        return part

    def done(self, part: Range) -> None:
        """Mark a range as computed and stored."""
        self._out.remove(part)

    def losses(self, part: Range) -> int:
        """Return how often a worker was lost with a range."""
        return len(self._lost.get(part, ()))

    def lost(self, part: Range, node: str, error: TrainwrightError) -> None:
        """Put a range whose worker was lost, or could not store it, at the front of the queue.

        Raises:
            WorkerLost: that happened too often with this range; names range and nodes. A StorageError as it is.
        """
        self._out.remove(part)
        tries = self._lost.setdefault(part, [])
        tries.append(node)
        if len(tries) < self._attempts:
            self._waiting.appendleft(part)
            return
        if isinstance(error, StorageError):
            raise error
        look = "at these rows and at the memory of the nodes, or set a smaller batch_size"
        if isinstance(error, HangError):
            look = "for a deadlock in the model or the transforms of the data, or raise hang_deadline_s"
        raise WorkerLost(
            f"{part} were given up: {len(tries)} workers were lost with them, the last because {error.what}",
            where=f"{part}; on {', '.join(tries)}",
            remedy=f"look {look}; the parts that are done stay, and the same call goes on from them",
            detail=error.detail,
        )


@dataclass(kw_only=True, eq=False)
class _PoolActor:
    """One actor, and what it computes."""

    actor: Any
    phase: str = "placing"  # `placing`, `loading`, `idle` or `busy`
    answer: Any = None  # reference to the next answer, or the generator of a range's answers
    node: str = "a node that is not known yet"
    part: Range | None = None  # the range that it computes
    rows: int = 0  # of the range that are computed
    # time since its last answer
    silence: SilenceTimer = field(default_factory=lambda: SilenceTimer(looked_s=time.monotonic()))

    @property
    def computing(self) -> Range | None:
        """Its range, while the next answer is a batch."""
        return self.part if self.part is not None and self.rows < self.part.rows else None


class PredictorPool:
    """Computes all ranges of some work. One thread; `run` blocks.

    Args:
        order: configuration of each process.
        size: processes at most.
        ranges: to be computed, in order.
        attempts: workers that may be lost with one range before all is given up.
        place_s: longest time for the cluster to start a process.
        hang_s: longest time for the next batch of a range, and for storing a part.
        schema: types by column name of parts that are there already; empty when there are none.
        on_rows: told how many rows were computed, or are lost again (negative).
        on_note: told what went wrong and was mended, and which rows could not be read.
    """

    def __init__(
        self,
        order: PredictorConfig,
        size: int,
        ranges: Iterable[Range],
        *,
        attempts: int,
        place_s: float,
        hang_s: float,
        schema: Mapping[str, str],
        on_rows: Callable[[int], object],
        on_note: Callable[[str], object],
    ) -> None:
        self._order, self._size, self._work = ray.put(order), size, RangeQueue(ranges, attempts)
        self._place_s, self._hang_s = place_s, hang_s
        self._schema, self._on_rows, self._on_note = schema, on_rows, on_note
        options = {**worker_resources(order.plan.placement), "max_restarts": 0, "max_task_retries": 0}
        self._class: Any = ray.remote(scheduling_strategy="SPREAD", **options)(PredictorProcess)
        self._members: list[_PoolActor] = []
        self._durations = BatchDurations(most_s=hang_s)
        self._failed_starts = 0

    def run(self) -> None:
        """Block until every range is stored; the processes have ended when it returns.

        Raises:
            ResourceError: the cluster started none of the processes in time.
            WorkerLost, HangError: processes were lost with a range, or before they were ready, too often.
            TrainwrightError: an error of the user's code, the data or the store.
        """
        try:
            while self._work.open:
                self._start_actors()
                self._wait_for_answers()
        finally:
            for member in self._members:
                ray.kill(member.actor)
            self._members.clear()

    def _start_actors(self) -> None:
        """Start processes while there is work for more, and give ranges to idle ones."""
        while len(self._members) < min(self._size, self._work.open):
            actor = self._class.remote()
            self._members.append(_PoolActor(actor=actor, answer=actor.hello.remote()))
        for member in self._members:
            part = self._work.take() if member.phase == "idle" else None
            if part is not None:
                answers = member.actor.compute.options(num_returns="streaming").remote(part)
                self._ask(member, "busy", answers)
                member.part, member.rows = part, 0

    def _ask(self, member: _PoolActor, phase: str, answer: Any) -> None:
        member.phase, member.answer = phase, answer
        member.silence.end(time.monotonic())

    def _wait_for_answers(self) -> None:
        """Wait for the next answer or deadline, and act on it."""
        waiting = {member.answer: member for member in self._members if member.answer is not None}
        soonest = min(self._limit_s(member) - member.silence.seconds for member in waiting.values())
        ray.wait(list(waiting), num_returns=1, timeout=min(max(soonest, 0.0), CHECK_INTERVAL_S))
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)  # all, so that none seems silent
        for answer in ready:
            self._handle_answer(waiting[answer])
        now = time.monotonic()
        late = [member for member in waiting.values() if member.answer is not None and member in self._members]
        for member in late:
            if member.silence.look(now) >= self._limit_s(member):
                self._handle_timeout(member)

    def _limit_s(self, member: _PoolActor) -> float:
        if member.computing is not None:
            return self._durations.limit_s(self._work.losses(member.computing))
        limits = {"placing": self._place_s, "loading": max(_START_S, self._hang_s)}
        return limits.get(member.phase, self._hang_s)

    def _handle_answer(self, member: _PoolActor) -> None:
        """Handle one answer."""
        try:
            answer = ray.get(next(member.answer) if member.phase == "busy" else member.answer)
        except RayTaskError as error:
            raise located_error(error, member.node) from error
        except RayError as error:
            self._actor_lost(member, WorkerLost(f"the process ended: {first_line(error)}", where=member.node))
            return
        took_s = member.silence.end(time.monotonic())
        if isinstance(answer, TrainwrightError):
            self._failed(member, answer)
        elif isinstance(answer, str):
            member.node = answer
            self._ask(member, "loading", member.actor.load.remote(self._order))
        elif isinstance(answer, StoredPart):
            self._stored(member, answer)
        elif answer is None:
            self._ask(member, "idle", None)
        else:
            self._durations.took(took_s)
            member.rows += answer
            self._on_rows(answer)

    def _stored(self, member: _PoolActor, answer: StoredPart) -> None:
        assert member.part is not None, "only a busy actor stores"
        check_schema(self._schema or answer.schema, answer.schema, member.part)
        self._schema = self._schema or answer.schema
        if answer.note:
            self._on_note(answer.note)
        self._work.done(member.part)
        member.part, self._failed_starts = None, 0
        self._ask(member, "idle", None)

    def _failed(self, member: _PoolActor, error: TrainwrightError) -> None:
        """Raise the error of a process, unless another process may reach the store that this one could not."""
        if not isinstance(error, StorageError) or member.part is None:
            raise error
        self._requeue(member, error)
        self._ask(member, "idle", None)

    def _handle_timeout(self, member: _PoolActor) -> None:
        """No answer came in time."""
        limit_s = self._limit_s(member)
        if member.phase != "placing":
            usual = self._durations.usual if member.computing is not None else ""
            self._actor_lost(member, HangError(f"no answer for {limit_s:g} s{usual}", where=member.node))
            return
        placed = sum(other.phase != "placing" for other in self._members)
        if not placed:
            raise ResourceError(
                f"the cluster started none of {len(self._members)} processes within {limit_s:g} s",
                where="predict",
                remedy="wait until other jobs have ended, set fewer workers, or raise place_deadline_s",
            )
        self._remove(member)
        self._size = placed
        self._on_note(f"continuing with {placed} workers: the cluster had no room for more within {limit_s:g} s")

    def _actor_lost(self, member: _PoolActor, error: TrainwrightError) -> None:
        """Handle a process that has ended, or that hangs and is ended."""
        self._remove(member)
        if member.part is not None:
            self._on_note(f"{member.part} start again on another worker: {error.what} ({member.node})")
            self._requeue(member, error)
            return
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            raise WorkerLost(
                f"{self._failed_starts} processes were lost before they were ready, the last because {error.what}",
                where=member.node,
                remedy="look at the memory of the nodes; verbose=True shows what the processes wrote",
            )

    def _requeue(self, member: _PoolActor, error: TrainwrightError) -> None:
        """Put the actor's range back in the queue. Raises WorkerLost or StorageError where it was lost too often."""
        part, rows = member.part, member.rows
        assert part is not None, "only a busy actor has a range"
        member.part, member.rows = None, 0
        self._on_rows(-rows)
        self._work.lost(part, member.node, error)

    def _remove(self, member: _PoolActor) -> None:
        self._members.remove(member)
        ray.kill(member.actor)
