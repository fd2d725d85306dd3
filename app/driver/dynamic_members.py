"""Members outside the collective group, whose loss the engine tolerates: parameter servers, asynchronous workers.

The death of such a process does not end a rendezvous epoch. Another process takes its rank and joins (reserve, form,
restore, then the current verb) while the others continue. A member that lost its peers, and one that the run grows by,
join in the same way. A member that is still in a segment when the others have ended it rejoins once it answers.
"""

from __future__ import annotations

import math
from dataclasses import replace

from trainwright.core.errors import HangError, ResourceError, WorkerLost
from trainwright.core.events import Joined, Waiting
from trainwright.core.topology import Address, Group, Peer
from trainwright.driver import failure_policy
from trainwright.driver import messages as m
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
    drop_workers,
    update_member,
)
from trainwright.driver.messages import ReserveRequest

_RETRY_S, _MAX_RETRY_S = 1.0, 60.0  # before a member that lost its peers joins again; the cause is known by then
NO_ADDRESS = Address(host="", port=0)
_JOINING = frozenset({"reserve", "form", "restore"})
_CALLED = _JOINING | {"run"}


def is_dynamic(state: DriverState, worker: int) -> bool:
    """Whether the others continue without this process now."""
    return (
        state.phase in STEADY_PHASES
        and worker in state.membership.rank_of
        and state.settings.world.spares_rank(state.membership.rank_of[worker])
    )


def follows_chief(state: DriverState, worker: int) -> bool:
    """Whether this process follows a chief until the rendezvous epoch ends."""
    return state.settings.world.topology == "coordinator" and is_dynamic(state, worker)


def active_workers(state: DriverState) -> list[int]:
    """Return the dynamic members that take part, in the order of ranks."""
    spares_rank, apart = state.settings.world.spares_rank, state.dynamic.apart
    members = [member.worker for rank, member in enumerate(state.membership.members) if spares_rank(rank)]
    return [worker for worker in members if worker not in apart]


def _anybody_works(state: DriverState) -> bool:
    """Whether a dynamic member takes part, still finishes its steps, or follows the chief."""
    late = [
        state.membership.rank_of[worker] for worker, pending in state.dynamic.apart.items() if pending.doing == "run"
    ]
    return bool(active_workers(state)) or any(state.settings.world.spares_rank(rank) for rank in late)


# --- Losses -----------------------------------------------------------------------------------------------------------


def on_members_lost(
    transition: Transition, blame: FailureCause, workers: frozenset[int], *, kill: bool = False
) -> None:
    """Replace dynamic members that ended, or that `kill` ends, unless there were too many failures."""
    if _count_and_go_on(transition, blame, workers):
        for worker in sorted(workers):
            _replace(transition, worker, kill=kill)
        _update_hang_timer(transition)
    elif not kill:
        drop_workers(transition, workers)


def replace_member(transition: Transition, worker: int) -> None:
    """End a dynamic member, which must go, and give its rank to another process."""
    _replace(transition, worker, kill=True)
    _update_hang_timer(transition)


def on_member_left(transition: Transition, worker: int, blame: FailureCause) -> None:
    """Have a member join again that left the group by an error that may not come again.

    A lost peer counts as a failure only once it is clear that no process ended.
    """
    if not blame.peer and not _count_and_go_on(transition, blame, frozenset({worker})):
        return
    was = transition.state.dynamic.apart.get(worker)
    tries = _failed_tries(was)
    wait_s = max(min(_MAX_RETRY_S, _RETRY_S * 2**tries), failure_policy.backoff_s(transition.state.recovery.failures))
    transition.no_longer_await({worker})
    _set_pending(transition, worker, PendingMember(
        doing="hold", until_s=transition.now_s + wait_s,
        since_s=was.since_s if was else transition.now_s, former=worker,
        tries=tries, blame=blame if blame.peer else None,
    ))  # fmt: skip
    _update_hang_timer(transition)


def _failed_tries(was: PendingMember | None) -> int:
    return was.tries + 1 if was and was.doing != "run" else 0


def _count_and_go_on(transition: Transition, blame: FailureCause, workers: frozenset[int]) -> bool:
    """Count a failure, and return whether the run continues; losses at about the same time count as one."""
    state = transition.state
    ranks = frozenset(state.membership.rank_of[worker] for worker in workers)
    transition.emit(blame.event)
    doing = {state.dynamic.apart[worker].doing for worker in workers if worker in state.dynamic.apart}
    in_vain = "start" in doing or (bool(doing & _JOINING) and not _anybody_works(state))
    failure_policy.set_cause(transition, blame)
    failure_policy.count_member_failure(transition, ranks, in_vain=in_vain)
    return not failure_policy.is_given_up(transition)


