"""Faults strike: at a virtual time, or just after a call."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from tests.simulation.coordinators import SILENT_S
from tests.simulation.processes import Process
from tests.simulation.scenario import Fault
from trainwright.core.errors import StorageError
from trainwright.driver import messages as m

if TYPE_CHECKING:
    from tests.simulation.world import Driver, World


class Strikes:
    """The faults of one schedule, waiting for their moment."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._by_call: dict[tuple[str, int], list[Fault]] = {}
        self._calls: dict[str, int] = {}
        self._starts: list[str] = []
        self._failing_commits = 0
        self._slow_commit = self._damage = False
        self._successors = 0
        self.log_lost = False

    def arm(self) -> None:
        """Put each fault where its moment is."""
        for fault in self._world.scenario.faults:
            if fault.verb:
                self._by_call.setdefault((fault.verb, fault.nth), []).append(fault)
            else:
                self._world.clock.after(fault.at_s, self.strike, fault, None)

    def after_call(self, process: Process, call: m.CallWorker) -> None:
        """A worker was called: faults that waited for it strike a little later."""
        number = self._calls[call.verb] = self._calls.get(call.verb, 0) + 1
        for fault in self._by_call.pop((call.verb, number), ()):
            self._world.clock.after(self._world.labour.between(0.0, 0.6), self.strike, fault, process)

    def strike(self, fault: Fault, target: Process | None) -> None:
        """Do it, if there is still somebody to do it to."""
        driver = self._world.driver
        living = [process for process in driver.living if process.up and not process.killed]
        if target is None and living:
            target = living[int(fault.target * len(living))]
        if driver.finish is not None or not driver.alive:
            return
        name = fault.kind.replace(" ", "_")
        if hasattr(self, f"_on_{name}"):
            getattr(self, f"_on_{name}")(fault)
        elif target is not None and target.alive and not target.killed and target.driver is driver:
            getattr(self, f"_at_{name}")(target, living)

    # --- workers ------------------------------------------------------------------------------------------

    def _at_kill(self, target: Process, living: list[Process]) -> None:
        self._world.labour.die(target)

    def _at_kill_two(self, target: Process, living: list[Process]) -> None:
        self._world.labour.die(target)
        self._world.labour.die(living[-1])

    def _at_kill_all(self, target: Process, living: list[Process]) -> None:
        for process in living:
            self._world.labour.die(process)

    def _at_preempt(self, target: Process, living: list[Process]) -> None:
        """Its process is told to go; in a quarter of the scenarios nobody knows when, and the driver ends it."""
        target.noticed = True
        endless = Random(self._world.scenario.seed + 2**41).random() < 0.25
        left_s = math.inf if endless else self._world.scenario.settings.deadlines.preemption_s
        notice = m.PreemptionNoticed(worker=target.worker, left_s=left_s)
        self._world.clock.after(self._world.labour.between(0.0, 0.3), self._world.deliver, target.driver, notice)
        if not endless:
            self._world.clock.after(left_s, self._world.labour.die, target)

    def _at_preempt_all(self, target: Process, living: list[Process]) -> None:
        for process in living:
            self._at_preempt(process, living)

    def _on_crash_loop(self, fault: Fault) -> None:
        self._world.labour.crash_step = 1 + int(fault.amount * self._world.scenario.settings.length.total_steps)
        self._world.labour.crash_rank = int(fault.target * self._world.scenario.settings.world.workers)

    def _at_hang(self, target: Process, living: list[Process]) -> None:
        target.hung = True
        settings = self._world.scenario.settings
        if settings.world.topology == "coordinator" and settings.world.spares_rank(target.rank):
            self._world.clock.after(SILENT_S, self._world.labour.die, target)
        team = target.team
        if team is not None and target in team.arrived:
            team.ticket += 1

    def _throw(self, target: Process, kind: str) -> None:
        target.raise_next = kind
        if target.call is not None and target.team is not None and target in target.team.arrived and not target.hung:
            self._world.labour.throw(target)

    def _at_internal(self, target: Process, living: list[Process]) -> None:
        self._throw(target, "internal")

    def _at_user(self, target: Process, living: list[Process]) -> None:
        self._throw(target, "user")

    def _at_data(self, target: Process, living: list[Process]) -> None:
        self._throw(target, "data")

    def _at_storage(self, target: Process, living: list[Process]) -> None:
        self._throw(target, "storage")

    def _at_cut(self, target: Process, living: list[Process]) -> None:
        team = target.team
        labour = self._world.labour
        if team is not None and not team.broken:
            team.cut = True
            target.driver.facts.cuts.add(team.number)
            labour.break_team(team) if labour.shop is None else labour.shop.cut(target)

    # --- starts -------------------------------------------------------------------------------------------

    def start(self, process: Process) -> None:
        """Start a process, as the next fault of starts wants it."""
        labour, clock = self._world.labour, self._world.clock
        kind = self._starts[0] if self._starts else ""
        if kind and kind != "start loop":
            self._starts.pop(0)
        if kind in ("start death", "start loop"):
            clock.after(labour.between(0.2, 3.0), labour.die, process)
        elif kind != "never starts":
            delay_s = labour.between(10.0, 50.0) if kind == "slow start" else labour.between(0.3, 2.0)
            clock.after(delay_s, self._world.started, process)

    def _on_slow_start(self, fault: Fault) -> None:
        self._starts.append(fault.kind)

    _on_start_death = _on_start_loop = _on_never_starts = _on_slow_start

    # --- storage ------------------------------------------------------------------------------------------

    def _on_upload_fails(self, fault: Fault) -> None:
        self._world.labour.uploads.faults.extend(["fails"] * (1 + int(fault.amount * 5)))

    def _on_upload_hangs(self, fault: Fault) -> None:
        self._world.labour.uploads.faults.append("hangs")

    def _on_upload_internal(self, fault: Fault) -> None:
        self._world.labour.uploads.faults.append("internal")

    def _on_trace_fails(self, fault: Fault) -> None:
        self._world.labour.traces.faults.extend(["fails"] * (1 + int(fault.amount * 5)))

    def _on_trace_hangs(self, fault: Fault) -> None:
        self._world.labour.traces.faults.append("hangs")

    def _on_trace_internal(self, fault: Fault) -> None:
        self._world.labour.traces.faults.append("internal")

    def _on_commit_fails(self, fault: Fault) -> None:
        self._failing_commits += 1 + int(fault.amount * 4)

    def _on_commit_slow(self, fault: Fault) -> None:
        self._slow_commit = True

    def _on_checkpoint_damaged(self, fault: Fault) -> None:
        """The next one that has a parent, and all workers die, so that it is needed."""
        self._damage = True

    def after_commit(self, driver: Driver) -> None:
        """The log names another checkpoint."""
        store = self._world.store
        if self._damage and len(store.sound) > 1 and store.head is not None:
            self._damage = False
            store.damaged.add(store.head.path)
            for process in [process for process in driver.living if process.up and not process.killed]:
                self._world.labour.die(process)

    def _on_memory_full(self, fault: Fault) -> None:
        self._world.labour.memory.full = True

    def _on_copies_lost(self, fault: Fault) -> None:
        self._world.labour.memory.lost = True

    def _on_outage(self, fault: Fault) -> None:
        long = fault.amount > 0.9
        self._world.labour.outage_until_s = self._world.clock.now_s + (10_000.0 if long else fault.amount * 30.0)

    def commit_fails(self) -> bool:
        """Whether the commit that arrives now fails."""
        if self._failing_commits:
            self._failing_commits -= 1
            return True
        return self._world.clock.now_s < self._world.labour.outage_until_s

    def commit_delays(self) -> tuple[float, float]:
        """How long a commit takes to arrive, and its answer to come: one that timed out may have succeeded."""
        between = self._world.labour.between
        slow, self._slow_commit = self._slow_commit, False
        if not slow:
            return between(0.05, 0.5), 0.02
        return (between(2.0, 20.0), 0.02) if self._world.rng.random() < 0.5 else (0.1, between(5.0, 40.0))

    # --- wishes and drivers -------------------------------------------------------------------------------

    def _on_stop(self, fault: Fault) -> None:
        self._world.deliver(self._world.driver, m.StopRequested())

    def _on_stop_now(self, fault: Fault) -> None:
        self._world.deliver(self._world.driver, m.StopRequested(now=True))

    def _on_stop_twice(self, fault: Fault) -> None:
        driver = self._world.driver
        self._world.deliver(driver, m.StopRequested())
        self._world.clock.after(
            fault.amount * 3.0, self._world.deliver, driver, m.StopRequested(now=fault.amount > 0.3)
        )

    def _on_log_lost(self, fault: Fault) -> None:
        self.log_lost = True
        if fault.amount < 0.5:
            self._world.deliver(self._world.driver, m.LeaseLost(error=StorageError("the log cannot be reached")))

    def _on_crash(self, fault: Fault) -> None:
        if self._succeed(lambda: self._world.crash(self._world.driver)):
            self._world.begin_later(fault.amount * 5.0)

    def _on_stall(self, fault: Fault) -> None:
        if fault.amount < 0.3:  # too short for anybody to notice
            self._world.stall(self._world.driver, fault.amount * 20.0)
        elif self._succeed(lambda: self._world.stall(self._world.driver, 16.0 + fault.target * 30.0)):
            self._world.begin_later(fault.amount * 5.0)

    def _succeed(self, end: Callable[[], None]) -> bool:
        if self._successors == 2:
            return False
        self._successors += 1
        end()
        return True
