"""A job inside Ray Train, told without it: who sits where, what does not go together, and what is reported when."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainwright as tw
from trainwright.core.cluster import Cluster, Node
from trainwright.core.errors import JobError, PlanError, ResourceError, TrainwrightError
from trainwright.core.events import Checkpointed, Evaluated, Failed, Steps
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.core.topology import Capabilities, Generation, Group
from trainwright.driver.messages import FinishRun
from trainwright.integrations import rank_channel, ray_train
from trainwright.integrations.rank_channel import RankCalls, TrainWorkerCalls
from trainwright.integrations.ray_train import ReportQueue, TrainWorker, TrainWorkers, inside_ray_train
from trainwright.planning.decision import Decision
from trainwright.runtime.worker_actor import WorkerCalls, WorkerSlot
from trainwright.storage.object_store import open_store

NODES = {
    name: Node(name=name, cpus=8.0, memory_bytes=800, accelerators=4, accelerator="GPU", kind="T4") for name in "ab"
}


def seat(rank: int, node: str = "a", *gpus: str, run: str = "run", kind: str = "GPU") -> TrainWorker:
    return TrainWorker(rank=rank, node_id=node, run=run, accelerator=kind if gpus else "", accelerators=gpus)


def seating(*seats: TrainWorker, cpus: float = 2.0) -> TrainWorkers:
    return TrainWorkers.of(seats, {one.rank: one.node_id for one in seats}, [{"CPU": cpus}] * len(seats))


def job(**fields: Any) -> tw.Job:
    train = tw.datasets.table({"x": [1, 2]})
    given = {"name": "run", "model": lambda: None, "optimizer": lambda parameters: None, "train": train}
    return tw.Job(**{**given, "step": lambda model, batch: None, "batch_size": 8, "storage": "nowhere", **fields})


def decision(plan: Plan, *contenders: Plan) -> Decision:
    nothing: Any = None
    cluster = Cluster(nodes=())
    return Decision(
        chosen=plan, rejected=(), infeasible=(), profile=nothing, cluster=cluster, used=cluster, contenders=contenders
    )


def plan(workers: int = 2, gpus: int = 0, **fields: Any) -> Plan:
    placement = WorkerResources(cpus=0.5, accelerators=gpus, accelerator="GPU" if gpus else "", threads=7)
    return Plan(
        strategy="data_parallel", engine="", mesh=Mesh(data=workers), batch_size=8, placement=placement, **fields
    )


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8), st.randoms())
def test_each_rank_has_a_bundle_of_its_own_on_its_node(nodes: list[str], random: Any) -> None:
    seats = [seat(rank, node) for rank, node in enumerate(nodes)]
    bundles = dict(enumerate(random.sample(nodes, len(nodes))))
    random.shuffle(seats)
    found = TrainWorkers.of(seats, bundles, [{"CPU": 1.0}] * len(nodes))
    assert [one.rank for one in found.workers] == list(range(len(nodes)))
    assert [bundles[bundle] for bundle in found.bundles] == nodes and len(set(found.bundles)) == len(nodes)


def test_the_cluster_is_what_the_seats_have() -> None:
    found = seating(seat(0, "a", "0"), seat(1, "a", "3"), seat(2, "b", "1")).cluster(NODES)
    assert [(node.name, node.cpus, node.accelerators, node.kind) for node in found.nodes] == [
        ("a", 4.0, 2, "T4"),
        ("b", 2.0, 1, "T4"),
    ]
    assert [node.memory_bytes for node in found.nodes] == [400, 200]
    bare = seating(seat(0), seat(1), cpus=0.0).cluster(NODES)
    assert bare == Cluster(nodes=(Node(name="a", cpus=2.0, memory_bytes=800),))


@pytest.mark.parametrize(
    ("seats", "told"),
    [
        ([seat(0), seat(1, run="other")], "train different runs: 'run' and 'other'"),
        ([seat(0, "a", "1"), seat(1, "a", "1")], "share the GPU 1"),
        ([seat(0, "a", "0", kind="TPU")], "does not train on TPUs"),
    ],
)
def test_seats_that_no_job_can_sit_on(seats: list[TrainWorker], told: str) -> None:
    with pytest.raises(ResourceError, match=told):
        seating(*seats)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"workers": 3}, r"asks for 3 workers, and Ray Train started 2 .*\n.*num_workers=3"),
        ({"workers": 1}, r"asks for 1 workers.*\n.*num_workers=1"),
        ({"min_workers": 3, "max_workers": 4}, r"asks for 3 to 4 workers.*\n.*num_workers=3"),
    ],
)
def test_a_job_for_another_number(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ResourceError, match=told):
        seating(seat(0), seat(1)).job(job(**fields))


def test_a_job_has_as_many_workers_as_seats() -> None:
    found = seating(seat(0), seat(1)).job(job(min_workers=1, max_workers=4, on_loss="shrink"))
    assert (found.scaling.workers, found.scaling.min_workers, found.scaling.max_workers) == (2, None, None)


def test_a_plan_takes_threads_of_its_seats() -> None:
    found = seating(seat(0), seat(1), cpus=3.0).placed(decision(plan(), plan()), data_cpus=5.0, own="so")
    for each in (found.chosen, *found.contenders):
        assert (each.placement.threads, each.placement.data_cpus) == (3, 5.0)
    pair = seating(seat(0, "a", "0"), seat(1, "a", "1"))
    assert pair.placed(decision(plan(gpus=1)), data_cpus=0.0, own="so").chosen.placement.accelerators == 1


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        (plan(1, 2), r"data_parallel is for 1 worker, and Ray Train started 2.*\n.*num_workers=1"),
        (plan(2, 1), r"workers of 1 GPU, and those of Ray Train have 2 .*\n.*'GPU': 1\}, or devices=2"),
    ],
)
def test_a_plan_for_other_seats(chosen: Plan, told: str) -> None:
    pair = seating(seat(0, "a", "0", "1"), seat(1, "a", "2", "3"))
    with pytest.raises(PlanError, match=told):
        pair.placed(decision(chosen), data_cpus=0.0, own="so")


def test_workers_sit_in_their_bundles_and_servers_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_train, "PlacementGroupSchedulingStrategy", lambda group, **index: (group, *index.values()))
    group: Any = mock.Mock()
    found = ray_train.TrainPlacement(seating(seat(0, "a", "5"), seat(1, "a", "7")), group, plan(2, 1, servers=1))
    assert [found.options(slot) for slot in range(3)] == [
        {"num_cpus": 0, "scheduling_strategy": (group, index)} for index in (1, 0, 1)
    ]
    assert [found.lent(slot) for slot in range(3)] == [(), ("5",), ("7",)]


def test_outside_of_ray_train() -> None:
    assert not inside_ray_train()
    ray_train.refuse_outside_ray_train("own")
    with pytest.raises(ResourceError, match="needs workers of Ray Train"):
        ray_train.refuse_outside_ray_train("ray_train")


# --- whose processes --------------------------------------------------------------------------------------------------


TORCH = "trainwright.strategies.torch.engines.data_parallel:DataParallel"
KERAS = Capabilities(reform="new_process", topology="collective")


def whose(fields: dict[str, Any], processes: Any = None, **shape: Any) -> str:
    return ray_train.own_processes_reason(job(**fields), replace(plan(**shape), engine=TORCH), processes)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, ""),
        ({"spares": 0, "failures": 9}, ""),
        ({"spares": 1}, "spares= asks for processes"),
        ({"replace_stragglers": 2.0}, "replace_stragglers= asks"),
        ({"on_crash_loop": "skip"}, 'on_crash_loop="skip" asks'),
    ],
)
def test_a_job_that_replaces_processes_gets_its_own(fields: dict[str, Any], told: str) -> None:
    found = whose(fields)
    assert found.startswith(told) and bool(found) is bool(told)
    assert whose(fields, "ray_train") == "" and "was given" in whose(fields, "own")
    notes = seating(seat(0), seat(1)).placed(decision(plan(), plan()), data_cpus=0.0, own=found)
    assert bool(notes.contenders) is bool(told)
    assert any(found in note if found else "Ray Train's own processes" in note for note in notes.chosen.notes)


def test_servers_have_processes_of_their_own() -> None:
    assert "servers" in whose({}, servers=1)
    with pytest.raises(PlanError, match="servers"):
        whose({}, "ray_train", servers=1)


def test_tensorflow_trains_in_processes_of_a_tensorflow_trainer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_train, "engine_class", lambda plan: SimpleNamespace(capabilities=KERAS))
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert "outside of a TensorflowTrainer" in whose({})
    with pytest.raises(PlanError, match="outside of a TensorflowTrainer"):
        whose({}, "ray_train")
    monkeypatch.setenv("TF_CONFIG", "{}")
    assert whose({}) == ""


def test_a_choice_that_does_not_exist() -> None:
    with pytest.raises(JobError, match="processes='mine'"):
        whose({}, "mine")


def test_a_lost_process_ends_the_run_with_what_came_first() -> None:
    nothing: Any = None
    shared = ray_train.SharedProcesses(seating(seat(0), seat(1)), mock.Mock(), plan(), nothing)
    assert shared.lost(1, "it was killed").what == "rank 1 of Ray Train cannot go on: it was killed"
    shared.on(Failed(rank=1, cause="it hung", detail="stacks"))
    lost = shared.lost(1, "killed by the driver")
    assert lost.what.endswith(": it hung") and lost.detail == "stacks" and "max_failures" in lost.remedy


@pytest.mark.parametrize(
    ("names", "copied"),
    [
        (["model.safetensors", "model-2.safetensors", "optimizer.safetensors", "state.json"], 2),
        (["average.safetensors", "model.safetensors", "local-0-of-2.safetensors"], 2),
        (["model.shard-0-of-2.safetensors", "state.shard-0-of-2.json"], 0),
        (["state.index", "state.data-00000-of-00001", "state.json", "callbacks.npz"], 2),
    ],
)
def test_weights_of_the_whole_model_are_reported(tmp_path: Path, names: list[str], copied: int) -> None:
    stored, reported = tmp_path / "stored", tmp_path / "reported"
    stored.mkdir()
    reported.mkdir()
    assert not ray_train.copy_weights(str(stored), reported), "a checkpoint without a manifest was deleted"
    for name in [*names, "MANIFEST.json"]:
        (stored / name).write_bytes(name.encode())
    assert ray_train.copy_weights(str(stored), reported)
    found = {file.name: file.read_bytes() for file in reported.iterdir()}
    assert len(found) == copied and all(data == name.encode() for name, data in found.items())


# --- what is told -----------------------------------------------------------------------------------------------------


def steps(*numbers: int) -> Steps:
    count = len(numbers)
    return Steps(
        step=[*numbers], loss=[float(number) for number in numbers], learning_rate=[0.1] * count,
        samples=[8] * count, step_s=[0.5] * count, wait_s=[0.0] * count,
    )  # fmt: skip


@pytest.fixture
def teller() -> ReportQueue:
    return ReportQueue(10, lambda step, path: {"checkpoint": path, "step": step}, clock=lambda: 0.0)


def test_the_end_of_an_epoch_is_told_with_the_newest_figures(teller: ReportQueue) -> None:
    for number in range(1, 12):
        teller.on(steps(number))
    (news,) = first(teller.reports())
    assert news.metrics["step"] == 11 and news.metrics["epoch"] == 2 and news.metrics["train/loss"] == 11.0
    assert news.metrics["speed/samples_per_s"] == 16.0 and news.pointer == {}


def test_an_evaluation_comes_with_the_newest_checkpoint_and_nothing_twice(teller: ReportQueue) -> None:
    teller.on(Checkpointed(step=5, path="five"))
    teller.on(Failed())
    teller.on(Evaluated(step=9, metrics={"loss": 0.5}))
    news = teller.reports()
    told = next(news)
    assert told.metrics == {"evaluation/loss": 0.5, "failures": 1}
    assert told.pointer == {"checkpoint": "five", "step": 5}
    teller.end()
    assert list(news) == []


def test_the_last_figures_are_told_at_the_end_unless_it_failed(teller: ReportQueue) -> None:
    teller.on(Checkpointed(step=1, path="one"))
    assert [news.pointer["step"] for news in first(teller.reports())] == [1]
    teller.on(steps(2))
    teller.end()
    assert [(news.metrics["step"], news.pointer["step"]) for news in teller.reports()] == [(2, 1)]
    teller.on(steps(3))
    teller.end(silently=True)
    assert list(teller.reports()) == []


def test_steps_alone_are_told_now_and_then() -> None:
    now = iter([0.0, 0.005, 0.02, 0.02])
    teller = ReportQueue(1000, lambda step, path: {}, every_s=0.01, clock=lambda: next(now))
    teller.on(steps(1))
    (news,) = first(teller.reports())
    assert news.metrics["step"] == 1 and next(now, None) is None


def first(news: Iterator[Any]) -> list[Any]:
    """What is told now."""
    return [next(news)]


# --- rank 0 -----------------------------------------------------------------------------------------------------------


class Channel:
    """Keeps what rank 0 sends."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def send(self, message: Any) -> None:
        self.said.append(message)

    send_last = send


