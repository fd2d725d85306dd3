"""A job's log followed to its end, over connections that may break, and shown as `fit` shows a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rich.console import Console

from trainwright.reporting.event_messages import Line
from trainwright.reporting.progress import Plain, Surface, surface_for
from trainwright.submit.job_server import JobNews, JobServer, Unreachable
from trainwright.submit.log_lines import Reel, figures_of, is_rays_own, lacks_trainwright

PATIENCE_S = 120.0  # without an answer of the server, until it is given up
_PAUSE_S = 1.0


class Screen:
    """Shows the lines of a log: a bar in a terminal, where a line has figures, and the lines as they are elsewhere.

    Attributes:
        lacks_trainwright: whether a line said so.
    """

    def __init__(self, console: Console, *, verbose: bool = False, surface: Surface | None = None) -> None:
        self._surface = surface or surface_for(console)
        self._verbose = verbose
        self.lacks_trainwright = False

    def line(self, text: str) -> None:
        """One line of the log."""
        self.lacks_trainwright = self.lacks_trainwright or lacks_trainwright(text)
        figures = None if isinstance(self._surface, Plain) else figures_of(text)
        if figures is not None:
            self._surface.show(figures, news=True)
        elif self._verbose or not is_rays_own(text):
            self._surface.line(Line(text=text))

    def close(self) -> None:
        """Take the bar away."""
        self._surface.close()


class Follower:
    """Follows one job.

    Args:
        patience_s: for how long the server may not answer.
        say: takes a line about the connection.
    """

    def __init__(
        self,
        server: JobServer,
        submission: str,
        screen: Screen,
        *,
        patience_s: float = PATIENCE_S,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._server, self._submission, self._screen = server, submission, screen
        self._patience_s, self._say = patience_s, say
        self._reel = Reel()
        self._lost_s: float | None = None

    def follow(self) -> JobNews:
        """Show the log until the job is over; how it ended.

        Raises:
            Unreachable: the server has not answered for too long.
            KeyboardInterrupt: Ctrl-C.
        """
        try:
            return asyncio.run(self._follow())
        finally:
            self._screen.close()

    async def _follow(self) -> JobNews:
        while True:
            try:
                await self._show()
                news = await asyncio.to_thread(self._server.job, self._submission)
                self._found()
                if news.over:
                    await self._show_rest()
                    return news
            except Unreachable as error:
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

    def _lose(self, error: Unreachable) -> None:
        """Begin to wait, or have waited for too long."""
        now_s = time.monotonic()
        if self._lost_s is None:
            self._lost_s = now_s
            self._say(f"the connection to {self._server.address} is lost; trying again for {self._patience_s:.0f} s")
        elif now_s - self._lost_s > self._patience_s:
            raise error
