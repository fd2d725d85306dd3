"""Observe one run from start to end and inject faults. Each driver of the run is a process of its own."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainwright.chaos_testing.fault_schedule import (
    PreviousFault,
    ScheduledFault,
    Target,
    next_fault,
    process_text,
    processes_of,
    remaining_faults,
)
from trainwright.chaos_testing.store_outage import Outage
from trainwright.core.errors import HangError, ResourceError
from trainwright.core.events import Event, Failed, Formed, Placed, Promoted, RunEnded, RunStarted, from_json
from trainwright.storage.run_log import process_start_ticks
from trainwright.storage.run_summary import RunSummary

_DRIVER_MODULE = "trainwright.chaos_testing.driver_main"
_EXIT_TIMEOUT_S = 30.0  # for a driver to end after SIGTERM
_TAIL_BYTES = 4_000


class _ObservedDriver:
    """A process of `driver_main`. `next` returns its events in order, and its exit code at the end.

    Args:
        job_file: a pickled job.

    Attributes:
        killed: whether the observer killed it.
        paused_s: when it was paused so that another driver takes over, seconds since the epoch; None if it was not.
    """

    def __init__(self, job_file: Path, environment: Mapping[str, str]) -> None:
        self.log_file = job_file.with_suffix(".log")
        self.killed = False
        self.paused_s: float | None = None
        self._queue: queue.SimpleQueue[Event | int] = queue.SimpleQueue()
        reading, writing = os.pipe()
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _DRIVER_MODULE, str(job_file), str(writing)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(writing,), start_new_session=True,
                env={**os.environ, **environment},
            )  # fmt: skip
        os.close(writing)
        self._thread = threading.Thread(target=self._read, args=(reading,), name="trainwright-events", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Return the process ID."""
        return self._process.pid

    def _read(self, pipe: int) -> None:
        with os.fdopen(pipe, encoding="utf-8") as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # the last line of a killed driver may be torn
                    self._queue.put(from_json(line))
        self._queue.put(self._process.wait())

    def next(self, timeout_s: float) -> Event | int | None:
        """Return the next event, or the exit code; None if there is none in time."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def kill(self) -> None:
        """Send SIGKILL."""
        self.killed = True
        self._process.kill()

    def pause(self) -> None:
        """Send SIGSTOP."""
        self.paused_s = time.time()
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process if it still runs: first with SIGTERM, so that its workers end too."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self.resume()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_TIMEOUT_S)
            self._process.kill()
        self._process.wait()
        self._thread.join(_EXIT_TIMEOUT_S)

    def log_tail(self) -> str:
        """Return the end of its output."""
        return self.log_file.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()


# --- Signals to processes on any node ---------------------------------------------------------------------------------


_REMOTE_S = 30.0  # for a task on another node


def send_signal(pid: int, started: int, number: int) -> bool:
    """Send a signal to a process; return False if it has ended. Number 0 only asks.

    Args:
        started: its start time in clock ticks, which tells it from a later process with the same ID.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not started or process_start_ticks(pid) != started:
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _started_of(pid: int) -> int:
    return process_start_ticks(pid) or 0


