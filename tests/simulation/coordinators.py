"""Fake coordinators: a chief steps, servers hold what it needs and workers compute for it; the others follow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.simulation.processes import Process, Team, apply
from tests.simulation.servers import SERVED, Shop
from tests.simulation.store import Violation
from trainwright.core.errors import PeerLost
from trainwright.core.topology import StateTag
from trainwright.driver import messages as m

if TYPE_CHECKING:
    from tests.simulation.calls import Labour

SILENT_S = 30.0  # after which one that does not run, and that the others do without, is ended
LOOK_S = 0.2  # between two looks of the chief at who is there


class Court:
    """What the chief of one generation knows."""

    def __init__(self, team: Team) -> None:
        self.team, self.size = team, 0
        self.chief: Process | None = None
        self.coming: list[Process] = []  # that wait to be seated
        self.seated: dict[int, Process] = {}  # the others that are there, by rank
        self.missing = False  # one is not that all need
        self.step, self.lineage, self.until = 0, 0, 0
        self.passing: frozenset[int] = frozenset()
        self.stop_requested = False


class Guild(Shop):
    """Carries out the calls of a run that a chief leads."""

    verbs = SERVED | {"snapshot"}

    def __init__(self, labour: Labour) -> None:
        super().__init__(labour)
        self._courts: dict[int, Court] = {}

    def tag(self, process: Process) -> StateTag:
        """The chief holds the state, nobody else anything."""
        if process.rank:
            return StateTag(step=None, pieces=frozenset())
        return StateTag(step=process.step if process.trained else None, sound=process.sound)

    def _court(self, process: Process) -> Court:
        team = process.team
        assert team is not None, "reserve comes before every other verb"
        if id(team) not in self._courts:
            self._courts[id(team)] = Court(team)
        return self._courts[id(team)]

    def _needed(self, process: Process) -> bool:
        return not self._settings.world.spares_rank(process.rank)

    def _begin(self, process: Process, call: m.CallWorker) -> None:
        court = self._court(process)
        court.team.arrived.append(process)
        if call.verb == "form":
            court.size = call.argument.size
        if court.team.broken and (call.verb == "form" or not process.rank):
            self._lose(process)
        elif call.verb == "form":
            self._form(court, process)
        elif process.rank:
            getattr(self, f"_{call.verb}_other")(court, process, call)
        elif call.verb == "restore":
            self._when_able(court, process, lambda: self._restore_chief(court, process, call))
        elif call.verb == "evaluate":
            self._when_able(court, process, lambda: self._judge(court, process, call))
        elif call.verb == "snapshot":
            self._when_able(court, process, lambda: self._copy(court, process, call))
        else:
            self._lead(court, process, call)

    # --- the group ----------------------------------------------------------------------------------------

    def _form(self, court: Court, process: Process) -> None:
        holder = court.seated.get(process.rank) if process.rank else court.chief
        if holder is not None and not holder.killed:
            raise Violation(f"rank {process.rank} is given to worker {process.worker} too")
        if process.rank:
            court.coming.append(process)
        else:
            court.chief = process
        self._place_worker(court)

    def _place_worker(self, court: Court) -> None:
        """The others are seated once the chief is there; that waits for all, the first time."""
        chief = court.chief
        if chief is None or chief.hung:
            return
        for process in court.coming:
            court.seated[process.rank] = process
            self._answer(process, self.tag(process), 0.1, 0.6)
        court.coming = []
        forming = chief.call is not None and chief.call.verb == "form" and chief in court.team.arrived
        if forming and len(court.seated) == court.size - 1:
            self._answer(chief, self.tag(chief), 0.1, 0.6)

    def _restore_other(self, court: Court, process: Process, call: m.CallWorker) -> None:
        process.step = call.argument.step
        self._answer(process, replace(self.tag(process), step=process.step), 0.0, 0.3)

    def _restore_chief(self, court: Court, process: Process, call: m.CallWorker) -> None:
        restore_plan: m.RestorePlan = call.argument
        if self._restore(process, restore_plan):
            court.step, court.lineage = restore_plan.step, process.lineage
            court.passing = frozenset(passed.step for passed in restore_plan.passing)
            self._answer(process, self.tag(process), 0.1, 0.8)

    # --- steps --------------------------------------------------------------------------------------------

    def _run_other(self, court: Court, process: Process, call: m.CallWorker) -> None:
        """It follows, to the end of the generation."""
        if court.team.broken or court.seated.get(process.rank) is not process:
            self._return(process)

    def _return(self, process: Process) -> None:
        """The chief is gone, to one that followed it."""
        process.member = False
        report = m.SegmentReport(step=process.step)
        self._answer(process, report, 0.0, 0.4)

    def _lead(self, court: Court, process: Process, call: m.CallWorker) -> None:
        behind = (process.step, process.lineage) != (court.step, court.lineage)
        if not call.argument.steps or call.argument.steps.start != court.step or behind:
            raise Violation(f"a segment of steps {call.argument} from step {court.step} on")
        court.until = call.argument.steps.stop
        self._later(court, process)

    def _later(self, court: Court, process: Process) -> None:
        after_s = self._labour.between(0.1, 0.5)
        self._when_able(court, process, lambda: self._step(court, process), after_s)

    def _step(self, court: Court, chief: Process) -> None:
        """One step, of which every worker there may have a share."""
        labour = self._labour
        if labour.crash_step == court.step + 1 and labour.crash_step not in court.passing:
            self._crash(court, chief)
            return
        court.lineage = apply(court.lineage, court.step)
        court.step += 1
        labour.traces.step(chief, court.step)
        labour.news.tell(chief, court.step)
        if court.step < court.until and not court.stop_requested:
            self._later(court, chief)
            return
        stopped, court.stop_requested = court.stop_requested, False
        chief.take(court.step, court.lineage)
        traced = labour.traces.report(chief, court.step, stopped=stopped)
        self._answer(chief, m.SegmentReport(step=court.step, traced=traced), 0.0, 0.4)

    def _crash(self, court: Court, chief: Process) -> None:
        """A batch ends a process that it always ends; where that is a worker, the step waits for another."""
        victim = court.seated.get(self._labour.crash_rank % court.size, chief)
        self._labour.die(victim)
        if victim is not chief:
            self._later(court, chief)

    def _judge(self, court: Court, process: Process, call: m.CallWorker) -> None:
        """The chief judges, for all."""
        if call.argument.feeding is not None or process.step != call.argument.step:
            raise Violation(f"a chief at step {process.step} is to judge {call.argument}")
        size = court.size - self._settings.world.servers
        self._answer(process, self._labour.sums((size + 1) / 2, float(size), 1, process.step), 0.1, 1.0)

    def _evaluate_other(self, court: Court, process: Process, call: m.CallWorker) -> None:
        raise Violation(f"rank {process.rank} is to {call.verb}, which is the chief's")

    _snapshot_other = _evaluate_other

    def stop(self, process: Process) -> None:
        """A wish reaches the chief."""
        if process.rank:
            raise Violation(f"rank {process.rank} is told of a wish, which is for the chief")
        self._court(process).stop_requested = True

    def _copy(self, court: Court, process: Process, call: m.CallWorker) -> None:
        court.team.arrived.remove(process)
        self._labour.alone(process, call)

    def _when_able(self, court: Court, chief: Process, work: Callable[[], None], after_s: float = 0.0) -> None:
        """Work that needs all servers, and but for a copy a worker; so long the chief waits for one, or one frozen."""
        by_s = self._labour.clock.now_s + self._settings.deadlines.call_deadline_s
        self._labour.clock.after(after_s, self._try, court, chief, chief.ticket, by_s, work)

    def _try(self, court: Court, chief: Process, ticket: int, by_s: float, work: Callable[[], None]) -> None:
        labour = self._labour
        if chief.ticket != ticket or chief.hung or chief.deaf or not chief.alive:
            return
        workers = [process for process in court.seated.values() if not self._needed(process)]
        frozen = any(process.hung for process in court.seated.values())
        if court.missing:
            self._lose(chief)
            if not chief.deaf:
                self.part(chief)
        elif not frozen and (workers or not self._settings.world.tolerates or chief.call.verb == "snapshot"):  # type: ignore[union-attr]
            work()
        elif labour.clock.now_s >= by_s:
            chief.driver.facts.cuts.add(court.team.number)
            court.team.arrived.remove(chief)
            labour.fail(chief, "peer", PeerLost("no worker computed a share in time"), 0.05)
            self.part(chief)
        else:
            labour.clock.after(LOOK_S, self._try, court, chief, ticket, by_s, work)

    # --- breaking -----------------------------------------------------------------------------------------

    def part(self, process: Process) -> None:
        """One goes: the chief for all, another for the chief, which looks before each step who is there."""
        if process.team is None or process.team.broken:
            return
        court = self._court(process)
        if process in court.team.arrived:
            court.team.arrived.remove(process)
        if process in court.coming:
            court.coming.remove(process)
        if process is court.chief:
            self.break_all(court.team)
        elif court.seated.get(process.rank) is process:
            del court.seated[process.rank]
            court.missing = court.missing or self._needed(process)

    def break_all(self, team: Team) -> None:
        """The chief is gone: who followed it returns, who waits for it loses it."""
        team.broken = True
        for process in [*team.arrived]:
            if not process.hung and process.call is not None:
                (self._return if process.call.verb == "run" and process.rank else self._lose)(process)

    def cut(self, process: Process) -> None:
        """One loses the others: the chief those that it needs."""
        court = self._court(process)
        if process is court.chief:
            court.missing = True
            return
        called = process in court.team.arrived
        process.adrift = court.seated.get(process.rank) is process
        self.part(process)
        if called and not process.hung:
            (self._return if process.call.verb == "run" else self._lose)(process)  # type: ignore[union-attr]

    def interrupt(self, process: Process) -> None:
        """What it waits for is over."""
        called = process.team is not None and process in process.team.arrived
        if process.rank and not process.deaf:
            self.cut(process)
        elif called or process.deaf:
            process.deaf = False
            process.ticket += 1
            self._lose(process)
            self.part(process)
