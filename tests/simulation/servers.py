"""Fake servers and workers that step alone: units are leased, pushed and applied once, whoever comes or goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation.processes import Process, Team, apply
from tests.simulation.store import Violation
from trainwright.core.errors import StorageError
from trainwright.core.topology import StalenessCounts, StateTag
from trainwright.driver import messages as m

if TYPE_CHECKING:
    from tests.simulation.calls import Labour

SERVED = frozenset({"form", "restore", "run", "evaluate", "leave"})
BOUND = 2  # steps that a worker may be ahead of the first incomplete one


class Trade:
    """What the servers of one generation know."""

    def __init__(self, team: Team, shares: int) -> None:
        self.team, self.shares = team, shares
        self.servers: dict[int, Process] = {}  # that have formed, by rank
        self.serving: list[Process] = []
        self.joining: list[Process] = []  # workers that wait for servers to form
        self.idle: list[Process] = []  # workers that wait for a unit
        self.free: dict[int, list[int]] = {}  # shares that nobody was given, by step
        self.held: dict[tuple[int, int], list[Process]] = {}
        self.step, self.lineage, self.until, self.begun, self.first = 0, 0, 0, 0, 0
        self.open = self.stop_requested = False

    @property
    def heard(self) -> bool:
        """Whether a wish counts, which one step at least comes before."""
        return self.stop_requested and self.step > self.first

    def unit(self, worker: Process) -> tuple[int, int] | None:
        """The oldest that nobody has, else one that others have."""
        last = min(self.until, self.step + BOUND + 1)
        steps = range(self.step, min(last, self.begun) if self.heard else last)
        for step in steps:
            free = self.free.setdefault(step, list(range(self.shares)))
            self.begun = max(self.begun, step + 1)
            if free:
                return step, free.pop(0)
        return next((unit for unit, holders in self.held.items() if worker not in holders), None)


class Shop:
    """Carries out the calls of a run whose workers step alone. `verbs`: those that are its own."""

    verbs = SERVED

    def __init__(self, labour: Labour) -> None:
        self._labour, self._settings = labour, labour.scenario.settings
        self._trades: dict[int, Trade] = {}

    def _trade(self, process: Process) -> Trade:
        team = process.team
        assert team is not None, "reserve comes before every other verb"
        if id(team) not in self._trades:
            self._trades[id(team)] = Trade(team, self._settings.world.workers - self._settings.world.servers)
        return self._trades[id(team)]

    def _serves(self, process: Process) -> bool:
        return process.rank < self._settings.world.servers

    def tag(self, process: Process) -> StateTag:
        """What one holds: a server its shard, a worker nothing."""
        pieces = frozenset({process.piece}) if self._serves(process) else frozenset()
        step = process.step if process.trained else None
        return StateTag(step=step, layout="shards", pieces=pieces, total=len(self._labour.whole), sound=process.sound)

    # --- calls --------------------------------------------------------------------------------------------

    def begin(self, process: Process, call: m.CallWorker) -> None:
        """A call reaches a process."""
        if call.verb == "leave":
            process.member = False
            self.part(process)
            self._labour.answer(process, None, 0.01, 0.3)
            return
        team = process.team
        assert team is not None, "reserve comes before every other verb"
        if call.generation.number != team.number:
            raise Violation(f"{call.verb} for generation {call.generation} reached a member of {team.number}")
        if call.verb == "form":
            process.rank = call.argument.rank
            roles = [peer.role for peer in call.argument.peers]
            if roles[process.rank] != self._settings.world.role_of(process.rank) or process.spare:
                raise Violation(f"rank {process.rank} is a {roles[process.rank]}")
        self._begin(process, call)

    def _begin(self, process: Process, call: m.CallWorker) -> None:
        if call.verb == "evaluate":
            self._evaluate(process, call)
            return
        trade = self._trade(process)
        trade.team.arrived.append(process)
        if trade.team.broken:
            self._lose(process)
        else:
            getattr(self, f"_{call.verb}_{'server' if self._serves(process) else 'worker'}")(trade, process, call)

    def _evaluate(self, process: Process, call: m.CallWorker) -> None:
        feeding = call.argument.feeding
        if self._serves(process) or feeding is None or len(feeding.data_ranks) != 1:
            raise Violation(f"rank {process.rank} is to judge {feeding}")
        place = feeding.data_ranks.start
        sums = self._labour.sums(place + 1.0, 1.0, feeding.total, call.argument.step)
        self._labour.answer(process, sums, 0.1, 1.0)

    def _answer(self, process: Process, value: Any, low_s: float = 0.0, high_s: float = 0.2) -> None:
        if process.team is not None and process in process.team.arrived:
            process.team.arrived.remove(process)
        self._labour.answer(process, value, low_s, high_s)

    def _form_server(self, trade: Trade, process: Process, call: m.CallWorker) -> None:
        if process.rank in trade.servers:
            raise Violation(f"server {process.rank} is given to worker {process.worker} too")
        if self._settings.world.servers > 1:
            process.piece = f"piece-{process.rank}"
        trade.servers[process.rank] = process
        self._answer(process, self.tag(process), 0.1, 0.6)
        if len(trade.servers) == self._settings.world.servers:
            joining, trade.joining = trade.joining, []
            for worker in joining:
                self._answer(worker, self.tag(worker), 0.1, 0.6)

    def _form_worker(self, trade: Trade, process: Process, call: m.CallWorker) -> None:
        process.step, process.trained, process.sound = 0, False, True
        if len(trade.servers) < self._settings.world.servers:
            trade.joining.append(process)
        else:
            self._answer(process, self.tag(process), 0.1, 0.6)

    def _restore_server(self, trade: Trade, process: Process, call: m.CallWorker) -> None:
        wanted: m.RestorePlan = call.argument
        if self._restore(process, wanted):
            trade.step, trade.lineage, trade.begun = wanted.step, process.lineage, wanted.step
            self._answer(process, self.tag(process), 0.1, 0.8)

    def _restore(self, process: Process, wanted: m.RestorePlan) -> bool:
        """Give one that holds a state the run's right one; False where that cannot be read."""
        labour = self._labour
        if wanted.moves or wanted.source == "join":
            raise Violation(f"rank {process.rank} is restored by {wanted}")
        gone = wanted.kept is not None and labour.memory.gone(wanted.kept)
        if gone or (wanted.source == "checkpoint" and labour.clock.now_s < labour.outage_until_s):
            process.team.arrived.remove(process)  # type: ignore[union-attr]
            labour.fail(process, "storage", StorageError("it cannot be read"), labour.between(0.1, 0.5))
            self.part(process)
            return False
        if wanted.kept is not None:
            process.take(*labour.memory.kept[wanted.kept.version, process.piece])
        elif wanted.source == "checkpoint":
            process.take(wanted.step, labour.right[wanted.step])
        elif process.step != wanted.step or not process.sound:
            raise Violation(f"a state of step {process.step} goes on from step {wanted.step} by {wanted.source}")
        process.take(wanted.step, process.lineage)
        if process.lineage != labour.right[wanted.step]:
            raise Violation(f"rank {process.rank}: steps lost or applied twice by {wanted.source} at {wanted.step}")
        return True

    def _restore_worker(self, trade: Trade, process: Process, call: m.CallWorker) -> None:
        process.step, process.trained = call.argument.step, True
        self._answer(process, self.tag(process), 0.1, 0.8)

    # --- steps --------------------------------------------------------------------------------------------

    def _run_server(self, trade: Trade, process: Process, call: m.CallWorker) -> None:
        if trade.serving and trade.until != call.argument.steps.stop:
            raise Violation(f"servers run different segments: {call.argument}, {trade.until}")
        behind = (process.step, process.lineage) != (trade.step, trade.lineage)
        if not call.argument.steps or call.argument.steps.start != trade.step or behind:
            raise Violation(f"a segment of steps {call.argument} from step {trade.step} on")
        trade.until = call.argument.steps.stop
        trade.serving.append(process)
        if len(trade.serving) == self._settings.world.servers:
            trade.open, trade.first = True, trade.step
            self._go_on(trade)  # a wish may have come by now, and workers before

    def _run_worker(self, trade: Trade, process: Process, call: m.CallWorker) -> None:
        self._lease(trade, process)

    def stop(self, process: Process) -> None:
        """A wish reaches the lead for all."""
        if process.rank == 0:
            trade = self._trade(process)
            trade.stop_requested = True
            self._go_on(trade)

    def _lease(self, trade: Trade, worker: Process) -> None:
        """Something to compute, or a wait for it; none in a segment that is over."""
        assert worker.call is not None, "it is at work"
        if worker.call.argument.steps.start < (trade.first if trade.open else trade.step):
            self._end(worker)
            return
        stuck = any(server.hung for server in trade.servers.values())
        unit = None if stuck or not trade.open else trade.unit(worker)
        if unit is None:
            trade.idle.append(worker)
            return
        trade.held.setdefault(unit, []).append(worker)
        slow = 4.0 if worker.worker % 7 == 3 else 1.0
        self._labour.clock.after(self._labour.between(0.1, 0.5) * slow, self._push, trade, worker, worker.ticket, unit)

    def _push(self, trade: Trade, worker: Process, ticket: int, unit: tuple[int, int]) -> None:
        if worker.ticket != ticket or worker.hung or not worker.alive or trade.team.broken:
            return
        if any(server.hung for server in trade.servers.values()):
            return  # it waits for the answer
        self._labour.traces.step(worker, unit[0] + 1)
        if unit in trade.held:  # the first push; later ones are dropped
            del trade.held[unit]
            self._go_on(trade)
        self._lease(trade, worker)

    def _go_on(self, trade: Trade) -> None:
        """Complete the steps that are whole; the last one ends the segment."""
        if not trade.open:
            return
        while trade.free.get(trade.step) == [] and not any(unit[0] == trade.step for unit in trade.held):
            del trade.free[trade.step]
            trade.lineage = apply(trade.lineage, trade.step)
            trade.step += 1
            self._labour.news.tell(trade.servers[0], trade.step)
        if trade.step >= trade.until or (trade.heard and trade.step >= trade.begun):
            self._close(trade)
            return
        idle, trade.idle = trade.idle, []
        for worker in idle:
            self._lease(trade, worker)

    def _close(self, trade: Trade) -> None:
        trade.stop_requested = trade.open = False
        serving, trade.serving = trade.serving, []
        for server in serving:
            server.take(trade.step, trade.lineage)
            stale = StalenessCounts(counts={0: trade.shares}) if server.rank == 0 else None
            step = trade.step if server.rank == 0 else 0
            report = m.SegmentReport(step=step, staleness=stale)
            self._answer(server, report, 0.0, 0.4)
        idle, trade.idle = trade.idle, []
        for worker in idle:
            self._end(worker)

    def _end(self, worker: Process) -> None:
        assert worker.call is not None, "it is at work"
        traced = self._labour.traces.report(worker, worker.call.argument.steps.stop)
        self._answer(worker, m.SegmentReport(step=0, traced=traced), 0.0, 0.4)

    # --- breaking -----------------------------------------------------------------------------------------

    def part(self, process: Process) -> None:
        """One goes: a server for all, a worker for itself, and its units are handed out again."""
        if process.team is None or process.team.broken:
            return
        trade = self._trade(process)
        if process in trade.team.arrived:
            trade.team.arrived.remove(process)
        if self._serves(process) and process.rank in trade.servers and trade.servers[process.rank] is process:
            self.break_all(trade.team)
            return
        for waiting in (trade.joining, trade.idle):
            if process in waiting:
                waiting.remove(process)
        for unit, holders in list(trade.held.items()):
            if process in holders:
                holders.remove(process)
                if not holders:
                    del trade.held[unit]
                    trade.free[unit[0]].append(unit[1])
        if trade.open:
            self._go_on(trade)

    def break_all(self, team: Team) -> None:
        """The servers are no longer all there: nobody can go on. One in the middle of a step is torn, or was not."""
        team.broken = True
        trade = self._trades[id(team)]
        for process in trade.serving:
            process.take(trade.step, trade.lineage)
            if self._labour.rand() < 0.6:
                process.tear()
        arrived, team.arrived = team.arrived, []
        for process in arrived:
            if not process.hung:
                self._lose(process)

    def _lose(self, process: Process) -> None:
        if process.team is not None and process in process.team.arrived:
            process.team.arrived.remove(process)
        self._labour.lose_peers(process)

    def cut(self, process: Process) -> None:
        """One loses the others."""
        called = process.team is not None and process in process.team.arrived
        self.part(process)
        if called and not process.hung:
            process.ticket += 1
            self._labour.lose_peers(process)

    def interrupt(self, process: Process) -> None:
        """What it waits for is over."""
        if process.deaf:
            process.deaf = False
            self._lose(process)
        else:
            self.cut(process)

    def throw(self, process: Process) -> None:
        """Raise what a fault wants from the call under way."""
        kind, error = self._labour.struck(process)
        self._labour.fail(process, kind, error, self._labour.between(0.01, 0.5))  # type: ignore[arg-type]
        self.part(process)
