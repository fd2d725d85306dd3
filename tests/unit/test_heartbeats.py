"""Who owes a driver an answer to its beats, and for how long: on a clock and in a cluster that the test makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from trainwright.runtime import takeover
from trainwright.runtime.takeover import BEAT_S, Heartbeats

TOKEN = 7


@dataclass
class Process:
    """An actor whose answers the test gives.

    Attributes:
        beats: that it was sent: whether each is answered, or has come to an error, which is known as well.
        answers: whether it answers those to come.
    """

    answers: bool = True
    beats: list[list[bool]] = field(default_factory=list)

    @property
    def beat(self) -> SimpleNamespace:
        """The method of an actor."""
        return SimpleNamespace(remote=self._send)

    def _send(self, token: int) -> list[bool]:
        assert token == TOKEN
        self.beats.append([self.answers])
        return self.beats[-1]

    def wake(self) -> None:
        """Answer all that came, and those to come."""
        self.answers = True
        for beat in self.beats:
            beat[0] = True


class Driver:
    """Sends beats every `BEAT_S` seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self._beats = 100.0, Heartbeats()
        monkeypatch.setattr(takeover, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(takeover, "ray", SimpleNamespace(wait=self._wait))

    def beat(self, **processes: Process) -> dict[int, float]:
        """By number who is silent, in seconds; processes are called `w1`, `w2` and so on."""
        silent = self._beats.send({int(name[1:]): process for name, process in processes.items()}, TOKEN)
        self.now_s += BEAT_S
        return dict(silent)

    @staticmethod
    def _wait(refs: Sequence[list[bool]], *, timeout: float) -> tuple[list[list[bool]], list[list[bool]]]:
        assert timeout == 0, "a driver that waits sends no beats"
        return [ref for ref in refs if ref[0]], [ref for ref in refs if not ref[0]]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def test_who_answers_owes_nothing(driver: Driver) -> None:
    one = Process()
    assert [driver.beat(w1=one) for _ in range(4)] == [{}] * 4
    assert len(one.beats) == 4


def test_silence_counts_from_the_first_beat_without_an_answer(driver: Driver) -> None:
    frozen, other = Process(), Process()
    driver.beat(w1=frozen, w2=other)
    frozen.answers = False
    found = [driver.beat(w1=frozen, w2=other) for _ in range(4)]
    assert found == [{}, {1: BEAT_S}, {1: 2 * BEAT_S}, {1: 3 * BEAT_S}]
    assert len(frozen.beats) == 5, "it is told all the while that its driver lives"


def test_a_late_answer_ends_the_silence_and_the_next_one_counts_anew(driver: Driver) -> None:
    slow = Process(answers=False)
    assert [driver.beat(w1=slow) for _ in range(3)][-1] == {1: 2 * BEAT_S}
    slow.wake()
    assert driver.beat(w1=slow) == {}
    slow.answers = False
    assert [driver.beat(w1=slow) for _ in range(3)] == [{}, {1: BEAT_S}, {1: 2 * BEAT_S}]


def test_an_answer_to_a_later_beat_alone_is_none(driver: Driver) -> None:
    """Beats are answered in order: one that was lost is looked at until it is known what became of it."""
    odd = Process(answers=False)
    driver.beat(w1=odd)
    odd.answers = True
    assert [driver.beat(w1=odd) for _ in range(2)] == [{1: BEAT_S}, {1: 2 * BEAT_S}]


def test_one_that_is_no_longer_asked_is_forgotten(driver: Driver) -> None:
    """A process that was adopted again, or its number, begins with nothing owed."""
    gone, other = Process(answers=False), Process()
    driver.beat(w1=gone, w2=other)
    assert driver.beat(w1=gone, w2=other) == {1: BEAT_S}
    assert driver.beat(w2=other) == {}
    assert driver.beat(w1=gone, w2=other) == {}
    assert driver.beat(w1=gone, w2=other) == {1: BEAT_S}


def test_two_are_silent_for_different_times(driver: Driver) -> None:
    first, second = Process(answers=False), Process()
    driver.beat(w1=first, w2=second)
    second.answers = False
    driver.beat(w1=first, w2=second)
    assert driver.beat(w1=first, w2=second) == {1: 2 * BEAT_S, 2: BEAT_S}


def test_nobody_is_asked_where_nobody_is_up(driver: Driver) -> None:
    assert driver.beat() == {}
