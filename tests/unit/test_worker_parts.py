"""Small parts of worker and driver: records of steps, signals, causes of death."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

import trainwright as tw
from tests.support import fake_ray
from tests.support.scripted_engine import FIRST, PEER, ScriptedEngine, join, restore, scripted_worker
from tests.support.work_orders import order_of, table_job
from trainwright.core.data import Batch, Feed, FeedAssignment, MetricSums, StepReport
from trainwright.core.errors import NonFiniteLoss, StorageError, StoreDown
from trainwright.core.events import Noted, Steps, from_json
from trainwright.core.plan import Mesh, WorkerResources
from trainwright.core.topology import Capabilities, Group, StateTag, WorkUnit
from trainwright.driver.messages import (
    EvaluateRequest,
    KillWorker,
    LeaseAcquired,
    ProbeRequest,
    RunRequest,
    SkippedBatch,
    StopRequested,
    SurvivingWorker,
    WorkerDied,
)
from trainwright.runtime import takeover, worker_actor, worker_registry
from trainwright.runtime.run_handle import stop_on_signals
from trainwright.runtime.takeover import TakenOverActors
from trainwright.runtime.worker_actor import WorkerCalls, WorkerSlot
from trainwright.runtime.worker_registry import exit_reason
from trainwright.storage.object_store import Store
from trainwright.worker import loaders
from trainwright.worker.loaders import RankStreams
from trainwright.worker.worker import StepLog, Worker


def filled(*steps: int) -> StepLog:
    records = StepLog()
    for step in steps:
        report = StepReport(step=step, loss=float(step), weight=1.0, learning_rate=0.1)
        records.add(report, samples=8, step_s=0.5, wait_s=0.1)
    return records


def test_news_are_told_once_and_kept_until_then() -> None:
    records = filled(1, 2, 3)
    assert records.since(0, 0).step == [1, 2, 3]
    assert records.since(1, 0).step == [2, 3]
    assert records.since(3, 0).step == []


def test_steps_that_will_be_done_again_are_forgotten() -> None:
    records = filled(1, 2, 3, 4)
    records.begin(generation=2, step=2)
    news = records.since(0, 0)
    assert news.step == [1, 2] and news.generation == 2 and news.samples == [8, 8]


def test_a_watcher_wakes_up_at_the_first_step() -> None:
    records, told = filled(), threading.Event()
    thread = threading.Thread(target=lambda: told.set() if records.since(0, 30).step == [1] else None)
    thread.start()
    records.add(StepReport(step=1, loss=1.0, weight=1.0, learning_rate=0.1), samples=1, step_s=1, wait_s=0)
    thread.join(20)
    assert told.is_set()


def test_steps_after_a_step() -> None:
    steps = Steps(step=[3, 4, 5], loss=[3.0, 4.0, 5.0], step_s=[1.0] * 3)
    assert steps.after(3) == Steps(step=[4, 5], loss=[4.0, 5.0], step_s=[1.0] * 2)
    assert from_json(steps.to_json()) == steps and from_json(Noted(text="ü").to_json()) == Noted(text="ü")


class Stops:
    def __init__(self) -> None:
        self.asked: list[bool] = []

    def stop(self, now: bool = False) -> None:
        self.asked.append(now)


def test_the_first_signal_asks_for_a_checkpoint_and_the_second_does_not_wait() -> None:
    run, before = Stops(), signal.getsignal(signal.SIGTERM)
    with stop_on_signals(run) as stops:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert run.asked == [False, True] and stops.last == signal.SIGINT
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    seen = []

    def within() -> None:
        with stop_on_signals(Stops()):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=within)
    thread.start()
    thread.join(10)
    assert seen == [signal.getsignal(signal.SIGTERM)]


DIED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: WorkerProcess\nThe actor is dead because "
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            f"{DIED}its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: ...",
            "was killed, ran",
        ),
        (f"{DIED}its worker process has died. Worker exit type: NODE_OUT_OF_MEMORY ...", "the node ran out of memory"),
        (f"{DIED}its node has died.", "its node was lost"),
        (f"{DIED}... Destroying worker since its placement group was removed. ...", "its place on the cluster"),
        ("something else\nat length", "something else"),
        ("", "RuntimeError"),
    ],
)
def test_a_death_is_told_in_words(text: str, words: str) -> None:
    found = exit_reason(RuntimeError(text))
    assert words in found and "\n" not in found
    assert exit_reason(None) == "killed by the driver"
    assert exit_reason(RayTaskError("call", "a traceback", ValueError("no such file\nat all"))) == "no such file"


def test_a_frozen_process_waits_for_its_driver_as_long_as_one_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could call it meanwhile, and its driver may have been frozen with it."""
    ticks, clock = [0], SimpleNamespace(now=100.0, monotonic=lambda: clock.now)

    def wait(seconds: float) -> None:
        ticks[0] += 1
        clock.now += 600.0 if ticks[0] == 30 else seconds
        if ticks[0] == 40:
            watchdog.heard()

    threads = SimpleNamespace(Thread=mock.Mock(), Event=lambda: SimpleNamespace(wait=wait))
    monkeypatch.setattr(takeover, "threading", threads)
    monkeypatch.setattr(takeover, "time", clock)
    monkeypatch.setattr(takeover.DriverWatchdog, "end", lambda watchdog: None)
    watchdog = takeover.DriverWatchdog(lent=True)
    watchdog._look()
    assert ticks == [99], "60 s after it heard of its driver, in the fortieth"