class Session:
    """Tells of two steps, and ends as it is told."""

    store: Any = None

    def __init__(self, end: Callable[[], FinishRun]) -> None:
        self.end, self.stops, self.listener = end, 0, SimpleNamespace(on=print)

    def listen(self, listener: Any) -> None:
        self.listener = listener

    def stop(self, now: bool = False) -> None:
        self.stops += 1

    def flush(self) -> None:
        pass

    def run(self) -> FinishRun:
        self.listener.on(steps(1, 2))
        return self.end()


def lead(monkeypatch: pytest.MonkeyPatch, end: Callable[[], FinishRun], report: Callable[[Any], None]) -> Any:
    monkeypatch.setattr(ray_train, "_report", report)
    prepared: Any = SimpleNamespace(store=open_store("nowhere"), job=job(), steps_per_epoch=10)
    channel, session = Channel(), Session(end)
    leader = ray_train.LeaderRank(channel, session, prepared)  # type: ignore[arg-type]
    return leader.run(), channel.said, session.stops


def test_every_rank_reports_and_hears_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    done = FinishRun(outcome="done", step=2)
    finish, said, stops = lead(monkeypatch, lambda: done, reported.append)
    assert finish is done and said[-1] is done and not stops
    assert [word.metrics["step"] for word in said[:-1]] == [report.metrics["step"] for report in reported] == [2]


