"""What fake processes do when they are called: alone, or together as a group that advances or breaks as one."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from tests.simulation.clock import Clock
from tests.simulation.coordinators import Guild
from tests.simulation.memory import Memory
from tests.simulation.plans import stage_piece, whole_of
from tests.simulation.processes import TRIED, Process, Team, apply
from tests.simulation.scenario import Scenario, least_of, score
from tests.simulation.servers import Shop
from tests.simulation.state_recovery import restore
from tests.simulation.step_reports import News
from tests.simulation.store import Store, Violation
from tests.simulation.traces import Traces
from tests.simulation.uploads import Uploads
from trainwright.core.data import MetricSums
from trainwright.core.errors import DamagedCheckpoint, DataError, PeerLost, StorageError, UserCodeError
from trainwright.core.topology import Address, StateTag
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import evaluation_due

COLLECTIVE = frozenset({"form", "restore", "probe", "run"})


class Labour:
    """Carries out calls. `deliver(driver, event)` brings answers to the driver."""

    def __init__(self, scenario: Scenario, rng: Random, clock: Clock, store: Store, right: list[int]) -> None:
        self.scenario, self.rng, self.rand = scenario, rng, rng.random
        self.clock, self.store, self.right = clock, store, right
        self.deliver: Callable[[Any, m.DriverEvent], None] = lambda driver, event: None
        size = scenario.settings.world.workers
        servers = scenario.settings.world.servers
        pieces = {"replicated": 1, "sharded": size, "hybrid": size // 2, "planned": 1, "served": servers, "led": 1}
        self._pieces = pieces[scenario.layout]
        self.whole = frozenset(self._piece(rank) for rank in range(size))
        self.outage_until_s = 0.0
        self.memory, self.uploads, self.news = Memory(self), Uploads(self), News(self)
        self.traces = Traces(self)
        self.shop = {"served": Shop, "led": Guild}.get(scenario.layout, lambda labour: None)(self)
        self.crash_step = 0
        self.crash_rank = 0

    def _piece(self, rank: int) -> str:
        return "state" if self._pieces == 1 else f"piece-{rank % self._pieces}"

    def tag(self, process: Process) -> StateTag:
        """What a process says it holds."""
        if self.shop is not None:
            return self.shop.tag(process)
        if process.plan is None:
            return process.tag(self.scenario.layout, len(self.whole))
        stages = process.plan.mesh.pipeline
        return process.tag(f"{process.plan.strategy}-{stages}", len(whole_of(stages)))

    def is_whole(self, names: list[str]) -> bool:
        """Whether files together hold a state, each once."""
        count = int(names[0].rpartition("-")[2]) if names and names[0].startswith("stage-") else 1
        whole = self.whole if self.scenario.layout != "planned" else whole_of(count)
        return set(names) == whole and len(names) == len(whole)

    def between(self, low: float, high: float) -> float:
        """A random duration."""
        return low + (high - low) * self.rand()

    # --- calls --------------------------------------------------------------------------------------------

    def begin(self, process: Process, call: m.CallWorker) -> None:
        """A call reaches a living process."""
        if call.verb == "upload":
            self.uploads.begin(process, call)
        elif call.verb == "keep":
            self.memory.keep(process, call)
        elif call.verb == "trace":
            self.traces.begin(process, call)
        elif call.verb == "stop":
            if self.shop is not None:
                self.shop.stop(process)
            elif process.team is not None:
                process.team.stop_requested = True
        elif call.verb == "interrupt":
            self.clock.after(self.between(0.0, 0.5), self._interrupt, process, call)
        else:
            if process.call is not None:
                raise Violation(f"worker {process.worker} is called for {call.verb} during {process.call.verb}")
            process.call = call
            process.ticket += 1
            if process.hung:
                return
            if process.raise_next:
                self.throw(process)
            elif self.shop is not None and call.verb in self.shop.verbs:
                self.shop.begin(process, call)
            elif call.verb in COLLECTIVE:
                self._join(process, call)
            else:
                self.alone(process, call)

    def alone(self, process: Process, call: m.CallWorker) -> None:
        """What a process does by itself."""
        match call.verb:
            case "reserve":
                if process.member:
                    raise Violation(f"worker {process.worker} is to join a group, but has not left the one before")
                if process.team is not None and self.scenario.settings.world.reform == "new_process":
                    raise Violation(f"worker {process.worker} is to join a second group, which needs a new process")
                process.member = True
                self.traces.drop(process)
                if call.argument.plan is not None:
                    process.turn_to(call.argument.plan)
                process.team = process.driver.team(call.generation.number)
                process.team.members.append(process)
                self.answer(process, Address(host="host", port=process.worker + 1), 0.01, 0.1)
            case "leave":
                process.member = False
                self.part(process)
                just_in_time = None if call.argument is None else self.memory.copy_just_in_time(process, call.argument)
                self.answer(process, just_in_time, 0.01, 0.3)
            case "evaluate":
                self._must_stand(process, call)
                size = process.team.size  # type: ignore[union-attr]
                totals = self.sums(process.rank + 1.0, 1.0, size, process.step).totals
                sums = MetricSums(totals=totals, states={"order": (str(process.rank).encode(),)})
                if (found := call.argument.evaluated) is not None:
                    if process.rank or found.states["order"] != tuple(str(rank).encode() for rank in range(size)):
                        raise Violation(f"rank {process.rank} of {size} is to compute a metric of {found.states}")
                    sums = MetricSums(totals=found.totals)
                self.answer(process, sums, 0.1, 1.0)
            case "snapshot":
                self._must_stand(process, call)
                process.copies.update(
                    dict.fromkeys(call.argument.verbs, (process.piece, process.step, process.lineage))
                )
                self.answer(process, m.SnapshotTaken(step=process.step, size_bytes=8, blocked_s=0.005), 0.01, 0.2)

    def sums(self, rank: float, size: float, parts: int, step: int) -> MetricSums:
        """The sums of one of the `parts` that judge a step: with those of all ranks, each rank counts once."""
        value = score(self.scenario.seed, step)
        return MetricSums(totals={"rank": (rank, 1.0), "size": (size, 1.0 / parts), "score": (value, 1.0)})

    def _must_stand(self, process: Process, call: m.CallWorker) -> None:
        step = call.argument.step
        if process.step != step or not process.sound:
            raise Violation(f"{call.verb} at step {step} of a worker at step {process.step}")

    def answer(self, process: Process, value: Any, low_s: float, high_s: float) -> None:
        """Return from the call after a while."""
        call = process.call
        assert call is not None
        event = m.CallReturned(worker=process.worker, generation=call.generation, verb=call.verb, value=value)
        self._respond(process, event, self.between(low_s, high_s))

    def fail(self, process: Process, kind: m.CallFailureKind, error: Exception, delay_s: float) -> None:
        """Raise from the call after a while."""
        call = process.call
        assert call is not None
        process.member = False
        failure = m.CallFailure(kind=kind, error=error)
        event = m.CallRaised(worker=process.worker, generation=call.generation, verb=call.verb, failure=failure)
        self._respond(process, event, delay_s)

    def _respond(self, process: Process, event: m.DriverEvent, delay_s: float) -> None:
        process.due_s = self.clock.now_s + delay_s
        self.clock.after(delay_s, self._arrive, process, process.ticket, event)

    def _arrive(self, process: Process, ticket: int, event: m.DriverEvent) -> None:
        if process.ticket == ticket and not process.hung:
            self.news.before(process.driver, event)
            call, process.call = process.call, None
            if call.verb == "leave" and isinstance(event, m.CallReturned):
                self.memory.told_just_in_time(process, call, event.value)
            self.deliver(process.driver, event)

    def throw(self, process: Process) -> None:
        """Raise what a fault wants from the call under way; the group breaks if the process leaves it."""
        if self.shop is not None:
            self.shop.throw(process)
            return
        kind, error = self.struck(process)
        team = process.team
        if team is not None and process in team.arrived:
            team.arrived.remove(process)
            team.ticket += 1
            if process.call is not None and process.call.verb == "run":
                process.take(team.step, team.lineage)
                if team.argument.steps:
                    self.traces.fail(process, team.step + 1)
        self.fail(process, kind, error, self.between(0.01, 0.5))  # type: ignore[arg-type]
        if self.rand() < 0.6 or kind in ("user", "data"):
            self.part(process)

    def struck(self, process: Process) -> tuple[str, Exception]:
        """What a fault wants raised: its kind and the error. The call under way is void."""
        kind, process.raise_next = process.raise_next, ""
        process.raised |= kind == "internal" or (process.call is not None and process.call.verb == "leave")
        error: Exception = {
            "user": UserCodeError(f"the model raised in call {process.ticket} of worker {process.worker}"),
            "data": DataError("a column is missing"),
            "storage": StorageError("the store did not answer"),
            "internal": RuntimeError("a bug"),
        }[kind]
        if kind == "storage" and process.call is not None and process.call.verb == "restore":
            self.memory.sealed.pop(process.driver.token, None)  # what could not be read need not be asked for again
        process.ticket += 1
        return kind, error

    # --- together -----------------------------------------------------------------------------------------

    def _join(self, process: Process, call: m.CallWorker) -> None:
        team = process.team
        assert team is not None, "reserve comes before every other verb"
        if call.generation.number != team.number:
            raise Violation(f"{call.verb} for generation {call.generation} reached a member of {team.number}")
        argument = call.argument.generation if call.verb == "form" else call.argument
        if not team.arrived:
            team.verb, team.argument = call.verb, argument
        elif (team.verb, team.argument) != (call.verb, argument):
            raise Violation(f"ranks run different segments: {call.verb} {argument}, {team.verb} {team.argument}")
        if call.verb == "form":
            team.size, process.rank = call.argument.size, call.argument.rank
            bounds = self.scenario.settings
            if process.rank in team.ranks or not 0 <= process.rank < team.size:
                raise Violation(f"rank {process.rank} of {team.size} is given to worker {process.worker} too")
            if not least_of(bounds) <= team.size <= bounds.world.most:
                raise Violation(f"{team.size} workers, outside of {least_of(bounds)} to {bounds.world.most}")
            team.ranks.add(process.rank)
            self._hold(process, team)
        if team.broken:
            self.lose_peers(process)
            return
        team.arrived.append(process)
        if len(team.arrived) == team.size and not any(member.hung for member in team.members):
            self._start(team)

    def _hold(self, process: Process, team: Team) -> None:
        """Take the piece of its rank."""
        if process.plan is None:
            process.piece = self._piece(process.rank)
            return
        if process.plan.workers != team.size or process.plan != team.members[0].plan:
            raise Violation(f"{team.size} workers form under {process.plan} and {team.members[0].plan}")
        piece = stage_piece(process.plan.mesh.stage_of(process.rank), process.plan.mesh.pipeline)
        if piece != process.piece:
            process.drop()
        process.piece = piece

    def _start(self, team: Team) -> None:
        team.ticket += 1
        if team.verb == "run":
            self._check_level(team)
            act = self._step if team.argument.steps else self._rest
            self.clock.after(self.between(0.1, 0.5), act, team, team.ticket)
        else:
            self.clock.after(self.between(0.1, 0.8), self._together, team, team.ticket)

    def _together(self, team: Team, ticket: int) -> None:
        """All have formed the group, or are restored."""
        if team.ticket != ticket:
            return
        if team.verb == "probe" and self.crash_step == 1 and 1 not in team.passing:
            self._crash(team)
            return
        arrived, team.arrived = team.arrived, []
        if team.verb == "restore" and team.argument.source == "checkpoint" and self.clock.now_s < self.outage_until_s:
            for process in arrived:
                self.fail(process, "storage", StorageError("the store did not answer"), self.between(0.1, 0.5))
            return
        if team.verb == "restore" and team.argument.checkpoint and team.argument.checkpoint.path in self.store.damaged:
            for process in arrived:
                self.fail(process, "storage", DamagedCheckpoint("a shard is altered"), self.between(0.1, 0.5))
            return
        if team.verb == "restore" and team.argument.kept and self.memory.gone(team.argument.kept):
            for process in arrived:
                self.fail(process, "storage", StorageError("the copy is gone"), self.between(0.1, 0.5))
            return
        if team.verb == "restore":
            restore(self, team, arrived)
        if team.verb == "probe":
            for process in arrived:
                self._try(process)
                self.answer(process, self.rand(), 0.0, 0.2)
            return
        for process in arrived:
            self.answer(process, self.tag(process), 0.0, 0.2)

    def _try(self, process: Process) -> None:
        process.take(process.step + 1, TRIED)
        process.tried = True

    def _check_level(self, team: Team) -> None:
        if any((member.step, member.lineage) != (team.step, team.lineage) for member in team.arrived):
            raise Violation(f"ranks begin a segment from different states: {[p.step for p in team.arrived]}")
        last_word = self.scenario.announces and team.argument.checkpoints
        if team.argument.steps.start != team.step or not (team.argument.steps or last_word):
            raise Violation(f"a segment of steps {team.argument} from step {team.step} on")
        due = team.step > 0 and evaluation_due(self.scenario.settings, team.step)
        facts, metrics = team.arrived[0].driver.facts, team.argument.metrics
        if due and not team.argument.steps and facts.is_cut_short(self.clock.now_s):
            due = team.step in facts.evaluated  # an end that comes early waits for no evaluation
        if due != (metrics is not None) or (due and metrics != facts.evaluated.get(team.step)):
            raise Violation(f"a segment from step {team.step} on with the metrics {metrics}")

    def _step(self, team: Team, ticket: int) -> None:
        """One global step of the whole group."""
        if team.ticket != ticket:
            return
        if self.crash_step == team.step + 1 and self.crash_step not in team.passing:
            self._crash(team)
            return
        team.lineage = apply(team.lineage, team.step)
        team.step += 1
        for process in team.arrived:
            self.traces.step(process, team.step)
        self.news.tell(team.arrived[0], team.step)
        if team.step < team.argument.steps.stop and not team.stop_requested:
            self.clock.after(self.between(0.1, 0.5), self._step, team, ticket)
            return
        self._rest(team, ticket)

    def _rest(self, team: Team, ticket: int) -> None:
        """The steps are over, where there were any."""
        if team.ticket != ticket:
            return
        arrived, team.arrived = team.arrived, []
        stopped, team.stop_requested = team.stop_requested and bool(team.argument.steps), False
        for process in arrived:
            process.take(team.step, team.lineage)
            traced = self.traces.report(process, team.step, stopped=stopped)
            report = m.SegmentReport(step=team.step, announces=self.scenario.announces, traced=traced)
            self.answer(process, report, 0.0, 0.4)

    def _crash(self, team: Team) -> None:
        """A batch ends the rank that it always ends."""
        team.early = True
        self.die(next(process for process in team.arrived if process.rank == self.crash_rank % team.size))

    # --- breaking -----------------------------------------------------------------------------------------

    def part(self, process: Process) -> None:
        """A member goes: its group breaks for all who are in it."""
        if self.shop is not None:
            self.shop.part(process)
            return
        if process.team is not None and not process.team.broken:
            if process in process.team.arrived:
                process.team.arrived.remove(process)
            self.break_team(process.team)

    def break_team(self, team: Team) -> None:
        """All who wait in a collective lose their peers, at k or k + 1, some in the middle of a change."""
        team.broken = True
        team.ticket += 1
        arrived, team.arrived = team.arrived, []
        torn = self.rand() < 0.4 and not team.early
        for process in arrived:
            if team.verb == "run":
                self._leave_step(team, process, torn)
            elif team.verb == "restore":
                self._leave_restore(team, process, torn)
            elif team.verb == "probe":
                self._try(process)
            if not process.hung:
                self.lose_peers(process)

    def _leave_step(self, team: Team, process: Process, torn: bool) -> None:
        process.take(team.step, team.lineage)
        if team.argument.steps:
            self.traces.fail(process, team.step + 1)
        torn = torn and bool(team.argument.steps)  # else it only called callbacks
        if torn and self.rand() < 0.5:
            process.take(team.step + 1, apply(team.lineage, team.step))
        if torn and self.rand() < 0.2:
            process.tear()

    def _leave_restore(self, team: Team, process: Process, torn: bool) -> None:
        restore_plan: m.RestorePlan = team.argument
        if not torn or self.rand() < 0.5:
            return
        if restore_plan.source == "checkpoint" and self.rand() < 0.5:
            process.take(restore_plan.step, self.right[restore_plan.step])
        elif restore_plan.source == "checkpoint" or any(move.target == process.rank for move in restore_plan.moves):
            process.tear()

    def _interrupt(self, process: Process, call: m.CallWorker) -> None:
        """Its connections are shut: it cannot wait for anybody any more, nor anybody for it."""
        team = process.team
        if call.argument and process.alive and not process.hung:
            stood = m.CallReturned(worker=process.worker, generation=call.generation, verb="interrupt", value="a stack")
            self.clock.after(self.between(0.0, 0.2), self.deliver, process.driver, stood)
        if not process.alive or process.hung or team is None or team.number != call.generation.number:
            return
        process.freed = team
        if self.shop is not None:
            self.shop.interrupt(process)
            return
        if process.deaf:
            process.deaf = False
            self.lose_peers(process)
        if not team.broken:
            self.break_team(team)

    def lose_peers(self, process: Process) -> None:
        if self.rand() < 0.04 and process.team is not None and not process.team.cut and process.freed != process.team:
            process.deaf = True  # not connected to the one that went: notices nothing
            return
        self.fail(process, "peer", PeerLost("connection closed by peer"), self.between(0.05, 2.0))

    def let_go(self, process: Process) -> None:
        """Another driver takes it over: what it does for the one before ends, and nobody hears of it."""
        self.part(process)
        process.ticket += 1
        process.call, process.upload, process.raise_next, process.deaf = None, None, "", False
        process.copies.clear()
        self.traces.renew(process)

    def die(self, process: Process, delay_s: float = 0.0) -> None:
        """The process ends. An answer already under way may still arrive, before the news of the death."""
        if not process.alive:
            return
        process.alive = False
        delay_s = delay_s or self.between(0.05, 0.8)
        answered = process.call is not None and process.due_s > self.clock.now_s
        waiting = process.team is not None and process in process.team.arrived
        if answered and not waiting and self.rand() < 0.5:
            delay_s += process.due_s - self.clock.now_s
        else:
            process.ticket += 1
        self.part(process)
        self.clock.after(delay_s, self._tell_death, process)

    def _tell_death(self, process: Process) -> None:
        process.told = True
        self.deliver(process.driver, m.WorkerDied(worker=process.worker, cause="killed"))
