"""A job's log followed to its end, over connections that may break, and shown as `fit` shows a run."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console

from trainwright.reporting.event_messages import OutputLine, ProgressFigures
from trainwright.reporting.progress_bar import PlainTextDisplay, ProgressDisplay, display_for
from trainwright.submit.job_server import JobDetails, JobServer, JobServerUnreachable

_RECONNECT_S = 120.0  # without an answer of the server, until it is given up
_PAUSE_S = 1.0


class LogDisplay:
    """Shows the lines of a log: a bar in a terminal, where a line has figures, and the lines as they are elsewhere.

    Attributes:
        lacks_trainwright: whether a line said so.
    """

    def __init__(self, console: Console, *, verbose: bool = False, surface: ProgressDisplay | None = None) -> None:
        self._surface = surface or display_for(console)
        self._verbose = verbose
        self.lacks_trainwright = False

    def line(self, text: str) -> None:
        """One line of the log."""
        self.lacks_trainwright = self.lacks_trainwright or reports_missing_trainwright(text)
        figures = None if isinstance(self._surface, PlainTextDisplay) else parse_figures(text)
        if figures is not None:
            self._surface.show(figures, news=True)
        elif self._verbose or not is_ray_message(text):
            self._surface.line(OutputLine(text=text))

    def close(self) -> None:
        """Take the bar away."""
        self._surface.close()


class LogFollower:
    """Follows one job.

    Args:
        patience_s: for how long the server may not answer.
        say: takes a line about the connection.
    """

    def __init__(
        self,
        server: JobServer,
        submission: str,
        screen: LogDisplay,
        *,
        patience_s: float = _RECONNECT_S,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._server, self._submission, self._screen = server, submission, screen
        self._patience_s, self._say = patience_s, say
        self._reel = LogCursor()
        self._lost_s: float | None = None

    def follow(self) -> JobDetails:
        """Show the log until the job is over; how it ended.

        Raises:
            Unreachable: the server has not answered for too long.
            KeyboardInterrupt: Ctrl-C.
        """
        try:
            return asyncio.run(self._follow())
        finally:
            self._screen.close()

    async def _follow(self) -> JobDetails:
        while True:
            try:
                await self._show()
                news = await asyncio.to_thread(self._server.job, self._submission)
                self._found()
                if news.over:
                    await self._show_rest()
                    return news
            except JobServerUnreachable as error:
                self._lose(error)
            await asyncio.sleep(_PAUSE_S)

    async def _show(self) -> None:
        """What one connection gives."""
        self._reel.rewind()
        async for piece in self._server.tail(self._submission):
            self._found()
            for line in self._reel.take(piece):
                self._screen.line(line)

    async def _show_rest(self) -> None:
        """What a connection that broke before the end did not give."""
        self._reel.rewind()
        log = await asyncio.to_thread(self._server.log, self._submission)
        for line in (*self._reel.take(log), *self._reel.end()):
            self._screen.line(line)

    def _found(self) -> None:
        if self._lost_s is not None:
            self._say("the cluster answers again")
        self._lost_s = None

    def _lose(self, error: JobServerUnreachable) -> None:
        """Begin to wait, or have waited for too long."""
        now_s = time.monotonic()
        if self._lost_s is None:
            self._lost_s = now_s
            self._say(f"the connection to {self._server.address} is lost; trying again for {self._patience_s:.0f} s")
        elif now_s - self._lost_s > self._patience_s:
            raise error


# --- The log of a job as it comes over connections that break ---------------------------------------------------------


_FIGURES = re.compile(
    r"step (?P<step>[\d,]+)/(?P<total>[\d,]+), epoch (?P<epoch>\d+)/(?P<epochs>\d+)"
    r"(?:, loss (?P<loss>\S+), (?P<rate>[\d.,]+) samples/s(?:, waiting for data (?P<wait>\d+)%)?"
    r", (?P<left>[\d:-]+) left)?"
    r"(?:, (?P<activity>\D.*))?"
)
_RAY_MESSAGE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\s+INFO \w+\.py:\d+ -- |Running entrypoint for job ")
_NO_TRAINWRIGHT = re.compile(
    r"No module named '?trainwright\b|Error while finding module specification for 'trainwright"
)


class LogCursor:
    """What was told of a log. A connection gives it from its beginning; what was told already is passed over."""

    def __init__(self) -> None:
        self._told = self._place = 0
        self._rest = ""

    def rewind(self) -> None:
        """A new connection begins."""
        self._place = 0

    def take(self, text: str) -> list[str]:
        """The lines that a piece completes."""
        new = text[max(0, self._told - self._place) :]
        self._place += len(text)
        self._told = max(self._told, self._place)
        *lines, self._rest = (self._rest + new).split("\n")
        return lines

    def end(self) -> list[str]:
        """What is left when the log is over: a last line without an end, or none."""
        rest, self._rest = self._rest, ""
        return [rest] if rest else []


def is_ray_message(line: str) -> bool:
    """Whether a line is Ray's talk of how it starts a job."""
    return _RAY_MESSAGE.match(line) is not None


def reports_missing_trainwright(line: str) -> bool:
    """Whether a line says that the cluster's Python has no trainwright."""
    return _NO_TRAINWRIGHT.search(line) is not None


def parse_figures(line: str) -> ProgressFigures | None:
    """The figures of a line that `Figures.text` wrote; None for any other."""
    found = _FIGURES.fullmatch(line)
    if found is None:
        return None
    steps = ProgressFigures(
        step=_parse_count(found["step"]),
        total=_parse_count(found["total"]),
        epoch=_parse_count(found["epoch"]),
        epochs=_parse_count(found["epochs"]),
        activity=found["activity"] or "",
    )
    if found["loss"] is None:
        return steps
    try:
        loss, rate = float(found["loss"]), float(found["rate"].replace(",", ""))
    except ValueError:
        return None
    wait = int(found["wait"]) / 100 if found["wait"] else math.nan
    return replace(steps, loss=loss, samples_per_s=rate, wait_share=wait, left_s=_parse_time_left(found["left"]))


def _parse_count(text: str) -> int:
    return int(text.replace(",", ""))


def _parse_time_left(clock: str) -> float:
    """Seconds of `1:05:09`; NaN of `-:--`."""
    if "-" in clock:
        return math.nan
    seconds = 0
    for part in clock.split(":"):
        seconds = 60 * seconds + int(part)
    return float(seconds)