@pytest.mark.parametrize("ends", ["it is killed", "it dies"])
def test_a_standby_of_the_previous_driver_ends_like_any_worker(tmp_path: Path, ends: str) -> None:
    """Its placement group is known, which is removed with the others at the end."""
    with fake_ray.driving(2, 1, tmp_path) as driver:
        living = SurvivingWorker(worker=7, node="node-0", pid=7, slot=None, waiting=True, home="id-of-node-0")
        actor = fake_ray.Actor(driver.fleet, WorkerSlot(worker=7, slot=None, bundle=1, run="run"))
        answer: Any = SimpleNamespace(living=living, bundle=1, group="its group")
        workers, rooms = driver.world._workers, mock.Mock(lost=lambda slot, cause: None)
        workers._placement = rooms
        workers.take_over(TakenOverActors(workers=((actor, answer),)))
        rooms.inherit.assert_called_once_with(1, "its group")
        driver.world.carry_out(KillWorker(worker=7)) if ends == "it is killed" else actor.die()
        while not isinstance(event := driver.world.next(), WorkerDied):
            pass
        assert event.worker == 7 and workers.actor(7) is None


@pytest.mark.parametrize(("error", "started"), [(ActorDiedError(), 2), (ActorUnavailableError("lost", bytes(16)), 1)])
def test_the_memory_store_of_a_lost_node_is_started_again_on_the_next_one_of_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, started: int
) -> None:
    """One that cannot be reached for a while may live, and needs heartbeats."""
    made: list[dict[str, Any]] = []

    def call(*_: object) -> fake_ray.Answer:
        answer = fake_ray.Answer()
        answer.fail(error)
        return answer

    def options(**given: Any) -> SimpleNamespace:
        made.append(given)
        store = SimpleNamespace(beat=SimpleNamespace(remote=call), remove=mock.Mock(), die=lambda: None)
        return SimpleNamespace(remote=lambda *_: store)

    monkeypatch.setattr(worker_registry, "MEMORY_STORE_ACTOR", SimpleNamespace(options=options))
    with fake_ray.driving(1, 1, tmp_path) as driver:
        workers, told = driver.world._workers, StopRequested()
        while not isinstance(driver.world.next(), LeaseAcquired):
            pass
        for node in ("aa" * 28, "bb" * 28):
            workers._nodes[0] = ("node-0", node)
            workers.guard(0)
            workers._beat_once(takeover.Heartbeats())
            driver.world.put(told)
            while driver.world.next() is not told:
                pass
    assert [given["scheduling_strategy"].node_id for given in made] == ["aa" * 28, "bb" * 28][:started]
    assert len({given["name"] for given in made}) == 1


