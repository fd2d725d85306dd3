"""Who asks the cloud of a node, and what the driver hears of it, with actors and answers of the test's own."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from tests.support import fake_ray
from trainwright.core.errors import FencedError
from trainwright.driver.messages import (
    AcquireLease,
    CallFailure,
    LeaseAcquired,
    PreemptionNoticed,
    SurvivingWorker,
    WorkerDied,
)
from trainwright.runtime import controller, preemption_watcher, worker_actor
from trainwright.runtime.preemption_watcher import PreemptionWatcher
from trainwright.runtime.takeover import TakenOverActors
from trainwright.runtime.worker_actor import WorkerProcess, WorkerSlot
from trainwright.worker.cloud_notices import NodeNotice

ENDS = NodeNotice(key="interruption", text="AWS spot interruption (stop)", left_s=90.0)
ADVICE = NodeNotice(key="rebalance", text="AWS recommends to leave", avoid=True)
FREEZE = NodeNotice(key="event-1", text="Azure pauses the machine")


class Queue:
    """Events, and answers that the test gives; calls of other threads wait for `settle`."""

    def __init__(self) -> None:
        self.events: list[PreemptionNoticed] = []
        self.calls: list[Callable[[], None]] = []
        self.came = threading.Event()

    def put(self, item: Any) -> None:
        if callable(item):
            self.calls.append(item)
            self.came.set()
        else:
            self.events.append(item)

    def then(self, answer: Future[Any], action: Callable[[Future[Any]], None]) -> Future[Any]:
        answer.add_done_callback(lambda done: self.calls.append(partial(action, done)))
        return answer

    def settle(self) -> None:
        """Wait for a call of another thread, and make all of them."""
        assert self.came.wait(30)
        self.came.clear()
        self.run()

    def run(self) -> None:
        """Make all calls."""
        while self.calls:
            self.calls.pop(0)()


class Scene:
    """Workers 0 and 1 on node a, and worker 2 on node b."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, frozenset[str]]] = []
        self.answers: dict[int, Future[Any]] = {}  # of the last question for the cloud's notices, by worker
        self.sigterm: dict[int, Future[Any]] = {}
        self.notes: list[str] = []
        self.avoided: list[str] = []
        self.queue = Queue()
        self.nodes = {0: ("node-a", "a"), 1: ("node-a", "a"), 2: ("node-b", "b")}
        self.actors = {worker: self.actor(worker) for worker in self.nodes}

    def actor(self, worker: int) -> Any:
        def ask(told: frozenset[str], token: int) -> Future[Any]:
            assert token == 7
            self.asked.append((worker, told))
            self.answers[worker] = Future()
            return self.answers[worker]

        def notice(token: int) -> Future[Any]:
            self.sigterm[worker] = Future()
            return self.sigterm[worker]

        return SimpleNamespace(notice=SimpleNamespace(remote=notice), node_notice=SimpleNamespace(remote=ask))

    def watcher(self, own_nodes: bool = True, watched: Iterable[int] = (0, 1, 2)) -> PreemptionWatcher:
        lease: Any = SimpleNamespace(token=7)
        avoid = self.avoided.append if own_nodes else None
        watcher = PreemptionWatcher(self.actors, self.nodes, self.queue, lease, avoid=avoid, note=self.notes.append)
        for worker in watched:
            watcher.watch(worker)
        return watcher

    def die(self, worker: int) -> None:
        """Its node or process is gone."""
        del self.actors[worker]
        if worker in self.answers:
            self.answer(worker, ActorDiedError())

    def answer(self, worker: int, value: Any, calls: str = "answers") -> None:
        """A worker answers the last question, or that call fails."""
        future = getattr(self, calls)[worker]
        future.set_exception(value) if isinstance(value, Exception) else future.set_result(value)
        self.queue.run()

    @property
    def noticed(self) -> list[tuple[int, float, str]]:
        return [(event.worker, event.left_s, event.why) for event in self.queue.events]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setenv("TRAINWRIGHT_CLOUD_NOTICES", "")
    monkeypatch.setattr(preemption_watcher, "draining_nodes", dict)
    return Scene()


@pytest.fixture
def watcher(scene: Scene) -> Iterator[PreemptionWatcher]:
    made = scene.watcher()
    yield made
    made.close()
    assert not made._thread.is_alive()


def test_one_worker_of_each_node_asks_and_all_of_it_hear(scene: Scene, watcher: PreemptionWatcher) -> None:
    assert scene.asked == [(0, frozenset()), (2, frozenset())]
    scene.answer(0, ENDS)
    assert scene.noticed == [(0, 90.0, ENDS.text), (1, 90.0, ENDS.text)]
    assert scene.asked[2:] == [(0, frozenset({"interruption"}))], "it goes on asking for others"
    assert not scene.notes and not scene.avoided


