"""Follow the log of a submitted job to its end, over connections that may break."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable

from trainwright.submit.job_server import JobDetails, JobServer, JobServerUnreachable

_RECONNECT_S = 120.0  # without an answer of the server until following ends
_PAUSE_S = 1.0


class LogDisplay:
    """Shows the lines of a job's log, without Ray's own lines unless `verbose` is set.

    Args:
        write_line: prints a line.
        verbose: also show Ray's lines.

    Attributes:
        trainwright_missing: whether a line said that the cluster's Python has no trainwright.
    """

    def __init__(self, write_line: Callable[[str], object], *, verbose: bool = False) -> None:
        self._write_line, self._verbose = write_line, verbose
        self.trainwright_missing = False

    def show(self, text: str) -> None:
        """Show one line of the log."""
        self.trainwright_missing = self.trainwright_missing or reports_missing_trainwright(text)
        if self._verbose or not is_ray_message(text):
            self._write_line(text)


class LogFollower:
    """Follows one job to its end.

    Args:
        server: where the job runs.
        submission: ID of the job.
        display: shows the lines of its log.
        patience_s: how long the server may not answer.
        say: takes a line about the connection.
    """

    def __init__(
        self,
        server: JobServer,
        submission: str,
        display: LogDisplay,
        *,
        patience_s: float = _RECONNECT_S,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._server, self._submission, self._display = server, submission, display
        self._patience_s, self._say = patience_s, say
        self._cursor = LogCursor()
        self._lost_s: float | None = None

    def follow(self) -> JobDetails:
        """Show the log until the job has ended; return its details.

        Raises:
            JobServerUnreachable: the server has not answered for too long.
            KeyboardInterrupt: Ctrl-C.
        """
        return asyncio.run(self._follow())

    async def _follow(self) -> JobDetails:
        while True:
            try:
                await self._show()
                details = await asyncio.to_thread(self._server.job, self._submission)
                self._found()
                if details.ended:
                    await self._show_rest()
                    return details
            except JobServerUnreachable as error:
                self._lose(error)
            await asyncio.sleep(_PAUSE_S)

    async def _show(self) -> None:
        """Show what one connection sends."""
        self._cursor.rewind()
        async for piece in self._server.tail(self._submission):
            self._found()
            for line in self._cursor.feed(piece):
                self._display.show(line)

    async def _show_rest(self) -> None:
        """Show what a broken connection did not send."""
        self._cursor.rewind()
        log = await asyncio.to_thread(self._server.log, self._submission)
        for line in (*self._cursor.feed(log), *self._cursor.flush()):
            self._display.show(line)

    def _found(self) -> None:
        if self._lost_s is not None:
            self._say("the cluster answers again")
        self._lost_s = None

    def _lose(self, error: JobServerUnreachable) -> None:
        """Start or continue to wait; raise the error after too long."""
        now_s = time.monotonic()
        if self._lost_s is None:
            self._lost_s = now_s
            self._say(f"the connection to {self._server.address} is lost; trying again for {self._patience_s:.0f} s")
        elif now_s - self._lost_s > self._patience_s:
            raise error


# --- Lines of a log ---------------------------------------------------------------------------------------------------


_RAY_MESSAGE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\s+INFO \w+\.py:\d+ -- |Running entrypoint for job ")
_NO_TRAINWRIGHT = re.compile(
    r"No module named '?trainwright\b|Error while finding module specification for 'trainwright"
)


class LogCursor:
    """Position in a log. Each connection sends the log from its start; the cursor skips what was shown already."""

    def __init__(self) -> None:
        self._told = self._place = 0
        self._rest = ""

    def rewind(self) -> None:
        """Start with a new connection."""
        self._place = 0

    def feed(self, text: str) -> list[str]:
        """Return the lines that a piece of the log completes."""
        new = text[max(0, self._told - self._place) :]
        self._place += len(text)
        self._told = max(self._told, self._place)
        *lines, self._rest = (self._rest + new).split("\n")
        return lines

    def flush(self) -> list[str]:
        """Return the last line if it has no line end."""
        rest, self._rest = self._rest, ""
        return [rest] if rest else []


def is_ray_message(line: str) -> bool:
    """Return whether a line is Ray's own output about the start of a job."""
    return _RAY_MESSAGE.match(line) is not None


def reports_missing_trainwright(line: str) -> bool:
    """Return whether a line says that the cluster's Python has no trainwright."""
    return _NO_TRAINWRIGHT.search(line) is not None