def test_a_failure_reaches_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = FinishRun(outcome="failed", step=2, error=TrainwrightError("no"))
    finish, said, _ = lead(monkeypatch, lambda: failed, lambda report: None)
    assert finish is failed and said == [failed]


def test_what_is_no_error_of_ours_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> FinishRun:
        raise KeyError("lost")

    finish, said, _ = lead(monkeypatch, end, lambda report: None)
    assert said == [finish] and "KeyError: 'lost'" in str(finish.error) and "in end" in finish.error.detail


def test_a_report_that_is_refused_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def report(_: Any) -> None:
        raise RuntimeError("Unable to set up cluster storage")

    finish, said, stops = lead(monkeypatch, lambda: FinishRun(outcome="done", step=2), report)
    assert stops == 1 and said[-1] is finish and finish.outcome == "failed"
    assert "did not accept a report: Unable to set up" in str(finish.error)


# --- calls of a rank --------------------------------------------------------------------------------------------------


class Inbox:
    """Has calls for a rank, and keeps its answers."""

    def __init__(self) -> None:
        self.calls: queue.Queue[Any] = queue.Queue()
        self.answers: queue.Queue[tuple[int, Any, Any]] = queue.Queue()

    def next_call(self) -> Any:
        call = self.calls.get()
        if isinstance(call, Exception):
            raise call
        return call

    def answer(self, number: int, value: Any = None, error: Any = None) -> None:
        self.answers.put((number, value, error))