def test_another_one_asks_when_the_process_that_asked_has_ended(scene: Scene, watcher: PreemptionWatcher) -> None:
    scene.answer(0, ADVICE)
    scene.die(0)
    assert scene.asked[-1] == (1, frozenset({"rebalance"})), "what the node's other worker told is known"
    scene.die(1)
    scene.nodes[3], scene.actors[3] = ("node-a", "a"), scene.actor(3)
    watcher.watch(3)
    assert scene.asked[-1] == (3, frozenset({"rebalance"}))
    scene.answer(3, ENDS)
    assert scene.noticed == [(3, 90.0, ENDS.text)]


def test_advice_ends_nobody_and_keeps_new_processes_away(scene: Scene, watcher: PreemptionWatcher) -> None:
    scene.answer(0, ADVICE)
    scene.answer(2, FREEZE)
    assert scene.notes == ["node-a: AWS recommends to leave", "node-b: Azure pauses the machine"]
    assert scene.avoided == ["a"] and not scene.queue.events


def test_a_machine_of_no_cloud_is_asked_once(scene: Scene, watcher: PreemptionWatcher) -> None:
    scene.answer(0, None)
    scene.nodes[3], scene.actors[3] = ("node-a", "a"), scene.actor(3)
    watcher.watch(3)
    assert [worker for worker, _ in scene.asked] == [0, 2]


def test_an_error_of_the_question_itself_is_told_and_not_repeated(scene: Scene, watcher: PreemptionWatcher) -> None:
    scene.answer(0, RayTaskError("node_notice", "traceback", ValueError("broken")))
    assert [worker for worker, _ in scene.asked] == [0, 2]
    assert scene.notes == ["preemption notices of the cloud cannot be read on node-a: broken"]


def test_sigterm_is_of_one_process(scene: Scene, watcher: PreemptionWatcher) -> None:
    scene.answer(1, 25.0, "sigterm")
    scene.answer(0, ActorDiedError(), "sigterm")
    assert scene.noticed == [(1, 25.0, "preemption notice")]


