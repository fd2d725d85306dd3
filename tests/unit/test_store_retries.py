"""Patience with a slow store: what is tried again, when, and for how long."""

from __future__ import annotations

import errno
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest

from trainwright.core.errors import DataError
from trainwright.core.retry import Backoff
from trainwright.datasets.formats.file_system import is_transient, retry_transient

SLOW = "AWS Error SLOW_DOWN during GetObject operation: Please reduce your request rate. (HTTP status 503)"


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def failing(times: int, error: Exception) -> Callable[[], str]:
    left = [times]

    def read() -> str:
        if left[0]:
            left[0] -= 1
            raise error
        return "content"

    return read


def tried(read: Callable[[], Any], time: Time, jitter: float = 0.5, **more: Any) -> Any:
    return retry_transient(read, "s3://b/x", clock=lambda: time.now_s, sleep=time.sleep, jitter=lambda: jitter, **more)


def test_a_read_that_works_is_done_once() -> None:
    time = Time()
    assert tried(failing(0, OSError()), time) == "content"
    assert time.slept == []


def test_pauses_draw_nothing_from_the_generator_that_a_step_has_seeded() -> None:
    before, time = random.getstate(), Time()
    assert retry_transient(failing(3, TimeoutError()), "s3://b/x", sleep=time.sleep) == "content"
    Backoff(9.0, sleep=time.sleep).wait()
    assert len(set(time.slept)) == 4 and random.getstate() == before


def test_pauses_grow_to_a_bound() -> None:
    time = Time()
    assert tried(failing(9, OSError(SLOW)), time, jitter=1.0) == "content"
    assert time.slept == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 4.0, 4.0, 4.0, 4.0])
    time = Time()
    assert tried(failing(2, TimeoutError()), time, jitter=0.5) == "content"
    assert time.slept == pytest.approx([0.1, 0.2])


@pytest.mark.parametrize("deadline_s", [60.0, 5.0])
def test_the_deadline_ends_it_and_says_for_how_long_was_tried(deadline_s: float) -> None:
    time = Time()
    with pytest.raises(DataError, match=r"no answer in .* s and \d+ attempts; the last: AWS Error SLOW_DOWN") as caught:
        tried(failing(10_000, OSError(SLOW)), time, deadline_s=deadline_s)
    waited_s = sum(time.slept)
    assert deadline_s - 5.0 < waited_s <= deadline_s
    assert f"{waited_s:.1f} s and {len(time.slept) + 1} attempts" in caught.value.what
    assert caught.value.where == "s3://b/x" and "checkpoint" in caught.value.remedy
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_slow_attempts_count_too() -> None:
    time = Time()

    def read() -> str:
        time.now_s += 25.0
        raise TimeoutError("timed out")

    with pytest.raises(DataError, match="75"):
        tried(read, time)
    assert len(time.slept) == 2


@pytest.mark.parametrize("error", [FileNotFoundError("timed out.csv"), OSError("broken"), ValueError(SLOW)])
def test_other_errors_are_raised_at_once_as_they_are(error: Exception) -> None:
    time = Time()
    with pytest.raises(type(error)) as caught:
        tried(failing(1, error), time)
    assert caught.value is error and time.slept == []


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (TimeoutError(), True),
        (ConnectionResetError(), True),
        (BrokenPipeError(), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (OSError(errno.EHOSTUNREACH, "No route to host"), True),
        (OSError(SLOW), True),
        (OSError("AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 28, Timeout was reached"), True),
        (OSError("When reading: AWS Error UNKNOWN (HTTP status 429): Too Many Requests"), True),
        (OSError("google: Permanent error: 503 Service Unavailable"), True),
        (OSError("AWS Error INTERNAL_FAILURE during GetObject operation: We encountered an internal error"), True),
        (OSError("AWS Error ACCESS_DENIED during GetObject operation (HTTP status 403)"), False),
        (OSError("AWS Error NO_SUCH_KEY during GetObject operation (HTTP status 404): x500.csv"), False),
        (OSError(errno.EIO, "Input/output error"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (PermissionError("throttle.csv"), False),
        (IsADirectoryError("503"), False),
    ],
)
def test_which_errors_pass(error: OSError, passes: bool) -> None:
    assert is_transient(error) is passes
