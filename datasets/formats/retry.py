"""Reading again when a store is slow or throttles: which errors pass by themselves, and for how long to wait."""

from __future__ import annotations

import errno
import random
import re
import time
from collections.abc import Callable
from typing import TypeVar

from trainwright.core.errors import DataError

Value = TypeVar("Value")

DEADLINE_S = 60.0
_FIRST_S, _LONGEST_S = 0.1, 5.0
_drawn = random.SystemRandom().random  # a step seeds the global generator
_PASSING = {
    errno.EAGAIN,
    errno.EINTR,
    errno.ETIMEDOUT,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.EPIPE,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.ESTALE,  # NFS: the handle is old, the file may be opened anew
}
# pyarrow's file systems put the store's answer into the text of an OSError without an errno.
_TEXTS = re.compile(
    r"slow.?down|throttl|too.many.requests|request.?timeout|timed.out|timeout was reached|time-?out error"
    r"|service.?unavailable|server.?busy|internal.?(server.?)?error|bad gateway|gateway time-?out"
    r"|network_connection|connection (was )?(reset|refused|closed|aborted)|temporarily unavailable"
    r"|http (response |status )?(code )?:? ?(408|429|500|502|503|504)\b|curlcode: (6|7|18|28|35|52|55|56)\b",
    re.IGNORECASE,
)


def transient(error: OSError) -> bool:
    """Whether an error may pass by itself: timeouts, lost connections, and a store that asks for patience."""
    if isinstance(error, TimeoutError | ConnectionError | InterruptedError):
        return True
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError):
        return False
    if error.errno is not None and error.errno in _PASSING:
        return True
    return _TEXTS.search(str(error)) is not None


def retrying(
    read: Callable[[], Value],
    where: str,
    *,
    deadline_s: float = DEADLINE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    jitter: Callable[[], float] = _drawn,
) -> Value:
    """read(), again after growing pauses while it raises transient errors; other errors are raised as they come.

    Args:
        read: may be called many times.
        where: what is read, for the message.
        deadline_s: no attempt begins later than this after the first.
        clock: seconds, from any origin.
        sleep: waits some seconds.
        jitter: numbers in [0, 1), so that workers that were throttled together do not come back together.

    Raises:
        DataError: the deadline passed; it says for how long was tried and what the last error was.
    """
    began_s, pause_s, attempts = clock(), _FIRST_S, 0
    while True:
        try:
            return read()
        except OSError as error:
            if not transient(error):
                raise
            attempts += 1
            tried_s = clock() - began_s
            wait_s = pause_s * (0.5 + jitter() / 2)
            if tried_s + wait_s > deadline_s:
                raise DataError(
                    f"the store gave no answer in {tried_s:.1f} s and {attempts} attempts; the last: {error}",
                    where=where,
                    remedy="see whether the store is up and throttles, then run again: it goes on from its checkpoint",
                ) from error
        sleep(wait_s)
        pause_s = min(2 * pause_s, _LONGEST_S)
