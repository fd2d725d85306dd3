"""Members outside the collective group, whose loss the engine tolerates: parameter servers, asynchronous workers.

The death of such a process does not end a rendezvous epoch. Another process takes its rank and joins (reserve, form,
heal, then the current verb) while the others continue. A member that lost its peers and a member that the run grows by
join in the same way. A member that is still in a segment when the others have ended it rejoins once it answers.
"""

from __future__ import annotations

import math
from dataclasses import replace

from trainwright.core.errors import HangError, ResourceError, WorkerLost
from trainwright.core.events import Joined, Leaving, Waiting
from trainwright.core.topology import Address, Group, Peer
from trainwright.driver import checkpointing, failure_policy
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import drop_upload_workers, hang_deadline_s
from trainwright.driver.driver_state import (
    STEADY_PHASES,
    DriverState,
    FailureCause,
    PendingMember,
    PendingStage,
    Phase,
    Transition,
)
from trainwright.driver.membership import (
    admissible_joiners,
    admit_joiner,
    arm_start_deadline,
    assign_rank,
    choose_standby,
    describe_starting,
)
from trainwright.driver.messages import ReserveRequest
from trainwright.driver.persistent_collections import PersistentSet
from trainwright.driver.shutdown import end_run

_RETRY_S, _MAX_RETRY_S = 1.0, 60.0  # before one that lost its peers tries again: by then it is known whether one ended
_SAME_FAILURE_S = 10.0  # losses of several ranks that are one failure
NO_ADDRESS = Address(host="", port=0)
_JOINING = frozenset({"reserve", "form", "heal"})
_CALLED = _JOINING | {"run"}


def is_dynamic(state: DriverState, worker: int) -> bool:
    """Whether the others go on without this process now."""
    return (
        state.phase in STEADY_PHASES
        and worker in state.membership.rank_of
        and state.settings.world.spares_rank(state.membership.rank_of[worker])
    )


def follows_chief(state: DriverState, worker: int) -> bool:
    """Whether such a process follows a chief, to the end of the generation."""
    return state.settings.world.topology == "coordinator" and is_dynamic(state, worker)


def active_workers(state: DriverState) -> list[int]:
    """Processes of tolerated roles that take part, in the order of ranks."""
    members = [
        member.worker for rank, member in enumerate(state.membership.members) if state.settings.world.spares_rank(rank)
    ]
    return [worker for worker in members if worker not in state.dynamic.apart]


def _anybody_works(state: DriverState) -> bool:
    """Whether one takes part, or ends its part, or follows the chief."""
    late = [state.membership.rank_of[worker] for worker, doing in state.dynamic.apart.items() if doing.doing == "run"]
    return bool(active_workers(state)) or any(state.settings.world.spares_rank(rank) for rank in late)


# --- Losses -----------------------------------------------------------------------------------------------------------


def on_members_lost(turn: Transition, blame: FailureCause, workers: frozenset[int], *, kill: bool = False) -> None:
    """Replace these processes, which ended or must end, unless that was one failure too many."""
    if _count_and_go_on(turn, blame, workers):
        for worker in sorted(workers):
            _replace(turn, worker, kill=kill)
        update_hang_timer(turn)
    elif not kill:
        turn.change(rank_of=turn.state.membership.rank_of.without(workers))


def on_member_left(turn: Transition, worker: int, blame: FailureCause) -> None:
    """A process has left the group by an error that need not come again: it joins once more.

    A lost peer is no failure until it is clear that none has ended.
    """
    if not blame.peer and not _count_and_go_on(turn, blame, frozenset({worker})):
        return
    state = turn.state
    was = state.dynamic.apart.get(worker)
    tries = was.tries + 1 if was and was.doing != "run" else 0
    wait_s = max(min(_MAX_RETRY_S, _RETRY_S * 2**tries), failure_policy.backoff_s(turn.state.recovery.failures))
    turn.change(awaiting=state.awaiting - {worker})
    since_s = was.since_s if was else turn.now_s
    _set_pending(turn, worker, PendingMember(
        doing="hold", until_s=turn.now_s + wait_s, since_s=since_s, former=worker, tries=tries,
        blame=blame if blame.peer else None,
    ))  # fmt: skip
    update_hang_timer(turn)


def on_member_preempted(turn: Transition, event: m.PreemptionNoticed) -> None:
    """A process will be ended soon: it is let go of at once, and another takes its rank. No failure."""
    state = turn.state
    rank = state.membership.rank_of[event.worker]
    node = state.membership.members[rank].node
    turn.emit(Leaving(worker=event.worker, rank=rank, node=node, why="preemption notice", left_s=event.left_s))
    turn.want(m.ExcludeNode(worker=event.worker))
    _replace(turn, event.worker, kill=True)
    update_hang_timer(turn)