def test_a_worker_that_starts_while_the_store_is_away_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The survivors hold the state; only credentials that a node lacks are told at once."""
    order = order_of(table_job())

    def fails(error: StorageError) -> None:
        def exists(self: Store, path: str) -> bool:
            raise error

        monkeypatch.setattr(Store, "exists", exists)

    fails(StoreDown("the store cannot be reached"))
    assert Worker(order)
    fails(StorageError("the store refuses the credentials"))
    with pytest.raises(StorageError, match="credentials"):
        Worker(order)


@pytest.mark.parametrize("sound", [0, 1, 2])
def test_a_plan_is_measured_on_a_batch_that_the_run_would_pass_by(monkeypatch: pytest.MonkeyPatch, sound: int) -> None:
    """From the step on whose loss is not finite the batch weighs nothing; where the job does not say so, it raises."""
    weights: list[float] = []

    def train_step(engine: object, feed: Feed) -> StepReport:
        (((batch,),),) = (feed.parts,)
        if batch.weights.any() and len(weights) == sound:
            raise NonFiniteLoss("the loss is not finite")
        weights.append(batch.weights.sum())
        return StepReport(
            step=feed.step + 1, loss=0.0, weight=1.0, learning_rate=0.1, stop_requested=feed.stop_requested
        )

    batch = Batch(columns={}, weights=np.ones(2), samples=np.arange(2))
    feed = Feed(step=0, parts=((batch,),), data_ranks=range(1), total=1, rows=2)
    stream = blank_stream(full_feed=lambda step, avoid: feed)
    monkeypatch.setattr(RankStreams, "training", lambda streams, feeding: stream)
    monkeypatch.setattr(ScriptedEngine, "train_step", train_step, raising=False)
    took = []
    for policy in ("skip", "raise"):
        weights.clear()
        worker = scripted_worker(monkeypatch, table_job(on_nonfinite=policy))
        join(worker)
        if policy == "raise" and sound < 2:
            with pytest.raises(NonFiniteLoss):
                worker.probe(ProbeRequest(steps=4, seconds=9.0))
        else:
            took.append(worker.probe(ProbeRequest(steps=4, seconds=9.0)))
            assert weights == ([2.0] * sound + [0.0] * 5)[: 5 if sound < 2 else 2]
    assert all(seconds > 0 for seconds in took)


class Given(Iterator[Feed]):
    """Feeds of steps; the fifth is silent."""

    prefetch = None

    def __init__(self, start: int = 0) -> None:
        self.start, self.step, self.closed = start, start - 1, False

    def __next__(self) -> Feed:
        self.step += 1
        batch = Batch(columns={}, weights=np.full(2, float(self.step != 4)), samples=np.arange(2))
        return Feed(step=self.step, parts=((batch,),), data_ranks=range(1), total=1, rows=2)

    def close(self) -> None:
        self.closed = True


def blank_stream(**more: Any) -> SimpleNamespace:
    """A stream of a rank that has no share, and so records no batch."""
    feeding = FeedAssignment(data_ranks=range(0), total=1)
    own = {
        "schedule": SimpleNamespace(total_steps=10),
        "feeding": feeding,
        "feeds": Given,
        "warm_feed": lambda step, avoid: next(Given()),
    }
    return SimpleNamespace(**own, **more)


def test_a_step_is_told_of_the_next_one_where_that_is_sure_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at a segment's end, nor before or at a batch that is passed by; one that was not asked for is kept.

    At a segment's end replicas are compared.
    """
    compared: list[int] = []
    told: list[tuple[int, int | None]] = []

    def train_step(engine: object, feed: Feed) -> StepReport:
        told.append((feed.step, feed.following.step if feed.following else None))
        if feed.step == 1 and feed.parts[0][0].weights.any():
            raise NonFiniteLoss("the loss is not finite")
        return StepReport(step=feed.step + 1, loss=0.0, weight=1.0, learning_rate=0.1, stop_requested=feed.step == 6)

    monkeypatch.setattr(RankStreams, "training", lambda streams, feeding: blank_stream())
    monkeypatch.setattr(ScriptedEngine, "train_step", train_step, raising=False)
    monkeypatch.setattr(ScriptedEngine, "verify", lambda engine: compared.append(told[-1][0] + 1))
    worker = scripted_worker(
        monkeypatch, table_job(on_nonfinite="skip"), mesh=Mesh(pipeline=2), schedule="pipedream", accumulation=2
    )
    join(worker, size=2)
    restore(worker, passing=[SkippedBatch(step=5, why="it ends the workers")])
    ended = [0]
    for until in (3, 10, 10):
        ended.append(worker.run(RunRequest(steps=range(ended[-1], until))).step)
        told.append((-1, None))
    assert ended[1:] == compared == [3, 7, 10]
    assert told == [
        (0, 1), (1, 2), (1, 2), (2, None), (-1, None),
        (3, None), (4, None), (5, 6), (6, 7), (-1, None),
        (7, 8), (8, 9), (9, None), (-1, None),
    ]  # fmt: skip
    worker = scripted_worker(
        monkeypatch, table_job(on_nonfinite="skip"), mesh=Mesh(pipeline=2), schedule="1f1b", accumulation=2
    )
    join(worker, size=2)
    restore(worker)
    told.clear()
    worker.run(RunRequest(steps=range(2)))
    assert told == [(0, None), (1, None), (1, None)]