class Rank:
    """A worker whose step lasts until it is interrupted."""

    def __init__(self, *_: Any) -> None:
        self.interrupted, self.closed = threading.Event(), threading.Event()
        Rank.last = self

    def call(self, verb: str) -> str:
        assert self.interrupted.wait(20)
        return verb

    def interrupt(self) -> None:
        self.interrupted.set()

    def upload(self) -> None:
        raise OSError("no space")

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch) -> Inbox:
    monkeypatch.setattr(rank_channel, "TrainWorkerCalls", Rank)
    return Inbox()


def test_a_step_can_be_interrupted_and_the_last_message_frees_the_worker(inbox: Inbox) -> None:
    heard: list[Any] = []
    RankCalls(inbox, heard.append)  # type: ignore[arg-type]
    inbox.calls.put((0, "begin", (None, None, 7)))
    assert inbox.answers.get(timeout=20) == (0, None, None)
    inbox.calls.put((1, "call", ("run",)))
    inbox.calls.put((2, "interrupt", ()))
    assert sorted(inbox.answers.get(timeout=20)[0] for _ in range(2)) == [1, 2]
    inbox.calls.put((3, "upload", ()))
    number, _, error = inbox.answers.get(timeout=20)
    assert number == 3 and "OSError: no space" in str(error) and "in upload" in error.detail
    done = FinishRun(outcome="done", step=2)
    for number, message in enumerate(["one", "two", done], 4):
        inbox.calls.put((number, "told", (cloudpickle.dumps(message),)))
    assert [inbox.answers.get(timeout=20)[0] for _ in range(3)] == [4, 5, 6]
    assert heard == ["one", "two", done] and Rank.last.closed.is_set()


