"""Faults given: the effects."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from trainwright.chaos_testing.driver_process import Driver
from trainwright.chaos_testing.fault_catalogue import Target
from trainwright.chaos_testing.fault_schedule import Strike
from trainwright.chaos_testing.remote_signal import Hands
from trainwright.chaos_testing.run_state import Process, Scene
from trainwright.chaos_testing.store_outage import Outage
from trainwright.core.events import Event, Failed, Formed, Placed, Promoted


@dataclass(frozen=True, kw_only=True)
class Given:
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


class Injector:
    """Gives the faults of one run. One thread, but for the end of an outage, which has a timer of its own.

    Args:
        run: its name.
        outages: how what is no process is made to fail, by target.

    Attributes:
        given: so far, in order.
    """

    def __init__(self, run: str, hands: Hands, outages: Mapping[Target, Outage]) -> None:
        self.given: list[Given] = []
        self._run, self._hands, self._outages = run, hands, outages
        self._timer: threading.Timer | None = None
        self._second: Strike | None = None
        self._struck: set[int] = set()

    def possible(self, strike: Strike, scene: Scene) -> bool:
        """Whether there is somebody to strike; nothing is struck during an outage."""
        fault = strike.fault
        if self._timer is not None and self._timer.is_alive():
            return False
        if fault.target == "driver" or fault.seconds:
            return True
        living = self._living(scene, spares=fault.target == "spare")
        return len(living) >= (1 if fault.again else fault.least_workers)

    def strike(self, strike: Strike, scene: Scene, driver: Driver) -> Given:
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
        given = Given(fault=fault.name, time_s=time_s, step=scene.step, whom=whom)
        self.given.append(given)
        return given

    def hear(self, event: Event, scene: Scene) -> Given | None:
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

    def _living(self, scene: Scene, *, spares: bool) -> list[Process]:
        wanted = scene.spares if spares else scene.workers
        return [process for process in wanted if self._hands.lives(process)]

    def _signal(self, strike: Strike, living: list[Process]) -> tuple[str, ...]:
        first = int(strike.draw * len(living))
        chosen = [*living[first:], *living[:first]][: strike.fault.victims]
        struck = [process for process in chosen if self._hands.send(process, strike.fault.number)]
        self._struck |= {process.pid for process in struck}
        name = signal.Signals(strike.fault.number).name
        return tuple(f"{process} {name}" for process in struck)

    def _cut_off(self, strike: Strike) -> str:
        fault = strike.fault
        outage = self._outages[fault.target]
        how = outage.begin(self._run, strike.draw)
        self._timer = threading.Timer(fault.seconds, outage.end)
        self._timer.start()
        return f"{fault.target} for {fault.seconds:g} s: {how}"
