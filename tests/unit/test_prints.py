"""Lines that a job prints: kept for the driver, passed on, bounded."""

from __future__ import annotations

import io
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.support.processes import wait_for
from trainwright.core import events
from trainwright.core.topology import Address, Generation, Group, Peer
from trainwright.driver import messages as m
from trainwright.reporting.event_messages import EventFormatter, event_line
from trainwright.runtime import worker_actor
from trainwright.runtime.controller import WorkerOutput
from trainwright.runtime.takeover import DriverLease
from trainwright.runtime.worker_actor import BURST_LINES, MAX_LINE_LENGTH, MAX_LINES, PrintCapture
from trainwright.runtime.worker_registry import EventQueue


def test_lines_are_passed_on_and_given_once() -> None:
    behind = io.StringIO()
    prints = PrintCapture(behind)
    print("epoch", 1, file=prints)
    print("loss ", end="", file=prints)
    assert prints.take(0.0) == ["epoch 1"] and prints.take(0.0) == []
    print(0.5, file=prints)
    assert prints.take(0.0) == ["loss 0.5"]
    assert behind.getvalue() == "epoch 1\nloss 0.5\n" and prints.getvalue() == behind.getvalue()


def test_what_is_written_over_is_not_told_nor_what_a_terminal_would_carry_out() -> None:
    prints = PrintCapture(io.StringIO())
    print(" 1/10\r 2/10\r10/10 done", file=prints)
    print("\x1b[31mred", file=prints)
    print(":actor_name:Worker", file=prints)
    print("x" * (2 * MAX_LINE_LENGTH), file=prints)
    assert prints.take(0.0) == ["10/10 done", "\\x1b[31mred", "x" * MAX_LINE_LENGTH]


def test_secrets_stay_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-value")
    prints = PrintCapture(io.StringIO())
    print("key s3cr3t-value", file=prints)
    assert prints.take(0.0) == ["key ***"]


def test_a_flood_is_cut_and_counted_and_lines_come_again_later() -> None:
    now = [0.0]
    prints = PrintCapture(io.StringIO(), clock=lambda: now[0])
    for number in range(BURST_LINES + 1234):
        print(number, file=prints)
    lines = prints.take(0.0)
    assert len(lines) == BURST_LINES + 1 and lines[:2] == ["0", "1"]
    assert "1,234 lines are left out" in lines[-1]
    now[0] += 1.0
    print("later", file=prints)
    assert prints.take(0.0) == ["later"]


def test_what_nobody_asks_for_does_not_pile_up() -> None:
    now = [0.0]
    prints = PrintCapture(io.StringIO(), clock=lambda: now[0])
    for number in range(3 * MAX_LINES):
        now[0] += 1.0
        print(number, file=prints)
    assert len(prints.take(0.0)) == MAX_LINES


def test_whoever_waits_is_told_at_once() -> None:
    prints = PrintCapture(io.StringIO())
    threading.Timer(0.05, lambda: print("hello", file=prints)).start()
    assert prints.take(30.0) == ["hello"]


def test_the_last_call_of_a_verb_ends_the_waiting_of_the_other_one() -> None:
    prints = PrintCapture(io.StringIO())
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(prints.take(30.0, (1, 0))))
    waiting.start()
    wait_for(lambda: prints.take(0.0, (1, 1)) == [] and not waiting.is_alive())
    assert found == [[]]


def test_a_call_that_the_last_call_of_a_verb_overtook_does_not_wait() -> None:
    """The driver shows nothing before both have answered, and it may have sent the other one a moment before."""
    prints = PrintCapture(io.StringIO())
    print("evaluated", file=prints)
    assert prints.take(0.0, (1, 1)) == ["evaluated"]
    print("later", file=prints)
    began = time.monotonic()
    assert prints.take(60.0, (1, 0)) == [], "what came later is for the next call"
    assert time.monotonic() - began < 30
    assert prints.take(60.0, (1, 1)) == ["later"]
    threading.Timer(0.05, lambda: print("hello", file=prints)).start()
    assert prints.take(30.0, (2, 0)) == ["hello"], "the next driver counts from 0"


def test_images_come_in_their_place_and_are_waited_for_until_the_driver_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prints, said = PrintCapture(io.StringIO()), events.MediaLogged(step=2, name="said", text="words")
    adding = threading.Thread(target=lambda: (print("before", file=prints), prints.add(said)))
    adding.start()
    found: list[object] = []
    wait_for(lambda: found.extend(prints.take(0.01)) or len(found) == 2)
    assert found == ["before", said]
    adding.join(0.1)
    assert adding.is_alive(), "the answer may be lost with this process"
    assert prints.take(0.01) == []
    adding.join(10)
    assert not adding.is_alive()