def _replace(transition: Transition, worker: int, *, kill: bool) -> None:
    """Give a rank to a standby or a new process, which is not awaited; later after each failed attempt to join."""
    rank, was = transition.state.membership.rank_of[worker], transition.state.dynamic.apart.get(worker)
    if kill:
        transition.want(m.KillWorker(worker=worker))
    drop_pending(transition, worker)
    drop_workers(transition, {worker})
    tries = _failed_tries(was)
    wait_s = failure_policy.backoff_s(tries)
    assign_rank(
        transition, rank, choose_standby(transition.state, transition.state.membership.members[rank].node), wait_s
    )
    membership = transition.state.membership
    new = membership.members[rank].worker
    doing: PendingStage = "hold"
    deadline_s = failure_policy.backoff_s(transition.state.recovery.failures)
    if new in membership.starting:
        doing, deadline_s = "start", wait_s + transition.settings.deadlines.place_deadline_s
    since_s = was.since_s if was else transition.now_s
    _set_pending(transition, new, PendingMember(
        doing=doing, until_s=transition.now_s + deadline_s, since_s=since_s, former=worker, tries=tries,
    ))  # fmt: skip


def _update_hang_timer(transition: Transition) -> None:
    """Run the hang timer only while a member computes steps, or an evaluation that a chief leads."""
    state, settings = transition.state, transition.settings
    led = settings.world.topology == "coordinator" and state.phase is Phase.EVALUATING
    if not settings.world.tolerates or not (led or state.phase is Phase.RUNNING):
        return
    working = _anybody_works(state)
    if working and "hang" not in state.timers:
        transition.arm("hang", state.hang_deadline_s)
    elif not working and "hang" in state.timers:
        transition.disarm("hang")
        transition.emit(
            Waiting(what="a worker to take its part again", deadline_s=transition.settings.deadlines.place_deadline_s)
        )


def arm_hang_timer(transition: Transition) -> None:
    """Give the members their time again, after a step or at the start of steps and evaluations."""
    transition.arm("hang", transition.state.hang_deadline_s)
    _update_hang_timer(transition)


# --- Joining ----------------------------------------------------------------------------------------------------------


def admit_joiners(transition: Transition) -> None:
    """Let joining workers that are up join while the others continue, if workers step independently."""
    state = transition.state
    if state.phase in STEADY_PHASES and state.settings.world.topology == "independent" and not state.shutdown.stopping:
        for worker in admissible_joiners(state):
            admit_joiner(transition, worker)
            _set_pending(
                transition, worker, PendingMember(doing="hold", until_s=transition.now_s, since_s=transition.now_s)
            )
            _reserve(transition, worker)


def on_member_started(transition: Transition, worker: int) -> None:
    """Let a process that takes a rank join; after several failures in a row, a little later."""
    recovery = transition.state.recovery
    since_s = recovery.failed_s[-1] if recovery.failed_s else transition.now_s
    until_s = max(transition.now_s, since_s + failure_policy.backoff_s(recovery.failures))
    _set_pending(transition, worker, replace(transition.state.dynamic.apart[worker], doing="hold", until_s=until_s))
    if until_s <= transition.now_s:
        _reserve(transition, worker)


def on_member_answered(transition: Transition, event: m.CallReturned) -> None:
    """Call a member that is not awaited for the next verb of its way into the group."""
    state, worker = transition.state, event.worker
    pending, rank = state.dynamic.apart[worker], state.membership.rank_of[worker]
    match event.verb:
        case "reserve":
            _form(transition, worker, rank, event.value)
        case "form":
            restore_plan = m.RestorePlan(step=state.position.step, source="join", passing=state.recovery.passing)
            _call(transition, worker, "restore", restore_plan)
        case "restore":
            update_member(transition, rank, told=True, fresh=False)
            transition.emit(Joined(
                generation=state.epoch.generation.number, worker=worker, rank=rank,
                node=state.membership.members[rank].node, former=pending.former,
                seconds=transition.now_s - pending.since_s,
            ))  # fmt: skip
            _activate(transition, worker)
        case "run":
            _activate(transition, worker)


