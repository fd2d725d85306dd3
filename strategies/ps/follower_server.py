"""The servers after the first: they do as that says, which a thread of its own listens to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainwright.core.data import StepReport
from trainwright.core.group import Group, Peer
from trainwright.core.staleness import Unit
from trainwright.strategies.ps.client_transport import Link, dial
from trainwright.strategies.ps.lease_table import Closing
from trainwright.strategies.ps.server import Desk
from trainwright.strategies.ps.sockets import Listener, Switch


class Follower(Desk):
    """A server after the first.

    Raises PeerLost where the first cannot be reached within the group's deadline, or once the switch is cut.
    """

    def __init__(self, listener: Listener, group: Group, servers: Sequence[Peer], switch: Switch | None = None) -> None:
        super().__init__(listener, group, servers, switch)
        self._mouth_lock = threading.Lock()
        self._links: list[Link] = []
        self._thread.start()
        try:
            self._links += [self._dialled(), self._dialled()]
        except BaseException:
            super().close()
            raise
        self._ear, self._mouth = self._links
        self._listener = threading.Thread(target=self._listen, name=f"ear of rank {group.rank}", daemon=True)
        self._listener.start()

    def serve(self, start: int, until: int, wish: Callable[[], bool]) -> Iterator[StepReport]:
        """No report: the first server gives those."""
        with self.lock:
            self._begin(start)
        self._say(opens=until)
        news = self._news.get()
        if isinstance(news, Exception):
            raise news
        yield from ()

    def join(self, deadline_s: float) -> bool:
        """Whether both threads have ended within the deadline."""
        until = time.monotonic() + deadline_s
        self._listener.join(deadline_s)
        return super().join(max(0.0, until - time.monotonic())) and not self._listener.is_alive()

    def close(self) -> None:
        """End and free everything."""
        super().close()
        self._listener.join()
        self._mouth.close()

    def _fail(self, error: Exception) -> None:
        super()._fail(error)
        self._switch.cut()
        for link in tuple(self._links):
            link.cut()

    def _dialled(self) -> Link:
        return dial(self._servers[0], self._group.key, self._group.rank, self._until(), self._switch)

    def _until(self) -> float:
        return time.monotonic() + self._group.deadline_s

    def _listen(self) -> None:
        """Hear what the first server says, until the connection ends."""
        heard = 0
        try:
            while not self._lines.ended:
                until = self._until()
                self._ear.call(json.dumps({"do": "hear", "heard": heard}).encode(), until)
                events = json.loads(self._ear.answer(until))["events"]
                for event in events:
                    self._follow(event)
                heard += len(events)
                with self.lock:  # a server that is stuck must not say that it lives
                    self._apply_due()
                self._lines.wake()  # pulls may have waited for the update
        except Exception as error:
            self._fail(error)
        finally:
            self._ear.close()

    def _follow(self, event: dict[str, Any]) -> None:
        match event:
            case {"close": told}:
                units = tuple(Unit(step=step, share=share, steps=steps) for step, share, steps in told["units"])
                closing = Closing(at=told["at"], step=told["step"], steps=told["steps"], units=units)
                with self.lock:
                    self.gate.close(closing)
            case {"clip": told}:
                with self.lock:
                    self._factors[told["at"]] = told["factor"]
            case {"over": step}:
                with self.lock:
                    self._apply_due()
                    self.step, self.sound = step, True
                self._say(stands=step)
                self._news.put(None)

    def _tell_norm(self, at: int, norm2: float) -> None:
        self._say(part=[at, norm2])

    def _say(self, **said: object) -> None:
        """Tell the first server something; it answers at once."""
        with self._mouth_lock:
            until = self._until()
            self._mouth.call(json.dumps({"do": "say", **said}).encode(), until)
            self._mouth.answer(until)