def replace_preempted(turn: Transition) -> None:
    """Those who are to go by now, and that the others do without, go."""
    for worker in sorted(turn.state.handover.leaving):
        if is_dynamic(turn.state, worker):
            _replace(turn, worker, kill=True)
            turn.change(leaving={other: by_s for other, by_s in turn.state.handover.leaving.items() if other != worker})
            update_hang_timer(turn)


def _count_and_go_on(turn: Transition, blame: FailureCause, workers: frozenset[int]) -> bool:
    """Whether the run continues after this failure; those of one node count as one."""
    state = turn.state
    ranks = frozenset(state.membership.rank_of[worker] for worker in workers)
    turn.emit(blame.event)
    doing = {state.dynamic.apart[worker].doing for worker in workers if worker in state.dynamic.apart}
    in_vain = "start" in doing or (bool(doing & _JOINING) and not _anybody_works(state))
    turn.change(blame=blame)
    alike = bool(state.recovery.losing) and turn.now_s - state.recovery.failed_s[-1] < _SAME_FAILURE_S
    if in_vain or not alike or ranks & state.recovery.losing:
        failure_policy.count_failure(turn)
    turn.change(losing=state.recovery.losing | ranks)
    return not failure_policy.is_given_up(turn)


def _replace(turn: Transition, worker: int, *, kill: bool) -> None:
    """Give a rank to a spare or a new process, which is not waited for; later each time that one does not come far."""
    state = turn.state
    rank, was = state.membership.rank_of[worker], state.dynamic.apart.get(worker)
    gone = frozenset({worker})
    if kill:
        turn.want(m.KillWorker(worker=worker))
    turn.change(
        rank_of=state.membership.rank_of.without(gone),
        apart={other: doing for other, doing in state.dynamic.apart.items() if other != worker},
        starting=state.membership.starting - gone,
        awaiting=state.awaiting - gone,
    )
    drop_upload_workers(turn, gone)
    checkpointing.drop_memory_copy_workers(turn, gone)
    tries = was.tries + 1 if was and was.doing != "run" else 0
    wait_s = failure_policy.backoff_s(tries)
    assign_rank(turn, rank, choose_standby(turn.state, state.membership.members[rank].node), wait_s)
    new = turn.state.membership.members[rank].worker
    starts = new in turn.state.membership.starting
    deadline_s = (
        wait_s + turn.settings.deadlines.place_deadline_s
        if starts
        else failure_policy.backoff_s(turn.state.recovery.failures)
    )
    doing: PendingStage = "start" if starts else "hold"
    since_s = was.since_s if was else turn.now_s
    _set_pending(
        turn,
        new,
        PendingMember(doing=doing, until_s=turn.now_s + deadline_s, since_s=since_s, former=worker, tries=tries),
    )


def update_hang_timer(turn: Transition) -> None:
    """After a change of who takes part: steps cannot be late while nobody is there to take them.

    Nor can an evaluation at a chief, which workers compute.
    """
    state, settings = turn.state, turn.settings
    led = settings.world.topology == "coordinator" and state.phase is Phase.EVALUATING
    if not settings.world.tolerates or not (led or state.phase is Phase.RUNNING):
        return
    working = _anybody_works(state)
    if working and "hang" not in state.timers:
        turn.arm("hang", hang_deadline_s(state))
    elif not working and "hang" in state.timers:
        turn.disarm("hang")
        turn.emit(Waiting(what="a worker to take its part again", deadline_s=turn.settings.deadlines.place_deadline_s))


# --- Joining ----------------------------------------------------------------------------------------------------------


def _admit_pending(turn: Transition, worker: int) -> None:
    """The world grows by a process that is up; nobody pauses for it."""
    admit_joiner(turn, worker)
    _set_pending(turn, worker, PendingMember(doing="hold", until_s=turn.now_s, since_s=turn.now_s))
    _reserve(turn, worker)


def admit_joiners(turn: Transition) -> None:
    """The world grows by those that are up, where workers join by themselves."""
    state = turn.state
    if state.phase in STEADY_PHASES and state.settings.world.topology == "independent" and not state.shutdown.stopping:
        for worker in admissible_joiners(state):
            _admit_pending(turn, worker)


def on_member_started(turn: Transition, worker: int) -> None:
    """A process that takes a rank is up: it joins, after failures in a row a little later."""
    state = turn.state
    wait_s = failure_policy.backoff_s(state.recovery.failures)
    since_s = state.recovery.failed_s[-1] if state.recovery.failed_s else turn.now_s
    until_s = max(turn.now_s, since_s + wait_s)
    _set_pending(turn, worker, replace(state.dynamic.apart[worker], doing="hold", until_s=until_s))
    if until_s <= turn.now_s:
        _reserve(turn, worker)