@pytest.mark.parametrize(("accelerator", "rows"), [("", [4]), ("GPU", [])])
def test_a_standby_for_an_accelerator_runs_no_batch_on_its_cpu(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, rows: list[int]
) -> None:
    """It could take minutes there, and a compiler would compile for the CPU."""
    feeds: list[Feed] = []
    monkeypatch.setattr(ScriptedEngine, "warm", lambda engine, feed: feeds.append(feed))
    placement = WorkerResources(cpus=1, accelerator=accelerator)
    worker = scripted_worker(monkeypatch, table_job(batch_size=4), placement=placement)
    worker.rehearse()
    assert [batch.rows for feed in feeds for part in feed.parts for batch in part] == rows


@pytest.mark.parametrize(
    ("visible", "given", "device"),
    [(None, "3", "cuda:3"), ("", "3", "cuda:3"), ("2,3", "3", "cuda:1"), ("GPU-a,GPU-b", "GPU-b", "cuda:1")],
)
@pytest.mark.parametrize("rehearsed", [True, False])
def test_a_standby_takes_the_gpu_of_its_rank_whatever_the_job_asked_cuda_before(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, given: str, device: str, rehearsed: bool
) -> None:
    """CUDA looks at the variable once: in the rehearsal, or not before the rank is known where there was none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    seen: list[str | None] = []
    used: list[tuple[str, ...]] = []

    def form(engine: ScriptedEngine, group: Group) -> StateTag:
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        used.append(group.devices)
        return StateTag(step=None)

    monkeypatch.setattr(ScriptedEngine, "form", form)
    if not rehearsed:
        monkeypatch.setattr(ScriptedEngine, "capabilities", Capabilities(reform="new_process"))
    worker = scripted_worker(monkeypatch, table_job(), placement=WorkerResources(cpus=1, accelerator="GPU"))
    worker.rehearse()
    worker.form(Group(generation=FIRST, rank=0, peers=(PEER,), devices=("cuda:0",), accelerators=(given,)))
    if rehearsed:
        assert seen == [visible or None] * 2 and used == [("cpu",), (device,)]
    else:
        assert seen == [given] and used == [("cuda:0",)]


def test_a_standby_tells_the_next_driver_the_gpus_that_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerCalls, "_answer", lambda *_: None)
    standby: Any = SimpleNamespace(take=list)
    calls = WorkerCalls(order_of(table_job()), WorkerSlot(worker=2, slot=None, bundle=0, run="r"), 0, standby)
    calls.call("form", Group(generation=FIRST, rank=0, peers=(), accelerators=("3",)), 0, pickle.dumps((PEER,)))
    assert worker_actor._accelerators(calls._place) == ("3",)


def test_a_short_run_of_one_that_steps_alone_tells_its_phases_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is resumed too, and where others did the last step."""
    leased = [WorkUnit(6, 0), WorkUnit(8, 0), WorkUnit(7, 1), None, None]
    units = SimpleNamespace(feeds=lambda unit: [next(Given(unit.step))], prefetch=None, close=lambda: None)
    monkeypatch.setattr(loaders, "LeasedFeeds", lambda *streams: units)
    monkeypatch.setattr(RankStreams, "training", lambda streams, feeding: blank_stream())
    monkeypatch.setattr(ScriptedEngine, "lease", lambda engine, first: leased.pop(0), raising=False)
    monkeypatch.setattr(ScriptedEngine, "train_step", timed, raising=False)
    worker = scripted_worker(monkeypatch, table_job(), topology="independent", servers=1)
    join(worker, rank=1, size=2)
    restore(worker, 6)
    first, last = worker.run(RunRequest(steps=range(6, 9))), worker.run(RunRequest(steps=range(9, 10)))
    assert first.step == 9 and first.phases is None
    assert last.phases is not None
    assert last.phases.steps == 3 and last.phases.medians["forward"] == 0.25