class ProcessSignaller:
    """Sends signals to processes: on this machine directly, on other nodes through a Ray task.

    Args:
        here: host name of this machine, as its workers report it.
    """

    def __init__(self, here: str = "") -> None:
        self._here = here or socket.gethostname()
        # by node and process id: the process, and its start time or the reference of a task that returns it
        self._registered: dict[tuple[str, int], tuple[Placed, Any]] = {}

    def register(self, process: Placed) -> None:
        """Remember the start time of a process while it is known to run."""
        self._registered[process.node, process.pid] = process, self._call(process, _started_of, process.pid)

    def send(self, process: Placed, number: int) -> bool:
        """Send a signal; return False if the process has ended or was not registered."""
        _, started = self._registered.get((process.node, process.pid), (process, 0))
        sent = self._call(process, send_signal, process.pid, self._result(started, process), number)
        return bool(self._result(sent, process))

    def is_alive(self, process: Placed) -> bool:
        """Return whether the process runs."""
        return self.send(process, 0)

    def registered(self) -> tuple[Placed, ...]:
        """Return all registered processes."""
        return tuple(process for process, _ in self._registered.values())

    def _call(self, process: Placed, function: Callable[..., int], *arguments: int) -> Any:
        """Call a function on the node of a process; return its result, or the reference of a task."""
        if process.node == self._here:
            return function(*arguments)
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        listed: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        ids = [node["NodeID"] for node in listed if node["Alive"] and node["NodeManagerHostname"] == process.node]
        if not ids:
            return 0  # the node is lost, and the process with it
        spot = NodeAffinitySchedulingStrategy(ids[0], soft=False)
        return ray.remote(function).options(num_cpus=0, scheduling_strategy=spot).remote(*arguments)

    def _result(self, reference: Any, process: Placed) -> Any:
        import ray

        if isinstance(reference, int):
            return reference
        try:
            return ray.get(reference, timeout=_REMOTE_S)
        except ray.exceptions.GetTimeoutError as error:
            raise ResourceError(
                f"{process_text(process)} cannot be reached: no task ran there within {_REMOTE_S:g} s",
                where=process.node,
                remedy="free memory on the node, or check its health",
            ) from error
        except (ray.exceptions.NodeDiedError, ray.exceptions.WorkerCrashedError, ray.exceptions.TaskUnschedulableError):
            return 0  # the node was lost meanwhile, and the process with it


# --- The observed run -------------------------------------------------------------------------------------------------


_TICK_S = 0.1  # faults that are due by time are injected at most this late
_WORKER_EXIT_TIMEOUT_S = 20.0  # for workers to end after their driver
_DRIVER_EXIT_TIMEOUT_S = 60.0  # for a paused driver to find that it was replaced, and to end


@dataclass(frozen=True, kw_only=True)
class ObservedRun:
    """Result of one observed run."""

    events: tuple[Event, ...]
    injected: tuple[InjectedFault, ...] = ()
    missed: tuple[str, ...] = ()  # faults that were not injected before the run ended
    error: str = ""  # why the run failed; empty if it is done
    remaining: tuple[Placed, ...] = ()  # worker processes that did not end