@pytest.mark.parametrize("switch", ["off", "on"])
def test_the_cloud_can_be_left_alone(scene: Scene, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv("TRAINWRIGHT_CLOUD_NOTICES", switch)
    scene.watcher().close()
    assert bool(scene.asked) == (switch == "on")
    scene.answer(0, 25.0, "sigterm")
    assert len(scene.noticed) == 1


def test_on_nodes_of_ray_train_only_signals_count(scene: Scene) -> None:
    watcher = scene.watcher(own_nodes=False)
    assert not scene.asked and watcher._thread.ident is None and set(scene.sigterm) == {0, 1, 2}
    watcher.close()


# --- Nodes that Ray drains --------------------------------------------------------------------------------------------


@pytest.fixture
def drains(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Ray answers, each time the next one, and the last one for good."""
    answers: list[Any] = [{}]

    def draining_nodes() -> Any:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(preemption_watcher, "POLL_S", 0.01)
    monkeypatch.setattr(preemption_watcher, "draining_nodes", draining_nodes)
    return answers


def test_a_drained_node_is_told_once_with_its_end_if_there_is_one(scene: Scene, drains: list[Any]) -> None:
    drains[:] = [{"a": time.time() + 60, "elsewhere": 0.0}]
    watcher = scene.watcher()
    scene.queue.settle()
    scene.queue.settle()
    (first, second) = scene.noticed
    assert (first[0], second[0]) == (0, 1) and 30 < first[1] <= 60 and first[2] == "Ray drains its node"
    drains[:] = [{"b": 0.0}]
    while len(scene.noticed) == 2:
        scene.queue.settle()
    assert scene.noticed[2] == (2, math.inf, "Ray drains its node")
    watcher.close()


def test_a_ray_that_does_not_answer_is_told_once_and_asked_again(scene: Scene, drains: list[Any]) -> None:
    drains[:] = [RuntimeError("no GCS"), RuntimeError("no GCS"), {"b": 1.0}]
    watcher = scene.watcher()
    while not scene.noticed:
        scene.queue.settle()
    assert scene.notes == ["cannot read which nodes Ray drains: RuntimeError: no GCS"]
    assert scene.noticed == [(2, 0.0, "Ray drains its node")], "its time is over"
    watcher.close()


# --- Workers of the previous driver -----------------------------------------------------------------------------------


def test_survivors_are_watched_once_the_driver_knows_them(tmp_path: Path) -> None:
    """A notice that came while the driver still reads the run's past would concern no worker that it knows."""
    taken = threading.Event()

    class Survivor(fake_ray.Actor):
        def _called(self, method: str, *given: Any) -> fake_ray.Answer:
            taken.set()
            return super()._called(method, *given)

    class SlowLog(fake_ray.Log):
        def chain(self) -> tuple[()]:
            assert taken.wait(30) and not driver.fleet.calls["notice"]
            return ()

    with fake_ray.driving(2, 1, tmp_path) as driver:
        living = SurvivingWorker(worker=0, node="node-0", pid=1, slot=0, home="id-of-node-0")
        actor = Survivor(driver.fleet, WorkerSlot(worker=0, slot=0, bundle=0, run="run"))
        answer: Any = SimpleNamespace(living=living, bundle=0, group=None)
        log: Any = SlowLog()
        world = controller.EffectExecutor(driver.order, log, driver.told.append, placement=fake_ray.Space())  # type: ignore[arg-type]
        with mock.patch.object(controller, "take_over", lambda *_, **__: TakenOverActors(workers=((actor, answer),))):
            world.carry_out(AcquireLease())
            event = world.next()
        assert isinstance(event, LeaseAcquired) and event.living == (living,)
        assert driver.fleet.calls["notice"] == 1
        world.close()


def test_a_survivor_that_dies_before_the_driver_knows_it_is_not_told_as_living(tmp_path: Path) -> None:
    """Its end, which is told before, concerns no worker of the run; nobody would notice that it is gone."""
    taken = threading.Event()

    class Survivor(fake_ray.Actor):
        def _called(self, method: str, *given: Any) -> fake_ray.Answer:
            if method == "beat":  # both have been asked for their end
                taken.set()
            return super()._called(method, *given)

    class SlowLog(fake_ray.Log):
        def chain(self) -> tuple[()]:
            assert taken.wait(30)
            survivors[1][0].die()
            return ()

    with fake_ray.driving(2, 1, tmp_path) as driver:
        survivors: Any = [
            (
                Survivor(driver.fleet, WorkerSlot(worker=slot, slot=slot, bundle=slot, run="run")),
                SimpleNamespace(
                    living=SurvivingWorker(worker=slot, node="node-0", pid=1, slot=slot, home="id-of-node-0"),
                    bundle=slot,
                    group=None,
                ),
            )
            for slot in range(2)
        ]
        log: Any = SlowLog()
        world = controller.EffectExecutor(driver.order, log, driver.told.append, placement=fake_ray.Space())  # type: ignore[arg-type]
        with mock.patch.object(controller, "take_over", lambda *_, **__: TakenOverActors(workers=tuple(survivors))):
            world.carry_out(AcquireLease())
            while not isinstance(event := world.next(), LeaseAcquired):
                assert event == WorkerDied(worker=1, cause=event.cause)
        assert event.living == (survivors[0][1].living,)
        world.close()


def test_a_worker_has_no_thread_that_waits_for_a_driver_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takeover would take one of its few threads for good, and at last no call would be answered."""
    for name in ("ray", "DriverWatchdog", "PrintCapture"):
        monkeypatch.setattr(worker_actor, name, mock.MagicMock())
    monkeypatch.setattr(worker_actor, "_PreemptionNotices", lambda *_: mock.Mock(left_s=None))
    order: Any = SimpleNamespace(identity="a job", preemption_s=30.0)
    process = WorkerProcess(order, WorkerSlot(worker=0, slot=0, bundle=0, run="run"), 1)
    process._worker = mock.Mock(held=(None, 0))
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(method, 1) for method in (process.notice, process.live)]
        process.adopt(order, 2)
        answers = [each.result(30) for each in waiting]
    assert [type(answer.error) for answer in answers if isinstance(answer, CallFailure)] == [FencedError] * 2


def test_a_worker_that_was_starting_hears_of_the_notices_for_its_node(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, time=time.time, now=100.0)
    monkeypatch.setattr(preemption_watcher, "time", clock)
    late, later = scene.nodes.pop(1), scene.actor(3)
    watcher = scene.watcher(watched=(0, 2))
    scene.answer(0, FREEZE)
    scene.answer(0, ENDS)
    assert [worker for worker, *_ in scene.noticed] == [0]
    clock.now += 30.0
    scene.nodes |= {1: late, 3: late}
    scene.actors[3] = later
    watcher.watch(1)
    assert scene.noticed[1:] == [(1, 60.0, ENDS.text)]
    watcher.watch(3)
    assert len(scene.noticed) == 2, "it was placed there although the node is known to end"
    clock.now += 61.0
    watcher.watch(0)
    assert len(scene.noticed) == 2, "the node is still there"
    watcher.close()