def on_member_answered(turn: Transition, event: m.CallReturned) -> None:
    """One that is not waited for has done what it was called for: on to the next."""
    state = turn.state
    apart, rank = state.dynamic.apart[event.worker], state.membership.rank_of[event.worker]
    match event.verb:
        case "reserve":
            _form(turn, event.worker, rank, event.value)
        case "form":
            heal = m.RestorePlan(step=state.position.step, source="join", passing=state.recovery.passing)
            _call(turn, event.worker, "heal", heal)
        case "heal":
            member = replace(state.membership.members[rank], told=True, fresh=False)
            turn.change(members=state.membership.members.put(rank, member))
            turn.emit(Joined(
                generation=state.epoch.generation.number, worker=event.worker, rank=rank, node=member.node,
                former=apart.former, seconds=turn.now_s - apart.since_s,
            ))  # fmt: skip
            _activate(turn, event.worker)
        case "run":
            _activate(turn, event.worker)


def _reserve(turn: Transition, worker: int) -> None:
    state = turn.state
    rank = state.membership.rank_of[worker]
    known = state.dynamic.peers[rank].address if rank < len(state.dynamic.peers) else NO_ADDRESS
    former = None if known == NO_ADDRESS else known
    role = state.settings.world.role_of(rank)
    wanted = ReserveRequest(generation=state.epoch.generation, plan=state.membership.plan, role=role, former=former)
    _call(turn, worker, "reserve", wanted)


def _form(turn: Transition, worker: int, rank: int, address: Address) -> None:
    """The group as it stands, with this process in it; the others need not know. One still to join has no port."""
    state = turn.state
    peers = dict(enumerate(state.dynamic.peers))
    for other in (*range(len(peers), rank), rank):
        node, role = state.membership.members[other].node, state.settings.world.role_of(other)
        peers[other] = Peer(rank=other, address=NO_ADDRESS, role=role, node=node)
    peers[rank] = replace(peers[rank], address=address)
    turn.change(peers=tuple(peers.values()))
    _call(turn, worker, "form", group_for(turn.state, rank))


def group_for(state: DriverState, rank: int) -> Group:
    """What one rank is told of the generation."""
    slot, serves = state.membership.members[rank].slot, state.settings.world.role_of(rank) == "server"
    return Group(
        generation=state.epoch.generation, rank=rank, peers=state.dynamic.peers, slot=slot,
        key=state.settings.world.key_of(state.epoch.generation),
        devices=("cpu",) if serves else state.settings.world.devices,
        accelerators=state.membership.accelerators.get(slot, ()),
        threads=state.settings.world.threads, deadline_s=state.settings.deadlines.call_deadline_s,
    )  # fmt: skip


def _call(turn: Transition, worker: int, verb: PendingStage, argument: object) -> None:
    until_s = turn.now_s + turn.settings.deadlines.call_deadline_s
    _set_pending(turn, worker, replace(turn.state.dynamic.apart[worker], doing=verb, until_s=until_s))
    assert verb != "start" and verb != "hold", "what nobody is called for"
    turn.call([worker], verb, argument)


def _activate(turn: Transition, worker: int) -> None:
    """From now on it is one of the others: steps under way are shared with it at once."""
    state = turn.state
    turn.change(apart={other: doing for other, doing in state.dynamic.apart.items() if other != worker})
    _arm_deadline(turn)
    _call_idle(turn)
    update_hang_timer(turn)


def _call_idle(turn: Transition) -> None:
    """While steps are taken: those who have come to take part are called for what is left of them."""
    state = turn.state
    if state.phase is not Phase.RUNNING or not is_segment_open(state):
        return
    idle = [worker for worker in active_workers(state) if worker not in state.awaiting]
    if idle:
        turn.change(awaiting=state.awaiting | frozenset(idle))
        turn.call(idle, "run", range(state.position.step, state.segment.until))


def is_segment_open(state: DriverState) -> bool:
    """Whether one that decides about the end of the steps under way is still at them."""
    return any(state.settings.world.ends_segment(state.membership.rank_of[worker]) for worker in state.awaiting)


# --- Deadlines --------------------------------------------------------------------------------------------------------


def detach_late_workers(turn: Transition) -> None:
    """The steps are over: who is still at them ends its part when it can."""
    state = turn.state
    late = sorted(state.awaiting)
    if not late:
        return
    follows = state.settings.world.topology == "coordinator"  # and does so to the end of the generation
    until_s = math.inf if follows else turn.now_s + hang_deadline_s(state)
    apart = {worker: PendingMember(doing="run", until_s=until_s, since_s=turn.now_s, former=worker) for worker in late}
    turn.change(awaiting=PersistentSet(), apart={**state.dynamic.apart, **apart})
    _arm_deadline(turn)


