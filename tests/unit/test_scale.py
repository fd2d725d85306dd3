"""A thousand workers: what the driver does for a recovery grows no faster than their number, Ray's calls included.

Times are CPU seconds of the driver's thread, the least of some, so that a busy machine does not count.
"""

from __future__ import annotations

import gc
import pickle
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from tests.support.driver_harness import Story
from tests.support.fake_ray import Stored, driving
from trainwright.core import events
from trainwright.core.errors import PeerLost
from trainwright.core.topology import Address, Generation, Group, Peer, StateTag
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import choose_memory_copy_ranks
from trainwright.driver.driver_state import Phase
from trainwright.driver.rendezvous import agree_on_state
from trainwright.runtime import worker_actor

SIZES = (256, 1024)
RATIO = 8.0  # of the seconds for the larger world and the smaller one: 4 where they grow alike, 16 with the square
MOST_S = 2.0  # for the larger world, on a slow machine


@dataclass
class Found:
    """What recoveries of one world cost: the least seconds, and the bytes sent by verb and those stored in one."""

    seconds: float
    sent: dict[str, int]
    stored: list[int]


def recoveries(size: int, folder: Path, times: int = 2) -> Found:
    """One rank after the other is lost, of two replicas that are divided over all ranks."""
    with driving(size, size // 2, folder) as driver:
        driver.start()
        seconds = []
        gc.disable()  # how often it looks through what all tests before have left does not count
        try:
            for rank in range(times):
                driver.fleet.forget()
                seconds.append(driver.recover(rank))
        finally:
            gc.enable()
        formed = [event for event in driver.told if isinstance(event, events.Formed)]
        assert [(event.source, event.survivors) for event in formed[1:]] == [("replica", size - 1)] * times
        forms = [driver.fleet.actors[member.worker].called["form"] for member in driver.state.membership.members]
        groups = [worker_actor.join_argument(own, common.value) for _, own, _, common in (forms[0], forms[-1])]
        assert [group.rank for group in groups] == [0, size - 1] and groups[0].peers == groups[1].peers
        assert [peer.rank for peer in groups[0].peers] == list(range(size)) and groups[0].key
        return Found(min(seconds), dict(driver.fleet.sent), [*driver.fleet.stored])


def test_a_recovery_costs_in_proportion_to_the_number_of_ranks(tmp_path: Path) -> None:
    few, many = (recoveries(size, tmp_path / str(size)) for size in SIZES)
    assert many.seconds < min(MOST_S, RATIO * few.seconds)
    assert few.sent.keys() == many.sent.keys() >= {"interrupt", "reserve", "form", "restore", "run"}
    for verb in ("interrupt", "reserve", "form", "restore", "run"):
        assert many.sent[verb] / SIZES[1] < 1.05 * few.sent[verb] / SIZES[0], f"bytes of {verb} for each rank"
    assert len(many.stored) == len(few.stored) == 1, "the peers are stored once for all ranks"


def test_only_ranks_that_know_more_than_was_told_are_asked_for_it(tmp_path: Path) -> None:
    with driving(8, 4, tmp_path, failures=9) as driver:
        driver.start()
        driver.fleet.forget()
        driver.recover(0)
        known = driver.fleet.calls["watch"]
        driver.fleet.step += 1  # the driver has not heard of this one
        driver.fleet.forget()
        driver.recover(1)
        steps = [step for event in driver.told if isinstance(event, events.Steps) for step in event.step]
        assert steps == [1, 2, 3, 4] and driver.state.position.progress == 4
        assert known < 3 and driver.fleet.calls["watch"] > 3, "calls of those who step again are among them"


def test_an_event_costs_the_same_in_a_world_of_any_size() -> None:
    (few, small), (many, large) = event_cost(64), event_cost(512)
    assert 0 < many < 1.2 * few, "lines"
    assert large < 3 * small, "bytes: 4 where each event copies what is known of all workers"


def event_cost(size: int) -> tuple[float, float]:
    """Lines and bytes of a decision: of the news that a peer is lost, and of the answers in a recovery."""
    story = Story(workers=size).running()
    lost, generation = PeerLost("connection closed by peer"), story.state.epoch.generation
    failure = m.CallFailure(kind="peer", error=lost)
    story.tell(m.WorkerDied(worker=0, cause="killed")).start()
    lines, peaks = 0, []

    def counted(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        nonlocal lines
        lines += event == "line"
        return counted

    def answer(verb: m.Verb, tags: list[Any]) -> None:
        for member, tag in zip(story.state.membership.members, tags, strict=True):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            generation = story.state.epoch.generation
            story.tell(m.CallReturned(worker=member.worker, generation=generation, verb=verb, value=tag))
            peaks.append(tracemalloc.get_traced_memory()[1] - before)

    with tracing(counted):
        lose = partial(m.CallRaised, generation=generation, verb="run", failure=failure)
        story.tell(*(lose(worker=worker) for worker in range(1, size)))
        answer("reserve", [Address(host="h", port=1)] * size)
        answer("form", [StateTag(step=None), *[StateTag(step=3)] * (size - 1)])
        answer("restore", [StateTag(step=3)] * size)
    assert story.state.phase is Phase.RUNNING and story.emitted(events.Formed)[0].source == "replica"
    return lines / (4 * size), median(peaks)


@contextmanager
def tracing(counted: Callable[..., Any]) -> Iterator[None]:
    """Watch lines and memory."""
    former = sys.gettrace()
    tracemalloc.start()
    sys.settrace(counted)
    try:
        yield
    finally:
        sys.settrace(former)
        tracemalloc.stop()


def sharded(size: int) -> dict[int, StateTag]:
    """What ranks hold that divide the state between them."""
    return {rank: StateTag(step=7, layout="s", pieces=frozenset({f"p{rank}"}), total=size) for rank in range(size)}


@pytest.mark.parametrize("decide", [
    agree_on_state,
    lambda tags: choose_memory_copy_ranks(tags, [f"node-{rank // 8}" for rank in tags], "in_place"),
])  # fmt: skip
def test_who_sends_and_who_keeps_what_is_found_in_linear_time(
    decide: Callable[[dict[int, StateTag]], object],
) -> None:
    few, many = (cpu_s(partial(decide, sharded(size))) for size in (2000, 32000))
    assert many < 64 * few, "16 where linear, 256 with the square"


def cpu_s(work: Callable[[], object], times: int = 5) -> float:
    """The least seconds of some tries."""
    found = []
    for _ in range(times):
        begun = time.thread_time()
        work()
        found.append(time.thread_time() - begun)
    return min(found)


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is put into Ray's object store."""
    put: list[bytes] = []
    monkeypatch.setattr(worker_actor, "ray", SimpleNamespace(put=lambda value: put.append(value) or Stored(value)))
    return put


def group(size: int) -> Group:
    """As one of its ranks is given it."""
    peers = tuple(Peer(rank=rank, address=Address(host="h", port=rank)) for rank in range(size))
    return Group(generation=Generation(token=1, number=2), rank=1, peers=peers, slot=3, accelerators=("5",))


def test_a_small_group_travels_with_the_call(store: list[bytes]) -> None:
    own, common = worker_actor.ArgumentPickler().of(group(3))
    assert not store and worker_actor.join_argument(own, common) == group(3)


def test_the_peers_of_a_large_group_are_stored_once(store: list[bytes]) -> None:
    sender, whole = worker_actor.ArgumentPickler(), group(200)
    sent = [sender.of(replace(whole, rank=rank)) for rank in range(200)]
    assert len(store) == 1 and len({id(common) for _, common in sent}) == 1
    assert max(len(pickle.dumps(own)) for own, _ in sent) < 600
    assert [worker_actor.join_argument(own, store[0]) for own, _ in sent] == [
        replace(whole, rank=rank) for rank in range(200)
    ]
    sender.of(group(200))
    assert len(store) == 2, "another generation's peers are others"


def test_what_is_the_same_for_all_is_pickled_once(store: list[bytes]) -> None:
    sender, steps = worker_actor.ArgumentPickler(), range(3, 8)
    first, second = sender.of(steps), sender.of(steps)
    assert first[1] is second[1] and worker_actor.join_argument(*first) == steps
    assert (
        worker_actor.join_argument(*sender.of(None)) is None
        and worker_actor.join_argument("own", b"") == "own"
        and not store
    )
