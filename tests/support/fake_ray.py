"""Ray without a cluster: actors in this process that answer at once, for the driver's real effects at any world size.

What an actor is sent is pickled as Ray does it, and counted; what the driver puts into the object store, too. The time
of Ray itself is not in it.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cloudpickle
from ray.exceptions import ActorDiedError

from trainwright.core import events
from trainwright.core.errors import PeerLost
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.core.topology import Address, StateTag
from trainwright.driver import messages as m
from trainwright.driver.driver_state import DriverState, Phase
from trainwright.driver.run_policy import RunPolicy
from trainwright.driver.state_machine import begin_run, decide
from trainwright.ray_cluster.placement_groups import WorkerPlacement
from trainwright.runtime import controller, takeover, worker_actor, worker_registry
from trainwright.runtime.controller import collecting_rarely
from trainwright.runtime.takeover import TakenOverActors
from trainwright.runtime.worker_actor import WorkerSlot
from trainwright.storage.run_summary import RunSummary
from trainwright.worker.worker_config import WorkerConfig

NODE = 8  # workers of a node
REFERENCE_BYTES, NUMBER_BYTES = 28, 9


@dataclass(frozen=True)
class Stored:
    """An object in the store, by reference."""

    value: Any


class Answer:
    """What a call gives: a reference, to an answer that is there or is to come."""

    def __init__(self, value: bytes | None = None) -> None:
        self._future: Future[Any] = Future()
        if value is not None:
            self.give(value)

    def future(self) -> Future[Any]:
        """As Ray's references have it."""
        return self._future

    def give(self, value: bytes) -> None:
        """The answer has come."""
        self._future.set_result(pickle.loads(value))

    def fail(self, error: Exception) -> None:
        """The actor has died."""
        self._future.set_exception(error)


class Actor:
    """A worker process, which waits in its steps until it is interrupted."""

    def __init__(self, fleet: Fleet, worker_slot: WorkerSlot) -> None:
        self.fleet, self.worker_slot, self.rank = fleet, worker_slot, worker_slot.slot or 0
        self.trained, self.alive = False, True
        self.life = [Answer(), Answer()]
        self.steps: Answer | None = None
        self.called: dict[str, tuple[Any, ...]] = {}  # what came last, by verb

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=partial(self._called, method))

    def _called(self, method: str, *given: Any) -> Answer:
        verb = given[0] if method == "call" else method
        self.fleet.note(verb, given)
        if verb in ("live", "notice"):
            return self.life[verb == "notice"]
        if verb == "printed":  # nothing is, so that it answers a call that waits only with the next one, or its death
            if not given[0]:
                for poll in self.life[2:]:
                    poll.give(pickle.dumps([]))
                del self.life[2:]
                return Answer(pickle.dumps([]))
            self.life.append(Answer())
            return self.life[-1]
        if verb == "watch":
            if not given[1]:
                return Answer(self.fleet.steps_after(given[0]))
            self.fleet.news = Answer()
            return self.fleet.news
        if verb == "run":
            self.steps = Answer()
            return self.steps
        self.called[verb] = given
        if verb == "interrupt" and self.steps is not None:
            steps, self.steps = self.steps, None
            error = PeerLost("connection closed by peer")
            steps.give(pickle.dumps(m.CallFailure(kind="peer", error=error, step=self.fleet.step)))
        return Answer(self._answer(verb))

    def _answer(self, verb: str) -> bytes:
        match verb:
            case "hello":
                node = f"node-{self.rank // NODE}"
                worker = self.worker_slot.worker
                return pickle.dumps(m.WorkerStarted(worker=worker, node=node, pid=worker, home=f"id-of-{node}"))
            case "reserve":
                return pickle.dumps(Address(host=f"10.0.{self.rank // NODE}.1", port=20000 + self.rank % NODE))
            case "form":
                return pickle.dumps(self.fleet.tag(self.rank, self.fleet.step if self.trained else None))
            case "restore":
                self.trained = True
                return pickle.dumps(self.fleet.tag(self.rank, self.fleet.step))
        return pickle.dumps(None)

    def die(self) -> None:
        """It is gone: whoever waits for it hears of that."""
        if self.alive:
            self.alive = False
            for answer in (*self.life, *filter(None, (self.steps,))):
                answer.fail(ActorDiedError())