def extend_deadlines(turn: Transition) -> None:
    """Whoever could not answer before, since no steps were taken, has all its time again."""
    until_s = turn.now_s + hang_deadline_s(turn.state)
    apart = {
        worker: replace(doing, until_s=until_s) if doing.doing == "run" and doing.until_s < until_s else doing
        for worker, doing in turn.state.dynamic.apart.items()
    }
    turn.change(apart=apart)
    _arm_deadline(turn)


def on_deadline(turn: Transition) -> FailureCause | None:
    """The time of one or more is over. Gives the cause where they and all others are cut off from those who stay."""
    due = [
        worker
        for worker, apart in turn.state.dynamic.apart.items()
        if apart.until_s <= turn.now_s + failure_policy.TIMER_TOLERANCE_S
    ]
    for worker in sorted(due):
        apart = turn.state.dynamic.apart.get(worker)
        if apart is not None and apart.blame is not None and apart.tries and not _anybody_works(turn.state):
            return _isolated_cause(apart.blame)
        if apart is not None:
            _on_overdue(turn, worker)
    if turn.state.phase in STEADY_PHASES:
        _arm_deadline(turn)
    return None


def _on_overdue(turn: Transition, worker: int) -> None:
    state = turn.state
    apart, settings = state.dynamic.apart[worker], state.settings
    match apart.doing:
        case "hold" if apart.blame is not None and settings.world.reform == "new_process":
            on_members_lost(turn, _isolated_cause(apart.blame), frozenset({worker}), kill=True)
        case "hold":
            if apart.blame is None or _count_and_go_on(turn, _isolated_cause(apart.blame), frozenset({worker})):
                _reserve(turn, worker)
        case "start" if not _is_any_alive(state):
            missing = describe_starting(state)
            error = ResourceError(
                f"no worker is alive, and {missing} did not start within {settings.deadlines.place_deadline_s:g} s",
                remedy="free resources or add nodes, or raise place_deadline_s",
            )
            end_run(
                turn, "stopped" if state.shutdown.stopping else "failed", None if state.shutdown.stopping else error
            )
        case "start":
            _set_pending(turn, worker, replace(apart, until_s=turn.now_s + settings.deadlines.place_deadline_s))
        case "run" if state.phase is not Phase.RUNNING and active_workers(state):
            _set_pending(turn, worker, replace(apart, until_s=turn.now_s + hang_deadline_s(state)))
        case _:
            on_members_silent(turn, frozenset({worker}))


def _isolated_cause(blame: FailureCause) -> FailureCause:
    """A lost peer that nobody's end explains."""
    error = WorkerLost(
        f"rank {blame.event.rank} lost the others, and none of them ended",
        where=f"node {blame.event.node}",
        remedy="check the network between the nodes",
        detail=str(blame.error),
    )
    return replace(blame, error=error, peer=False)


def _is_any_alive(state: DriverState) -> bool:
    """Whether a process of a tolerated role is up."""
    return any(
        state.settings.world.spares_rank(rank) and w not in state.membership.starting
        for w, rank in state.membership.rank_of.items()
    )


def on_members_silent(turn: Transition, workers: frozenset[int]) -> None:
    """Replace members that do not answer."""
    state = turn.state
    rank = min(state.membership.rank_of[worker] for worker in workers)
    doing = (
        state.dynamic.apart[state.membership.members[rank].worker].doing
        if state.membership.members[rank].worker in state.dynamic.apart
        else "evaluate"
    )
    error = HangError(
        f"rank {rank} hung: it did not {doing} in time, while the others went on",
        where=f"node {state.membership.members[rank].node}",
        remedy="if a step or an evaluation takes that long, raise hang_deadline_s",
    )
    event = failure_policy.failed_event(turn.state, state.membership.members[rank].worker, rank, error.what)
    on_members_lost(turn, FailureCause(error=error, event=event, kind="hung"), workers, kill=True)


def _set_pending(turn: Transition, worker: int, apart: PendingMember) -> None:
    """Note what one does that the others do not wait for."""
    turn.change(apart={**turn.state.dynamic.apart, worker: apart})
    _arm_deadline(turn)


def _arm_deadline(turn: Transition) -> None:
    """One timer, for the first whose time will be over."""
    first_s = min((apart.until_s for apart in turn.state.dynamic.apart.values()), default=math.inf)
    if math.isfinite(first_s):
        turn.arm("apart", max(0.0, first_s - turn.now_s))
    else:
        turn.disarm("apart")


def reabsorb_members(turn: Transition) -> None:
    """The generation ends: who is called is waited for again, and those who start as all do."""
    state = turn.state
    if not state.dynamic.apart:
        return
    busy = frozenset(worker for worker, apart in state.dynamic.apart.items() if apart.doing in _CALLED)
    turn.change(apart={}, awaiting=state.awaiting | busy, losing=frozenset())
    arm_start_deadline(turn)