def _reserve(transition: Transition, worker: int) -> None:
    """Have a member bind a port."""
    state = transition.state
    role = state.settings.world.role_of(state.membership.rank_of[worker])
    wanted = ReserveRequest(generation=state.epoch.generation, plan=state.membership.plan, role=role)
    _call(transition, worker, "reserve", wanted)


def _form(transition: Transition, worker: int, rank: int, address: Address) -> None:
    """Tell a member its peers. The others need not know of it; a peer that has not joined yet has no port."""
    state = transition.state
    peers = dict(enumerate(state.dynamic.peers))
    for other in (*range(len(peers), rank), rank):
        node, role = state.membership.members[other].node, state.settings.world.role_of(other)
        peers[other] = Peer(rank=other, address=NO_ADDRESS, role=role, node=node)
    peers[rank] = replace(peers[rank], address=address)
    transition.change(peers=tuple(peers.values()))
    _call(transition, worker, "form", group_for(transition.state, rank))


def form_group(transition: Transition, peers: tuple[Peer, ...]) -> None:
    """Tell every rank its peers, for a new rendezvous epoch."""
    transition.change(peers=peers)
    for rank, member in enumerate(transition.state.membership.members):
        transition.call([member.worker], "form", group_for(transition.state, rank))


def group_for(state: DriverState, rank: int) -> Group:
    """Return the group as one of its ranks gets it."""
    slot, serves = state.membership.members[rank].slot, state.settings.world.role_of(rank) == "server"
    return Group(
        generation=state.epoch.generation, rank=rank, peers=state.dynamic.peers, slot=slot,
        key=state.settings.world.key_of(state.epoch.generation),
        devices=("cpu",) if serves else state.settings.world.devices,
        accelerators=state.membership.accelerators.get(slot, ()),
        threads=state.settings.world.threads, deadline_s=state.settings.deadlines.call_deadline_s,
    )  # fmt: skip


def _call(transition: Transition, worker: int, verb: PendingStage, argument: object) -> None:
    until_s = transition.now_s + transition.settings.deadlines.call_deadline_s
    _set_pending(transition, worker, replace(transition.state.dynamic.apart[worker], doing=verb, until_s=until_s))
    assert verb != "start" and verb != "hold", "these are no verbs"
    transition.call([worker], verb, argument)


def _activate(transition: Transition, worker: int) -> None:
    """Let a member take part from now on, in steps under way too."""
    drop_pending(transition, worker)
    _arm_deadline(transition)
    state = transition.state
    if state.phase is Phase.RUNNING and is_segment_open(state):
        idle = [worker for worker in active_workers(state) if worker not in state.awaiting]
        transition.also_await(frozenset(idle))
        transition.call(idle, "run", m.RunRequest(steps=range(state.position.step, state.segment.until)))
    _update_hang_timer(transition)


def is_segment_open(state: DriverState) -> bool:
    """Whether a rank that decides about the end of the steps under way still runs."""
    return any(state.settings.world.ends_segment(state.membership.rank_of[worker]) for worker in state.awaiting)


# --- Deadlines --------------------------------------------------------------------------------------------------------


def detach_late_workers(transition: Transition) -> None:
    """Do not wait for members that still finish steps when the others have ended them."""
    late = sorted(transition.state.awaiting)
    if not late:
        return
    follows = transition.settings.world.topology == "coordinator"  # these run until the rendezvous epoch ends
    until_s = math.inf if follows else transition.now_s + transition.state.hang_deadline_s
    apart = {
        worker: PendingMember(doing="run", until_s=until_s, since_s=transition.now_s, former=worker) for worker in late
    }
    transition.await_workers(())
    transition.change(apart={**transition.state.dynamic.apart, **apart})
    _arm_deadline(transition)


def extend_deadlines(transition: Transition) -> None:
    """Give late members their full time again when steps start: without steps they could not answer."""
    until_s = transition.now_s + transition.state.hang_deadline_s
    apart = {
        worker: replace(pending, until_s=until_s) if pending.doing == "run" and pending.until_s < until_s else pending
        for worker, pending in transition.state.dynamic.apart.items()
    }
    transition.change(apart=apart)
    _arm_deadline(transition)