class RunObserver:
    """Runs a job file to its end and injects faults.

    Args:
        job_file: a pickled job.
        event_timeout_s: time without an event after which the run counts as hanging.
    """

    def __init__(
        self,
        name: str,
        job_file: Path,
        *,
        environment: Mapping[str, str],
        event_timeout_s: float,
        schedule: Sequence[ScheduledFault] = (),
        outages: Mapping[Target, Outage],
        on_all_injected: Callable[[], object] = lambda: None,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._job_file, self._event_timeout_s = job_file, event_timeout_s
        self._on_all_injected, self._say = on_all_injected, say
        self._environment = dict(environment)
        for outage in outages.values():
            self._environment |= outage.environment
        self._signaller = ProcessSignaller()
        self._injector = _FaultInjector(name, self._signaller, outages)
        self._schedule, self._previous = list(schedule), PreviousFault(at_s=0.0)
        self._summary, self._run_ended = RunSummary(), RunEnded()
        self._waiting: tuple[ScheduledFault, float] | None = None
        self._paused: list[_ObservedDriver] = []
        self._events: list[Event] = []

    def run(self) -> ObservedRun:
        """Run the job to its end; no other process of the run is left than those in `remaining`."""
        with contextlib.closing(self._injector):
            error = self._drive()
        return ObservedRun(
            events=tuple(self._events),
            injected=tuple(self._injector.injected),
            missed=tuple(scheduled.fault.name for scheduled in self._schedule),
            error=error,
            remaining=self._remaining(),
        )

    def _drive(self) -> str:
        """Start drivers until one ends by itself; return why the run failed."""
        with contextlib.ExitStack() as drivers:
            while True:
                driver = drivers.enter_context(contextlib.closing(_ObservedDriver(self._job_file, self._environment)))
                end = self._observe(driver)
                if isinstance(end, HangError):
                    return str(end)
                replaced = driver.killed or driver.paused_s is not None
                if not replaced or self._run_ended.outcome == "done":
                    break
                self._say("another driver is started" if driver.paused_s else "the driver is started again")
            if self._run_ended.outcome == "done":
                return next(filter(None, map(_paused_driver_error, self._paused)), "")
            return self._run_ended.error or driver.log_tail() or f"the driver ended with code {end}"

    def _observe(self, driver: _ObservedDriver) -> int | HangError:
        """Follow a driver to its end, and inject faults when they are due. Return its exit code, 0 if it is paused."""
        received_s = time.monotonic()
        while True:
            received = driver.next(_TICK_S if self._waiting is None else _TICK_S / 10)
            if isinstance(received, int):
                return received
            if received is not None:
                received_s = time.monotonic()
                self._receive(received)
            elif time.monotonic() - received_s > self._event_timeout_s:
                return HangError(
                    f"the run had no event for {self._event_timeout_s:.0f} s",
                    remedy=f"the last event was {self._events[-1]}" if self._events else "see the log of the driver",
                    detail=driver.log_tail(),
                )
            if not driver.killed:
                self._inject(driver)
            if driver.paused_s is not None:
                return self._set_aside(driver)

    def _set_aside(self, driver: _ObservedDriver) -> int:
        """Read the events of a paused driver; it is resumed when another driver has completed a rendezvous."""
        while (received := driver.next(_TICK_S)) is not None:
            if isinstance(received, int):
                return received
            self._receive(received)
        self._summary.add(RunStarted())
        self._paused.append(driver)
        return 0

    def _receive(self, event: Event) -> None:
        self._events.append(event)
        self._summary.add(event)
        if isinstance(event, Placed):
            self._signaller.register(event)
        if isinstance(event, Formed):
            self._previous = self._previous if self._previous.at_s else PreviousFault(at_s=time.monotonic())
            for driver in self._paused:
                driver.resume()
        if isinstance(event, RunEnded):
            self._run_ended = event
        given = self._injector.on_event(event, self._summary)
        if given is not None:
            self._say(f"  and during the recovery {given.targets[-1]}")

    def _due_fault(self) -> ScheduledFault | None:
        """Return the fault to inject now: it was due, and still is after its delay."""
        now_s, run = time.monotonic(), self._summary
        scheduled = next_fault(
            self._schedule, run, self._previous, now_s, lambda scheduled: self._injector.possible(scheduled, run)
        )
        if scheduled is None:
            self._waiting = None
        elif self._waiting is None or self._waiting[0] is not scheduled:
            self._waiting = scheduled, now_s + scheduled.delay_s
        return scheduled if scheduled is not None and self._waiting is not None and now_s >= self._waiting[1] else None

    def _inject(self, driver: _ObservedDriver) -> None:
        scheduled, now_s, run = self._due_fault(), time.monotonic(), self._summary
        if scheduled is None:
            return
        self._schedule = remaining_faults(self._schedule, scheduled)
        given = self._injector.inject(scheduled, run, driver)
        if not scheduled.fault.at_start:
            self._previous = PreviousFault(at_s=now_s, step=run.step)
        if scheduled.fault.target == "driver":
            run.add(RunStarted())  # what was known of its processes is over, before the next driver says so
        self._say(f"step {given.step}: {given.fault}: {', '.join(given.targets)}")
        if not self._schedule:
            self._on_all_injected()

    def _remaining(self) -> tuple[Placed, ...]:
        """Return processes of the run that still run after they had time to end."""
        until_s = time.monotonic() + _WORKER_EXIT_TIMEOUT_S
        while True:
            found = tuple(process for process in self._signaller.registered() if self._signaller.is_alive(process))
            if not found or time.monotonic() > until_s:
                return found
            time.sleep(_TICK_S)


def _paused_driver_error(paused: _ObservedDriver) -> str:
    """Return what a paused driver did wrong after another had taken over its run; empty if it only ended."""
    paused.resume()
    who, since_s = f"the paused driver (pid {paused.pid})", (paused.paused_s or 0.0) + _TICK_S
    while not isinstance(received := paused.next(_DRIVER_EXIT_TIMEOUT_S), int):
        if received is None:
            return f"{who} did not end within {_DRIVER_EXIT_TIMEOUT_S:g} s after another had taken over its run"
        if isinstance(received, Placed | Formed) and received.time_s > since_s:
            return f"{who} continued the run that another had taken over: {received}"
    return "" if received else f"{who} ended as if the run were its own"


# --- Injection of faults ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """An injected fault."""

    fault: str
    time_s: float
    step: int  # newest completed step known
    targets: tuple[str, ...]  # what it hit, in words


class _FaultInjector:
    """Injects the faults of one run. All calls come from one thread; a timer ends outages."""

    def __init__(self, run: str, signaller: ProcessSignaller, outages: Mapping[Target, Outage]) -> None:
        self.injected: list[InjectedFault] = []
        self._run, self._signaller, self._outages = run, signaller, outages
        self._timer: threading.Timer | None = None
        self._second: ScheduledFault | None = None
        self._hit: set[int] = set()

    def possible(self, scheduled: ScheduledFault, run: RunSummary) -> bool:
        """Return whether the fault has a target; during an outage there is none."""
        fault = scheduled.fault
        if self._timer is not None and self._timer.is_alive():
            return False
        if fault.target == "driver" or fault.seconds:
            return True
        living = self._living(run, spares=fault.target == "spare")
        return len(living) >= (1 if fault.twice else fault.least_workers)

    def inject(self, scheduled: ScheduledFault, run: RunSummary, driver: _ObservedDriver) -> InjectedFault:
        """Inject a possible fault; return what it hit."""
        time_s, fault = time.time(), scheduled.fault
        if fault.target == "driver":
            driver.pause() if fault.signal_number == signal.SIGSTOP else driver.kill()
            targets: tuple[str, ...] = (f"driver (pid {driver.pid}) {signal.Signals(fault.signal_number).name}",)
        elif fault.seconds:
            targets = (self._cut_off(scheduled),)
        else:
            targets = self._signal(scheduled, self._living(run, spares=fault.target == "spare"))
            self._second = scheduled if fault.twice else None
        given = InjectedFault(fault=fault.name, time_s=time_s, step=run.step, targets=targets)
        self.injected.append(given)
        return given

    def on_event(self, event: Event, run: RunSummary) -> InjectedFault | None:
        """Inject the second kill of a fault with `twice`: when the failure, or the replacement, is reported."""
        scheduled = self._second
        if isinstance(event, Formed):
            self._second = None
        early = scheduled is not None and scheduled.draw < 0.5
        if scheduled is None or not isinstance(event, (Failed, Promoted, Placed) if early else (Promoted, Placed)):
            return None
        living = [process for process in self._living(run, spares=False) if process.pid not in self._hit]
        if not living:
            return None
        self._second = None
        targets = self._signal(scheduled, living)
        self.injected[-1] = replace(self.injected[-1], targets=(*self.injected[-1].targets, *targets))
        return self.injected[-1]

    def close(self) -> None:
        """End all outages."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        for outage in self._outages.values():
            outage.close()

    def _living(self, run: RunSummary, *, spares: bool) -> list[Placed]:
        return [process for process in processes_of(run, spares=spares) if self._signaller.is_alive(process)]

    def _signal(self, scheduled: ScheduledFault, living: list[Placed]) -> tuple[str, ...]:
        first = int(scheduled.draw * len(living))
        chosen = [*living[first:], *living[:first]][: scheduled.fault.victims]
        hit = [process for process in chosen if self._signaller.send(process, scheduled.fault.signal_number)]
        self._hit |= {process.pid for process in hit}
        name = signal.Signals(scheduled.fault.signal_number).name
        return tuple(f"{process_text(process)} {name}" for process in hit)

    def _cut_off(self, scheduled: ScheduledFault) -> str:
        fault = scheduled.fault
        outage = self._outages[fault.target]
        how = outage.begin(self._run, scheduled.draw)
        self._timer = threading.Timer(fault.seconds, outage.end)
        self._timer.start()
        return f"{fault.target} for {fault.seconds:g} s: {how}"