def test_training_goes_on_without_a_driver_and_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_actor, "_RECEIPT_S", 0.01)
    prints = PrintCapture(io.StringIO())
    large = events.MediaLogged(step=1, name="large", image=bytes(40 << 20), width=1)
    prints.add(large)
    monkeypatch.setattr(worker_actor, "_RECEIPT_S", 30.0)
    prints.add(replace(large, step=2, image=bytes(8)))
    prints.add(replace(large, step=3))
    first, second, left_out = prints.take(0.0)
    assert (first, second) == (large, replace(large, step=2, image=bytes(8))), "only the first one waits for a driver"
    assert left_out == "... an image of step 3, 'large', is left out: too many wait"


class Poll:
    """Ray's actor of a worker: answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, Future[Any]]] = []
        self.flushes: list[int] = []
        self.printed = SimpleNamespace(remote=self._printed)

    def _printed(self, timeout_s: float, flushes: int, token: int) -> Any:
        answer: Future[Any] = Future()
        self.flushes.append(flushes)
        self.asked.append((timeout_s, answer))
        return SimpleNamespace(future=lambda: answer)


@pytest.mark.parametrize("first", ["poll", "flush"])
@pytest.mark.parametrize("ended", [False, True])
def test_what_was_printed_before_an_answer_is_shown_before_it(first: str, ended: bool) -> None:
    actor, shown = Poll(), list[Any]()
    lease = DriverLease(MagicMock(), list)
    queue, workers = EventQueue(lease), MagicMock(actor=lambda worker: actor)
    output = WorkerOutput(workers, queue, lease, shown.append, together=True)
    generation = Generation(token=1, number=1)
    group = Group(generation=generation, rank=0, peers=(Peer(rank=0, address=Address(host="h", port=1)),))
    output.listen_to(m.CallWorker(worker=0, generation=generation, verb="form", argument=group))
    call = m.CallWorker(worker=0, generation=generation, verb="evaluate", argument=None)
    output.deliver(call, m.CallReturned(worker=0, generation=generation, verb="evaluate", value=None))
    (waited, poll), (at_once, flush) = actor.asked
    assert waited > 0 == at_once
    assert actor.flushes == [0, 1], "the flush says that it is later, whichever comes first"
    lines: dict[str, Any] = {"poll": ["one"], "flush": ["two"]}
    answers = [("poll", poll), ("flush", flush)]
    for name, answer in answers if first == "poll" else answers[::-1]:
        if name == "poll" and ended:
            answer.set_exception(RuntimeError("the worker died"))
        else:
            answer.set_result(lines[name])
    event = queue.next()
    assert isinstance(event, m.CallReturned)
    assert [each.line for each in shown] == (["two"] if ended else ["one", "two"])


@pytest.mark.parametrize("copies", [True, False])
def test_steps_that_a_leaving_process_alone_knows_come_before_its_answer(copies: bool) -> None:
    asked, shown, news = list[int](), list[Any](), Future[Any]()

    def watch(after: int, timeout_s: float, token: int) -> Any:
        asked.append(after)
        return SimpleNamespace(future=lambda: news)

    lease = DriverLease(MagicMock(), list)
    actor = SimpleNamespace(watch=SimpleNamespace(remote=watch))
    queue, workers = EventQueue(lease), MagicMock(actor=lambda worker: actor)
    output = WorkerOutput(workers, queue, lease, shown.append, together=True)
    output.reported, generation = 5, Generation(token=1, number=1)
    about: Any = {"worker": 0, "generation": generation, "verb": "leave"}
    answer = m.CallReturned(**about, value=None)
    output.deliver(m.CallWorker(**about, argument=m.MemoryCopyRequest(version=1) if copies else None), answer)
    steps = events.Steps(step=[6, 7], loss=[0.5, 0.4], learning_rate=[0.1] * 2, gradient_norm=[None] * 2,
                         samples=[8] * 2, step_s=[0.1] * 2, wait_s=[0.0] * 2)  # fmt: skip
    if not copies:
        assert queue.next() == answer and not asked
        return
    news.set_result(steps)
    told = queue.next()
    assert asked == [5] and shown == [steps] and isinstance(told, m.StepsCompleted) and told.step == 7
    assert queue.next() == answer


def test_it_becomes_the_standard_output_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    prints = PrintCapture.installed()
    assert PrintCapture.installed() is prints is sys.stdout
    print("hello")
    assert prints.take(0.0) == ["hello"]


def test_a_line_is_shown_with_its_rank_without_verbose() -> None:
    event = events.Printed(rank=0, line="epoch 1")
    assert [line.text for line in EventFormatter().tell(event)] == ["[rank 0] epoch 1"] == [event_line(event).text]
    assert EventFormatter(verbose=True).tell(event) == []  # Ray shows it
