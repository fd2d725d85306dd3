"""One run from its start to its end, under faults or none, each of its drivers in a process of its own."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainwright.chaos_testing.fault_schedule import (
    ObservedState,
    ObservedWorker,
    PreviousFault,
    ScheduledFault,
    Target,
    next_fault,
    remaining_faults,
)
from trainwright.chaos_testing.process_control import DriverExit, ObservedDriver, ProcessSignaller
from trainwright.chaos_testing.store_outage import Outage
from trainwright.core.errors import HangError
from trainwright.core.events import Event, Failed, Formed, Placed, Promoted, RunEnded

_TICK_S = 0.1  # faults that are due by the clock strike this late at most
_WORKER_EXIT_TIMEOUT_S = 20.0  # for workers to end after their driver
_DRIVER_EXIT_TIMEOUT_S = 60.0  # for a driver that stood still to find out that it was replaced, and to end


@dataclass(frozen=True, kw_only=True)
class ObservedRun:
    """What came of one run.

    Attributes:
        events: of all its drivers, in order.
        given: faults, in order.
        missed: faults that found no moment.
        error: why the run failed; empty where it is done.
        remaining: worker processes that did not end.
    """

    events: tuple[Event, ...]
    given: tuple[InjectedFault, ...] = ()
    missed: tuple[str, ...] = ()
    error: str = ""
    remaining: tuple[ObservedWorker, ...] = ()


class RunObserver:
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
        strikes: Sequence[ScheduledFault] = (),
        outages: Mapping[Target, Outage],
        spent: Callable[[], object] = lambda: None,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._order, self._silence_s, self._spent, self._say = order, silence_s, spent, say
        self._environment = dict(environment)
        for outage in outages.values():
            self._environment |= outage.environment
        self._hands = ProcessSignaller()
        self._injector = _FaultInjector(name, self._hands, outages)
        self._strikes, self._past = list(strikes), PreviousFault(at_s=0.0)
        self._scene, self._end = ObservedState(), RunEnded()
        self._aimed: tuple[ScheduledFault, float] | None = None
        self._stalled: list[ObservedDriver] = []
        self._events: list[Event] = []

    def run(self) -> ObservedRun:
        """To the end; no process of the run is left when it returns, but for those in `remaining`."""
        with contextlib.closing(self._injector):
            error = self._drive()
        return ObservedRun(
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
                driver = drivers.enter_context(contextlib.closing(ObservedDriver(self._order, self._environment)))
                end = self._observe(driver)
                if isinstance(end, HangError):
                    return str(end)
                if not end.killed or self._end.outcome == "done":
                    break
                self._say("another driver is started" if driver.stalled_s else "the driver is started again")
            if self._end.outcome == "done":
                return next(filter(None, map(_stalled_driver_error, self._stalled)), "")
            return self._end.error or driver.last_words() or f"the driver ended with code {end.code}"

    def _observe(self, driver: ObservedDriver) -> DriverExit | HangError:
        """Follow a driver to its end, and strike when it is time."""
        heard_s = time.monotonic()
        while True:
            heard = driver.next(_TICK_S if self._aimed is None else _TICK_S / 10)
            if isinstance(heard, DriverExit):
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

    def _set_aside(self, driver: ObservedDriver) -> DriverExit:
        """A driver stands still: hear what it said before. It goes on when another one has formed a group."""
        while (heard := driver.next(_TICK_S)) is not None:
            if isinstance(heard, DriverExit):
                return heard
            self._hear(heard)
        self._scene = ObservedState(step=self._scene.step, committed=self._scene.committed)
        self._stalled.append(driver)
        return DriverExit(code=0, killed=True)

    def _hear(self, event: Event) -> None:
        self._events.append(event)
        self._scene = self._scene.after(event)
        if isinstance(event, Placed):
            self._hands.meet(self._scene.processes[event.worker])
        if isinstance(event, Formed):
            self._past = self._past if self._past.at_s else PreviousFault(at_s=time.monotonic())
            for driver in self._stalled:
                driver.wake()
        if isinstance(event, RunEnded):
            self._end = event
        given = self._injector.hear(event, self._scene)
        if given is not None:
            self._say(f"  and in the recovery {given.whom[-1]}")

    def _aim(self) -> ScheduledFault | None:
        """The fault whose moment has come: it was due, and still is after its own small delay."""
        now_s, scene = time.monotonic(), self._scene
        strike = next_fault(
            self._strikes, scene, self._past, now_s, lambda strike: self._injector.possible(strike, scene)
        )
        if strike is None:
            self._aimed = None
        elif self._aimed is None or self._aimed[0] is not strike:
            self._aimed = strike, now_s + strike.delay_s
        return strike if strike is not None and self._aimed is not None and now_s >= self._aimed[1] else None

    def _strike(self, driver: ObservedDriver) -> None:
        strike, now_s, scene = self._aim(), time.monotonic(), self._scene
        if strike is None:
            return
        self._strikes = remaining_faults(self._strikes, strike)
        given = self._injector.strike(strike, scene, driver)
        if not strike.fault.starting:
            self._past = PreviousFault(at_s=now_s, step=scene.step)
        if strike.fault.target == "driver":
            self._scene = ObservedState(step=scene.step, committed=scene.committed)
        self._say(f"step {given.step}: {given.fault}: {', '.join(given.whom)}")
        if not self._strikes:
            self._spent()

    def _remaining(self) -> tuple[ObservedWorker, ...]:
        """Processes of the run that live on after it, once they have had the time to end."""
        until_s = time.monotonic() + _WORKER_EXIT_TIMEOUT_S
        while True:
            found = tuple(process for process in self._hands.met() if self._hands.lives(process))
            if not found or time.monotonic() > until_s:
                return found
            time.sleep(_TICK_S)


def _stalled_driver_error(stalled: ObservedDriver) -> str:
    """What a driver did wrong that stood still while another took its run over; empty where it only ended."""
    stalled.wake()
    whom, since_s = f"the driver (pid {stalled.pid}) that stood still", (stalled.stalled_s or 0.0) + _TICK_S
    while not isinstance(heard := stalled.next(_DRIVER_EXIT_TIMEOUT_S), DriverExit):
        if heard is None:
            return f"{whom} did not end within {_DRIVER_EXIT_TIMEOUT_S:g} s after another had taken its run over"
        if isinstance(heard, Placed | Formed) and heard.time_s > since_s:
            return f"{whom} went on with the run that another had taken over: {heard}"
    return "" if heard.code else f"{whom} ended as if the run were its own"


# --- Faults given -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """A fault that was given.

    Attributes:
        time_s: seconds since the epoch.
        step: newest completed step known.
        whom: it struck, in words.
    """

    fault: str
    time_s: float
    step: int
    whom: tuple[str, ...]


class _FaultInjector:
    """Gives the faults of one run. One thread, but for the end of an outage, which has a timer of its own.

    Args:
        run: its name.
        outages: how what is no process is made to fail, by target.

    Attributes:
        given: so far, in order.
    """

    def __init__(self, run: str, hands: ProcessSignaller, outages: Mapping[Target, Outage]) -> None:
        self.given: list[InjectedFault] = []
        self._run, self._hands, self._outages = run, hands, outages
        self._timer: threading.Timer | None = None
        self._second: ScheduledFault | None = None
        self._struck: set[int] = set()

    def possible(self, strike: ScheduledFault, scene: ObservedState) -> bool:
        """Whether there is somebody to strike; nothing is struck during an outage."""
        fault = strike.fault
        if self._timer is not None and self._timer.is_alive():
            return False
        if fault.target == "driver" or fault.seconds:
            return True
        living = self._living(scene, spares=fault.target == "spare")
        return len(living) >= (1 if fault.again else fault.least_workers)

    def strike(self, strike: ScheduledFault, scene: ObservedState, driver: ObservedDriver) -> InjectedFault:
        """Give a fault that is possible; returns what was done."""
        time_s, fault = time.time(), strike.fault
        if fault.target == "driver":
            driver.stall() if fault.number == signal.SIGSTOP else driver.kill()
            whom: tuple[str, ...] = (f"driver (pid {driver.pid}) {signal.Signals(fault.number).name}",)
        elif fault.seconds:
            whom = (self._cut_off(strike),)
        else:
            whom = self._signal(strike, self._living(scene, spares=fault.target == "spare"))
            self._second = strike if fault.again else None
        given = InjectedFault(fault=fault.name, time_s=time_s, step=scene.step, whom=whom)
        self.given.append(given)
        return given

    def hear(self, event: Event, scene: ObservedState) -> InjectedFault | None:
        """Give the second kill of `again` within the recovery: at the news of the loss, or of the newcomer."""
        strike = self._second
        if isinstance(event, Formed):
            self._second = None
        early = strike is not None and strike.draw < 0.5
        if strike is None or not isinstance(event, (Failed, Promoted, Placed) if early else (Promoted, Placed)):
            return None
        living = [process for process in self._living(scene, spares=False) if process.pid not in self._struck]
        if not living:
            return None
        self._second = None
        whom = self._signal(strike, living)
        self.given[-1] = replace(self.given[-1], whom=(*self.given[-1].whom, *whom))
        return self.given[-1]

    def close(self) -> None:
        """All works again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        for outage in self._outages.values():
            outage.close()

    def _living(self, scene: ObservedState, *, spares: bool) -> list[ObservedWorker]:
        wanted = scene.spares if spares else scene.workers
        return [process for process in wanted if self._hands.lives(process)]

    def _signal(self, strike: ScheduledFault, living: list[ObservedWorker]) -> tuple[str, ...]:
        first = int(strike.draw * len(living))
        chosen = [*living[first:], *living[:first]][: strike.fault.victims]
        struck = [process for process in chosen if self._hands.send(process, strike.fault.number)]
        self._struck |= {process.pid for process in struck}
        name = signal.Signals(strike.fault.number).name
        return tuple(f"{process} {name}" for process in struck)

    def _cut_off(self, strike: ScheduledFault) -> str:
        fault = strike.fault
        outage = self._outages[fault.target]
        how = outage.begin(self._run, strike.draw)
        self._timer = threading.Timer(fault.seconds, outage.end)
        self._timer.start()
        return f"{fault.target} for {fault.seconds:g} s: {how}"