class Fleet:
    """Ray's calls, and the actors that they make.

    Args:
        size: workers.
        parts: that the state is divided into; replicas hold the same.

    Attributes:
        step: at which all stand.
        sent: bytes of all arguments, by method or verb; but for beats, which come by time.
        stored: bytes of each object that was put into the store.
        calls: of actors, by method or verb; `place` for their creation.
    """

    def __init__(self, size: int, parts: int = 1) -> None:
        self.size, self.parts, self.step = size, parts, 0
        self.sent: Counter[str] = Counter()
        self.stored: list[int] = []
        self.calls: Counter[str] = Counter()
        self.actors: dict[int, Actor] = {}
        self.news = Answer()  # of the worker that was asked for them last
        self.ray = SimpleNamespace(put=self._put, kill=self._kill, wait=self._wait)

    def forget(self) -> None:
        """Count anew."""
        self.sent.clear()
        self.stored.clear()
        self.calls.clear()

    @property
    def total_bytes(self) -> int:
        """That were sent and stored."""
        return sum(self.sent.values()) + sum(self.stored)

    def note(self, verb: str, given: Sequence[Any]) -> None:
        """Count a call."""
        if verb != "beat":
            self.sent[verb] += sum(map(_size, given))
            self.calls[verb] += 1

    def tag(self, rank: int, step: int | None) -> StateTag:
        """What a rank holds."""
        piece = f"shard-{rank % self.parts}"
        return StateTag(step=step, layout=f"shard-{self.parts}", pieces=frozenset({piece}), total=self.parts)

    @property
    def stepping(self) -> int:
        """Workers that are in their steps."""
        return sum(actor.steps is not None for actor in self.actors.values() if actor.alive)

    def reach(self, step: int) -> None:
        """All have completed a step, and the driver hears of it."""
        before, self.step = self.step, step
        self.news.give(self.steps_after(before))

    def steps_after(self, step: int) -> bytes:
        """News of the completed steps after that one, which is an event of the run."""
        steps = [*range(step + 1, self.step + 1)]
        ones = [1.0] * len(steps)
        return pickle.dumps(
            events.Steps(step=steps, loss=ones, learning_rate=ones, gradient_norm=[*ones], samples=steps)
        )

    def options(self, **_: Any) -> SimpleNamespace:
        """Of the actor class."""
        return SimpleNamespace(remote=self._made)

    def _made(self, order: Stored, worker_slot: WorkerSlot, token: int) -> Actor:
        self.note("place", (order, worker_slot, token))
        self.actors[worker_slot.worker] = Actor(self, worker_slot)
        return self.actors[worker_slot.worker]

    def _put(self, value: Any) -> Stored:
        self.stored.append(len(cloudpickle.dumps(value)))
        return Stored(value)

    @staticmethod
    def _kill(actor: Actor, *, no_restart: bool = True) -> None:
        actor.die()

    @staticmethod
    def _wait(refs: Sequence[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return list(refs), []


def _size(given: Any) -> int:
    """Bytes of an argument: Ray pickles all but references, bytes and simple values."""
    match given:
        case Stored():
            return REFERENCE_BYTES
        case bytes() | str():
            return len(given)
        case None | int():
            return NUMBER_BYTES
    return len(cloudpickle.dumps(given))


class Space(WorkerPlacement):
    """Room for everybody."""

    name = "here"

    def options(self, slot: int, *, beside: bool = False) -> dict[str, Any]:
        return {}


class Log:
    """A run's log that is always ours."""

    def acquire(self) -> int:
        return 1

    def assure(self) -> bool:
        return True

    def chain(self) -> tuple[()]:
        return ()

    def past(self) -> RunSummary:
        return RunSummary()


class Driver:
    """The loop of a session: the real decisions and the real effects."""

    def __init__(self, fleet: Fleet, folder: Path, **changes: Any) -> None:
        mesh = Mesh(data=fleet.size // fleet.parts, shard=fleet.parts)
        plan = Plan(
            strategy="sharded", engine="", mesh=mesh, batch_size=fleet.size, placement=WorkerResources(cpus=1.0)
        )
        self.order = WorkerConfig(job=b"", plan=plan, storage=str(folder), run="run", train=None)  # type: ignore[arg-type]
        self.fleet, self.told = fleet, list[events.Event]()
        self.world = controller.EffectExecutor(self.order, Log(), self.told.append, placement=Space())  # type: ignore[arg-type]
        settings = RunPolicy.of(
            workers=fleet.size, total_steps=1000, steps_per_epoch=1000, secret=b"of a test", **changes
        )
        self.state, effects = begin_run(settings, time.monotonic())
        self._carry_out(effects)

    def _carry_out(self, effects: Sequence[m.Effect]) -> None:
        for effect in effects:
            self.world.carry_out(effect)

    def until(self, over: Callable[[DriverState], bool]) -> float:
        """Decide and carry out for as long as that is not so; gives the seconds of CPU that this thread took."""
        begun = time.thread_time()
        while not over(self.state):
            self.state, effects = decide(self.state, self.world.next(), time.monotonic())
            self._carry_out(effects)
        return time.thread_time() - begun

    def start(self) -> float:
        """All workers are in their steps; gives the seconds of CPU."""
        seconds = self.until(lambda state: state.phase is Phase.RUNNING)
        self.fleet.reach(3)
        self.until(lambda state: state.position.progress == 3)
        return seconds

    def recover(self, rank: int) -> float:
        """A worker dies while all step; gives the seconds of CPU until all step again."""
        former = self.state.epoch.generation
        self.fleet.actors[self.state.membership.members[rank].worker].die()
        seconds = self.until(lambda state: state.epoch.generation != former and state.phase is Phase.RUNNING)
        assert self.fleet.stepping == self.fleet.size, "all are in their steps"
        return seconds


@contextmanager
def driving(size: int, parts: int, folder: Path, **changes: Any) -> Iterator[Driver]:
    """A driver whose Ray is in this process."""
    fleet = Fleet(size, parts)
    with ExitStack() as stack:
        stack.enter_context(collecting_rarely())
        stack.enter_context(mock.patch.object(controller, "take_over", lambda *_, **__: TakenOverActors()))
        stack.enter_context(mock.patch.object(worker_registry, "WORKER_ACTOR", fleet))
        for module in (takeover, worker_actor, worker_registry):
            stack.enter_context(mock.patch.object(module, "ray", fleet.ray))
        driver = Driver(fleet, folder, **changes)
        stack.callback(driver.world.close)
        yield driver
