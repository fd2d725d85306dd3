"""One run from its start to its end, under faults or none, each of its drivers in a process of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.chaos_testing.driver_process import Driver, Ended
from trainwright.chaos_testing.fault_catalogue import Target
from trainwright.chaos_testing.fault_injector import Given, Injector
from trainwright.chaos_testing.fault_schedule import Past, Strike, next_of, rest_of
from trainwright.chaos_testing.remote_signal import Hands
from trainwright.chaos_testing.run_state import Process, Scene
from trainwright.chaos_testing.store_outage import Outage
from trainwright.core.errors import HangError
from trainwright.core.events import Event, Formed, Placed, RunEnded

_TICK_S = 0.1  # faults that are due by the clock strike this late at most
GONE_S = 20.0  # for workers to end after their driver
REPLACED_S = 60.0  # for a driver that stood still to find out that it was replaced, and to end


@dataclass(frozen=True, kw_only=True)
class Course:
    """What came of one run.

    Attributes:
        events: of all its drivers, in order.
        given: faults, in order.
        missed: faults that found no moment.
        error: why the run failed; empty where it is done.
        remaining: worker processes that did not end.
    """

    events: tuple[Event, ...]
    given: tuple[Given, ...] = ()
    missed: tuple[str, ...] = ()
    error: str = ""
    remaining: tuple[Process, ...] = ()


class Runner:
    """Runs one order to its end.

    Args:
        name: of the run.
        order: file of `subject.write_order`.
        strikes: the faults to give.
        outages: how what is no process is made to fail, by the target of strikes.
        silence_s: without an event, after which the run counts as hanging.
        spent: called once all faults are given.
        say: takes a line for people.
    """

    def __init__(
        self,
        name: str,
        order: Path,
        *,
        environment: Mapping[str, str],
        silence_s: float,
        strikes: Sequence[Strike] = (),
        outages: Mapping[Target, Outage],
        spent: Callable[[], object] = lambda: None,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._order, self._silence_s, self._spent, self._say = order, silence_s, spent, say
        self._environment = dict(environment)
        for outage in outages.values():
            self._environment |= outage.environment
        self._hands = Hands()
        self._injector = Injector(name, self._hands, outages)
        self._strikes, self._past = list(strikes), Past(at_s=0.0)
        self._scene, self._end = Scene(), RunEnded()
        self._aimed: tuple[Strike, float] | None = None
        self._stalled: list[Driver] = []
        self._events: list[Event] = []

    def run(self) -> Course:
        """To the end; no process of the run is left when it returns, but for those in `remaining`."""
        with contextlib.closing(self._injector):
            error = self._drive()
        return Course(
            events=tuple(self._events),
            given=tuple(self._injector.given),
            missed=tuple(strike.fault.name for strike in self._strikes),
            error=error,
            remaining=self._remaining(),
        )

    def _drive(self) -> str:
        """One driver after the other, until one ends by itself; why the run failed."""
        with contextlib.ExitStack() as drivers:
            while True:
                driver = drivers.enter_context(contextlib.closing(Driver(self._order, self._environment)))
                end = self._observe(driver)
                if isinstance(end, HangError):
                    return str(end)
                if not end.killed or self._end.outcome == "done":
                    break
                self._say("another driver is started" if driver.stalled_s else "the driver is started again")
            if self._end.outcome == "done":
                return next(filter(None, map(_harm_of, self._stalled)), "")
            return self._end.error or driver.last_words() or f"the driver ended with code {end.code}"

    def _observe(self, driver: Driver) -> Ended | HangError:
        """Follow a driver to its end, and strike when it is time."""
        heard_s = time.monotonic()
        while True:
            heard = driver.next(_TICK_S if self._aimed is None else _TICK_S / 10)
            if isinstance(heard, Ended):
                return heard
            if heard is not None:
                heard_s = time.monotonic()
                self._hear(heard)
            elif time.monotonic() - heard_s > self._silence_s:
                return HangError(
                    f"nothing was heard of the run for {self._silence_s:.0f} s",
                    remedy=f"the last event was {self._events[-1]}" if self._events else "look at its log",
                    detail=driver.last_words(),
                )
            if not driver.killed:
                self._strike(driver)
            if driver.stalled_s is not None:
                return self._set_aside(driver)

    def _set_aside(self, driver: Driver) -> Ended:
        """A driver stands still: hear what it said before. It goes on when another one has formed a group."""
        while (heard := driver.next(_TICK_S)) is not None:
            if isinstance(heard, Ended):
                return heard
            self._hear(heard)
        self._scene = Scene(step=self._scene.step, committed=self._scene.committed)
        self._stalled.append(driver)
        return Ended(code=0, killed=True)

    def _hear(self, event: Event) -> None:
        self._events.append(event)
        self._scene = self._scene.after(event)
        if isinstance(event, Placed):
            self._hands.meet(self._scene.processes[event.worker])
        if isinstance(event, Formed):
            self._past = self._past if self._past.at_s else Past(at_s=time.monotonic())
            for driver in self._stalled:
                driver.wake()
        if isinstance(event, RunEnded):
            self._end = event
        given = self._injector.hear(event, self._scene)
        if given is not None:
            self._say(f"  and in the recovery {given.whom[-1]}")

    def _aim(self) -> Strike | None:
        """The fault whose moment has come: it was due, and still is after its own small delay."""
        now_s, scene = time.monotonic(), self._scene
        strike = next_of(self._strikes, scene, self._past, now_s, lambda strike: self._injector.possible(strike, scene))
        if strike is None:
            self._aimed = None
        elif self._aimed is None or self._aimed[0] is not strike:
            self._aimed = strike, now_s + strike.delay_s
        return strike if strike is not None and self._aimed is not None and now_s >= self._aimed[1] else None

    def _strike(self, driver: Driver) -> None:
        strike, now_s, scene = self._aim(), time.monotonic(), self._scene
        if strike is None:
            return
        self._strikes = rest_of(self._strikes, strike)
        given = self._injector.strike(strike, scene, driver)
        if not strike.fault.starting:
            self._past = Past(at_s=now_s, step=scene.step)
        if strike.fault.target == "driver":
            self._scene = Scene(step=scene.step, committed=scene.committed)
        self._say(f"step {given.step}: {given.fault}: {', '.join(given.whom)}")
        if not self._strikes:
            self._spent()

    def _remaining(self) -> tuple[Process, ...]:
        """Processes of the run that live on after it, once they have had the time to end."""
        until_s = time.monotonic() + GONE_S
        while True:
            found = tuple(process for process in self._hands.met() if self._hands.lives(process))
            if not found or time.monotonic() > until_s:
                return found
            time.sleep(_TICK_S)


def _harm_of(stalled: Driver) -> str:
    """What a driver did wrong that stood still while another took its run over; empty where it only ended."""
    stalled.wake()
    whom, since_s = f"the driver (pid {stalled.pid}) that stood still", (stalled.stalled_s or 0.0) + _TICK_S
    while not isinstance(heard := stalled.next(REPLACED_S), Ended):
        if heard is None:
            return f"{whom} did not end within {REPLACED_S:g} s after another had taken its run over"
        if isinstance(heard, Placed | Formed) and heard.time_s > since_s:
            return f"{whom} went on with the run that another had taken over: {heard}"
    return "" if heard.code else f"{whom} ended as if the run were its own"
