"""Calls between the processes of Ray Train's workers, whose own actors offer no methods to call.

An actor passes them on: rank 0 calls any rank through a `RankHandle`, as it would call an actor, and each rank carries
out its calls on threads of its own (`RankCalls`). The actor ends with rank 0's process.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import itertools
import os
import sys
import threading
import traceback
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import cloudpickle
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainwright.core.errors import ResourceError, TrainwrightError, WorkerLost
from trainwright.driver.messages import FinishRun
from trainwright.runtime.takeover import NAMESPACE
from trainwright.runtime.worker_actor import PrintCapture, WorkerCalls, WorkerSlot
from trainwright.worker.worker import visible_devices
from trainwright.worker.worker_config import WorkerConfig

_LAST_MESSAGE_S = 10.0  # for the other ranks to receive the last message
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # environment variable
_PING_S = 0.5  # between two looks at whether a process lives


@dataclass(frozen=True, kw_only=True)
class TrainWorker:
    """One worker of Ray Train."""

    rank: int
    node_id: str
    run: str
    accelerator: str = ""  # Ray's resource of its accelerators, such as `GPU`; empty without any
    accelerators: tuple[str, ...] = ()  # their ids on that node


# --- The actor --------------------------------------------------------------------------------------------------------


class _CallBroker:
    """Knows the workers of all ranks, and passes calls to them and their answers back."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._workers: dict[int, TrainWorker] = {}
        self._processes: dict[int, Any] = {}  # handles of Ray Train's actors
        self._changed = asyncio.Condition()
        self._calls: defaultdict[int, asyncio.Queue[Any]] = defaultdict(asyncio.Queue)  # by rank, in order
        self._early: defaultdict[int, dict[int, Any]] = defaultdict(dict)  # by rank and number: they overtook others
        self._next: defaultdict[int, int] = defaultdict(int)  # by rank: the number of the next call
        self._answers: dict[tuple[int, int], asyncio.Future[Any]] = {}  # by rank and number of the call

    async def register(self, worker: TrainWorker, process: Any) -> None:
        async with self._changed:
            self._workers[worker.rank], self._processes[worker.rank] = worker, process
            self._changed.notify_all()

    async def workers(self) -> list[TrainWorker]:
        """Return the workers of all ranks when all are registered."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._workers) == self._size)
            return list(self._workers.values())

    async def call(self, rank: int, number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        """Return the answer of a rank, which gets its calls in the order of their numbers: Ray keeps none."""
        answer = self._answers[rank, number] = asyncio.get_running_loop().create_future()
        early = self._early[rank]
        early[number] = (number, method, arguments)
        while self._next[rank] in early:
            self._calls[rank].put_nowait(early.pop(self._next[rank]))
            self._next[rank] += 1
        return await answer

    async def next_call(self, rank: int) -> tuple[int, str, tuple[Any, ...]]:
        """Return the next call of a rank when there is one: its number, method and arguments."""
        call: tuple[int, str, tuple[Any, ...]] = await self._calls[rank].get()
        return call

    async def answer(self, rank: int, number: int, value: Any, error: TrainwrightError | None) -> None:
        answer = self._answers.pop((rank, number), None)
        if answer is None:
            return  # of a rank that was given up
        answer.set_result(value) if error is None else answer.set_exception(error)

    async def live(self, rank: int) -> None:
        """Fail when the process of a rank has ended, and so do its calls under way."""
        try:
            while True:
                await self._processes[rank].__ray_ready__.remote()
                await asyncio.sleep(_PING_S)
        except RayError as error:
            for called in [called for called in self._answers if called[0] == rank]:
                self._answers.pop(called).set_exception(error)
            raise


_BROKER_ACTOR: Any = ray.remote(num_cpus=0, max_restarts=0)(_CallBroker)
"""The actor class. It ends with rank 0's process, and with Ray Train's placement group."""


class RankHandle:
    """The process of a rank as the driver calls it: `handle.method.remote(...)`, like the handle of an actor.

    Args:
        numbers: of the calls of this rank, from 0 on.
    """

    def __init__(self, broker: Any, rank: int, numbers: Iterator[int]) -> None:
        self._broker, self._rank, self._numbers = broker, rank, numbers

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=partial(self._remote, method))

    def _remote(self, method: str, *arguments: Any) -> Any:
        if method in ("live", "notice"):  # notices of preemption are Ray Train's
            return self._broker.live.remote(self._rank)
        return self._broker.call.remote(self._rank, next(self._numbers), method, arguments)


class RankChannel:
    """One rank's end of the channel."""

    def __init__(self, broker: Any, rank: int, size: int) -> None:
        self._broker, self.rank, self._size = broker, rank, size
        self._handles = [RankHandle(broker, each, itertools.count()) for each in range(size)]

    @classmethod
    def open(cls, group: PlacementGroup) -> RankChannel:
        """Open the channel; every rank calls it equally often.

        Raises:
            ResourceError: this is the first version of Ray Train, which has no collectives.
        """
        train: Any = importlib.import_module("ray.train")
        try:
            collective: Any = importlib.import_module("ray.train.collective")
        except ImportError as error:
            raise ResourceError(
                "trainwright needs the second version of Ray Train",
                where="RAY_TRAIN_V2_ENABLED=0",
                remedy="unset RAY_TRAIN_V2_ENABLED: Ray 2.60 uses that version by default",
            ) from error
        context = train.get_context()
        rank, size, broker = context.get_world_rank(), context.get_world_size(), None
        name = f"trainwright-channel/{uuid.uuid4().hex[:12]}"
        if rank == 0:
            options = {"name": name, "namespace": NAMESPACE, "max_concurrency": 32 * size + 8}
            where = PlacementGroupSchedulingStrategy(group)
            broker = _BROKER_ACTOR.options(scheduling_strategy=where, **options).remote(size)
        name = collective.broadcast_from_rank_zero(name)
        return cls(broker or ray.get_actor(name, namespace=NAMESPACE), rank, size)

    def register(self, worker: TrainWorker) -> None:
        """Tell rank 0 what this rank has."""
        self._ask(self._broker.register.remote(worker, ray.get_runtime_context().current_actor))

    def workers(self) -> list[TrainWorker]:
        """Wait for the workers of all ranks and return them."""
        found: list[TrainWorker] = self._ask(self._broker.workers.remote())
        return found

    def handle(self, rank: int) -> RankHandle:
        """Return the handle of a rank's process."""
        return self._handles[rank]

    def send(self, message: Any) -> None:
        """Send a message from rank 0 to all other ranks."""
        self._tell(message, range(1, self._size))

    def send_last(self, message: Any) -> None:
        """Send the last message to all ranks and wait until it is received: the actor ends with this object."""
        sent = self._tell(message, range(self._size))
        ray.wait(sent, num_returns=len(sent), timeout=_LAST_MESSAGE_S)

    def next_call(self) -> tuple[int, str, tuple[Any, ...]]:
        """Wait for the next call of this rank. Raises WorkerLost if rank 0 ends first."""
        call: tuple[int, str, tuple[Any, ...]] = self._ask(self._broker.next_call.remote(self.rank))
        return call

    def answer(self, number: int, value: Any = None, error: TrainwrightError | None = None) -> None:
        """Answer a call, or let it fail."""
        self._ask(self._broker.answer.remote(self.rank, number, value, error))

    def _tell(self, message: Any, ranks: range) -> list[Any]:
        data = cloudpickle.dumps(message)
        return [self.handle(rank).told.remote(data) for rank in ranks]

    def _ask(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except RayError as error:
            raise WorkerLost(
                "rank 0 of Ray Train, which drives the run, has ended",
                where=f"rank {self.rank}",
                remedy="set FailureConfig(max_failures=...): Ray Train then starts again, and the run continues",
            ) from error


# --- A rank carries out its calls -------------------------------------------------------------------------------------


_THREADS: Mapping[str, int] = {"steps": 1, "upload": 1, "keep": 1, "watch": 4, "printed": 3, "told": 1}
_OTHER_THREADS = {"stop": "watch", "interrupt": "watch", "beat": "watch"}  # the rest runs on the thread of steps
_CLOSE_S = 10.0  # for the thread of steps to leave the group at the end


class RankCalls:
    """Carries out what rank 0 asks of this rank: calls of the driver to its worker, and messages.

    Args:
        channel: of this rank.
        told: takes a message, on a thread of its own, in the order of the messages. `FinishRun` is the last one.
    """

    def __init__(self, channel: RankChannel, told: Callable[[Any], None]) -> None:
        self._channel, self._told = channel, told
        self._pools = {name: ThreadPoolExecutor(count, f"trainwright-{name}") for name, count in _THREADS.items()}
        self._worker: TrainWorkerCalls | None = None
        self._failure: Future[None] = Future()
        self._over = threading.Event()
        threading.Thread(target=self._serve, name="trainwright-calls", daemon=True).start()

    def wait(self, awaited: Future[Any]) -> None:
        """Wait for a future. Raises the error of a message that failed, and WorkerLost if rank 0 has ended."""
        wait((awaited, self._failure), return_when=FIRST_COMPLETED)
        if not awaited.done():
            self._failure.result()

    def _serve(self) -> None:
        try:
            while not self._over.is_set():
                number, method, arguments = self._channel.next_call()
                pool = self._pools.get(_OTHER_THREADS.get(method, method), self._pools["steps"])
                pool.submit(self._carry_out, number, method, arguments)
        except Exception as error:
            self._fail(error)

    def _carry_out(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        own = {"begin": self._begin, "told": self._receive}
        try:
            try:
                call: Any = own.get(method) or getattr(self._worker, method)
                value = call(*map(_fetched, arguments))
            except Exception as error:
                text, detail = f"{type(error).__name__}: {error}", traceback.format_exc()
                self._channel.answer(number, error=TrainwrightError(text, where=f"{method} of a rank", detail=detail))
            else:
                self._channel.answer(number, value)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not (self._over.is_set() or self._failure.done()):
            self._failure.set_exception(error)

    def _begin(self, config: WorkerConfig, place: WorkerSlot, token: int) -> None:
        self._worker = TrainWorkerCalls(config, place, token, PrintCapture(sys.stdout))

    def _receive(self, data: bytes) -> None:
        message = cloudpickle.loads(data)
        if isinstance(message, FinishRun):
            self._close(patient=message.error is None)
        try:
            self._told(message)
        except Exception as error:
            self._fail(error)

    def _close(self, *, patient: bool) -> None:
        """Free what the worker holds: Ray Train's process outlives the run. After an error, steps may hang."""
        self._over.set()
        if self._worker is not None:
            closed = self._pools["steps"].submit(self._worker.close)
            wait([closed], timeout=_CLOSE_S if patient else 0.0)
        for pool in self._pools.values():
            pool.shutdown(wait=False)


def _fetched(argument: Any) -> Any:
    return ray.get(argument) if isinstance(argument, ray.ObjectRef) else argument


class TrainWorkerCalls(WorkerCalls):
    """The driver's calls of a worker in a process of Ray Train, which is not to end, nor to take over.

    Ray Train shows the job's prints; the driver gets what is logged.
    """

    def call(self, verb: str, own: Any, token: int, common: bytes = b"") -> Any:
        """Run a verb on the thread of steps. Of the accelerators that Ray Train shows, the worker uses its own."""
        if verb == "form" and own.devices[0].startswith("cuda"):
            ids = map(str, ray.get_runtime_context().get_accelerator_ids()["GPU"])
            own = replace(own, devices=visible_devices(ids))
            if os.environ.get(_ERROR_HANDLING) == "1":  # a TorchTrainer's, under which torch ends the survivors
                del os.environ[_ERROR_HANDLING]
        return super().call(verb, own, token, common)

    def close(self) -> None:
        """Leave the group, and free what the worker holds."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        gc.enable()
        gc.unfreeze()
        gc.collect()