@pytest.mark.parametrize(("found", "kept"), [("1", None), ("2", "2"), (None, None)])
def test_a_worker_in_a_torch_trainer_uses_its_own_gpu_and_outlives_an_error_of_nccl(
    found: str | None, kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TorchTrainer shows the GPUs of all its workers, and has torch's watchdog end a process; the user may not."""
    formed: list[Group] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", found or "")
    if found is None:
        monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": [5]})
    monkeypatch.setattr(rank_channel.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(WorkerCalls, "_answer", lambda calls, verb, group, token: formed.append(group))
    place, told = WorkerSlot(worker=0, slot=0, bundle=0, run="run"), SimpleNamespace(take=list)
    calls = TrainWorkerCalls(None, place, 0, told)  # type: ignore[arg-type]
    calls.call("form", Group(generation=Generation(token=1, number=1), rank=0, peers=(), devices=("cuda:0",)), 0)
    assert [group.devices for group in formed] == [("cuda:1",)]
    assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == kept


def test_a_rank_gets_its_calls_in_the_order_in_which_they_were_made() -> None:
    """Ray starts the calls of an asynchronous actor in any order; `begin` has to come before `hello`."""

    async def made() -> list[Any]:
        broker, numbers = rank_channel._CallBroker(1), itertools.count()
        sent: list[Any] = []
        handle = rank_channel.RankHandle(
            SimpleNamespace(call=SimpleNamespace(remote=lambda *given: sent.append(given))), 0, numbers
        )
        for method in ("begin", "hello", "beat"):
            getattr(handle, method).remote(method.upper())
        calls = [asyncio.ensure_future(broker.call(*each)) for each in (sent[2], sent[1], sent[0])]
        got = [await broker.next_call(0) for _ in calls]
        for number, method, (argument,) in got:
            await broker.answer(0, number, f"{method} {argument}", None)
        return [got, await asyncio.gather(*calls)]

    got, answers = asyncio.run(made())
    assert [method for _, method, _ in got] == ["begin", "hello", "beat"]
    assert answers == ["beat BEAT", "hello HELLO", "begin BEGIN"]


@pytest.mark.parametrize("ends", ["channel", "message"])
def test_a_rank_that_cannot_go_on_says_so(inbox: Inbox, ends: str) -> None:
    def told(message: Any) -> None:
        raise ResourceError("refused")

    calls = RankCalls(inbox, told)  # type: ignore[arg-type]
    inbox.calls.put(ResourceError("ended") if ends == "channel" else (0, "told", (cloudpickle.dumps("report"),)))
    with pytest.raises(ResourceError, match="ended" if ends == "channel" else "refused"):
        calls.wait(Future())