def timed(engine: object, feed: Feed) -> StepReport:
    return StepReport(step=feed.step + 1, loss=0.0, weight=1.0, learning_rate=0.1, phases={"forward": 0.25})


def test_what_is_judged_piece_by_piece_is_read_once_but_for_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    judged, begun, failing = list[int](), list[Given](), set[int]()

    def evaluate_step(engine: object, feed: Feed, states: object) -> MetricSums:
        judged.append(feed.step)
        if feed.step in failing:
            raise ValueError
        return MetricSums(totals={"loss": (float(feed.step), 1.0)})

    def feeds(start: int) -> Given:
        begun.append(Given(start))
        return begun[-1]

    monkeypatch.setattr(ScriptedEngine, "evaluate_step", evaluate_step, raising=False)
    monkeypatch.setattr(RankStreams, "evaluation", lambda streams, feeding: SimpleNamespace(feeds=feeds))
    worker = scripted_worker(monkeypatch, table_job(evaluate=judged_rows()))
    join(worker)
    assert worker.evaluate_some(range(2)) + worker.evaluate_some(range(2, 5)) == MetricSums(
        totals={"loss": (10.0, 5.0)}
    )
    failing.add(6)
    with pytest.raises(ValueError):
        worker.evaluate_some(range(5, 8))
    failing.clear()
    worker.evaluate_some(range(5, 8))
    worker.evaluate_some(range(2))
    assert judged == [0, 1, 2, 3, 4, 5, 6, 5, 6, 7, 0, 1]
    assert [(feeds.start, feeds.closed) for feeds in begun] == [(0, True), (5, True), (0, False)]


def judged_rows() -> tw.datasets.Dataset:
    return tw.datasets.table({"x": np.zeros((5, 2), np.float32), "y": np.zeros(5, np.int64)})


def test_it_evaluates_in_as_small_pieces_as_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what fits the device in training may not in evaluation."""
    weights: list[list[list[float]]] = []

    def evaluate_step(engine: object, feed: Feed, states: object) -> MetricSums:
        weights.append([batch.weights.tolist() for batch in feed.parts[0]])
        return MetricSums()

    monkeypatch.setattr(ScriptedEngine, "evaluate_step", evaluate_step, raising=False)
    worker = scripted_worker(monkeypatch, table_job(evaluate=judged_rows()), accumulation=2)
    join(worker)
    worker.evaluate(EvaluateRequest(step=0))
    assert sorted(weights) == [[[0.0], [1.0]], [[1.0], [1.0]], [[1.0], [1.0]]]