def on_deadline(transition: Transition) -> FailureCause | None:
    """Handle members whose deadline passed. Return the cause if no dynamic member reaches the ranks that all need."""
    due_s = transition.now_s + failure_policy.TIMER_TOLERANCE_S
    for worker in sorted(
        worker for worker, pending in transition.state.dynamic.apart.items() if pending.until_s <= due_s
    ):
        apart = transition.state.dynamic.apart.get(worker)
        if apart is None or transition.state.phase not in STEADY_PHASES:
            continue
        if apart.blame is not None and apart.tries and not _anybody_works(transition.state):
            return _isolated_cause(apart.blame)
        _on_overdue(transition, worker)
    if transition.state.phase in STEADY_PHASES:
        _arm_deadline(transition)
    return None


def _on_overdue(transition: Transition, worker: int) -> None:
    state, settings, alone = transition.state, transition.settings, frozenset({worker})
    apart = state.dynamic.apart[worker]
    match apart.doing:
        case "hold" if apart.blame is not None and settings.world.reform == "new_process":
            on_members_lost(transition, _isolated_cause(apart.blame), alone, kill=True)
        case "hold":
            if apart.blame is None or _count_and_go_on(transition, _isolated_cause(apart.blame), alone):
                _reserve(transition, worker)
        case "start" if not _is_any_alive(state):
            error = ResourceError(
                f"no worker is alive, and {describe_starting(state)} did not start within "
                f"{settings.deadlines.place_deadline_s:g} s",
                remedy="free resources or add nodes, or raise place_deadline_s",
            )
            stopping = state.shutdown.stopping
            transition.end_run("stopped" if stopping else "failed", None if stopping else error)
        case "start":
            _set_pending(
                transition, worker, replace(apart, until_s=transition.now_s + settings.deadlines.place_deadline_s)
            )
        case "run" if state.phase is not Phase.RUNNING and active_workers(state):
            _set_pending(transition, worker, replace(apart, until_s=transition.now_s + state.hang_deadline_s))
        case _:
            on_members_silent(transition, alone)


def _isolated_cause(blame: FailureCause) -> FailureCause:
    """Return the cause for a lost peer if no process ended."""
    error = WorkerLost(
        f"rank {blame.event.rank} lost the others, and none of them ended",
        where=f"node {blame.event.node}",
        remedy="check the network between the nodes",
        detail=str(blame.error),
    )
    return replace(blame, error=error, peer=False)


def _is_any_alive(state: DriverState) -> bool:
    """Whether a dynamic member is up."""
    return any(
        state.settings.world.spares_rank(rank) and w not in state.membership.starting
        for w, rank in state.membership.rank_of.items()
    )


def on_members_silent(transition: Transition, workers: frozenset[int]) -> None:
    """Replace members that do not answer."""
    membership = transition.state.membership
    rank = min(membership.rank_of[worker] for worker in workers)
    member = membership.members[rank]
    pending = transition.state.dynamic.apart.get(member.worker)
    error = HangError(
        f"rank {rank} hung: it did not {pending.doing if pending else 'evaluate'} in time, while the others went on",
        where=f"node {member.node}",
        remedy="if a step or an evaluation takes that long, raise hang_deadline_s",
    )
    event = failure_policy.failed_event(transition.state, member.worker, rank, error.what)
    on_members_lost(transition, FailureCause(error=error, event=event, kind="hung"), workers, kill=True)


def _set_pending(transition: Transition, worker: int, pending: PendingMember) -> None:
    """Note what a member does that the others do not wait for."""
    transition.change(apart={**transition.state.dynamic.apart, worker: pending})
    _arm_deadline(transition)


def drop_pending(transition: Transition, worker: int) -> None:
    """Note that a member ended or takes part, so that it is no longer pending."""
    transition.change(
        apart={other: pending for other, pending in transition.state.dynamic.apart.items() if other != worker}
    )


def _arm_deadline(transition: Transition) -> None:
    """Set the one timer of all pending members to the first deadline."""
    first_s = min((pending.until_s for pending in transition.state.dynamic.apart.values()), default=math.inf)
    if math.isfinite(first_s):
        transition.arm("apart", max(0.0, first_s - transition.now_s))
    else:
        transition.disarm("apart")


def reabsorb_members(transition: Transition) -> None:
    """Wait for pending members like for all others, because the rendezvous epoch ends."""
    apart = transition.state.dynamic.apart
    if not apart:
        return
    transition.change(apart={})
    transition.also_await(frozenset(worker for worker, pending in apart.items() if pending.doing in _CALLED))
    failure_policy.forget_lost_members(transition)
    arm_start_deadline(transition)
