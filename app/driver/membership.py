"""The processes of a run and their ranks: placement, warm standbys, driver takeover, shrinking and growing.

A slot is a bundle of resources for one process. A warm standby shares a slot and takes none of its resources; a joining
worker has a slot of its own and waits to join. Ranks are assigned in each rendezvous, slots stay.

If the survivors of a previous driver hold a complete state that is newer than any checkpoint, in another layout than
the run's plan, the run continues in their layout and changes to its plan from a checkpoint of that step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import asdict, replace
from heapq import heapify, heappop, heapreplace
from typing import Any

from trainwright.core.errors import ResourceError
from trainwright.core.events import Noted, Placed, Promoted, Replanned, Resized, Waiting
from trainwright.core.plan import Plan, assign_slots
from trainwright.driver import checkpointing, step_traces
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import drop_memory_copy_workers, drop_upload_workers
from trainwright.driver.driver_state import DriverState, GroupMember, Phase, StandbyWorker, Transition
from trainwright.driver.persistent_collections import PersistentList, PersistentMap, PersistentSet

_MOST_REPLANS = 8  # each plan needs a tenth less memory than the one before
_UNASSIGNED = -1  # number of a worker that is about to be placed
MAX_STANDBY_FAILURES = 3  # standbys in a row that ended by themselves


def replace_workers(transition: Transition, ranks: Iterable[int], *, kill: bool = False) -> None:
    """Give each rank a new process in its slot. `kill` ends those that hold the ranks now."""
    ranks, membership = [*ranks], transition.state.membership
    holders = [membership.members[rank].worker for rank in ranks]
    gone = [worker for worker in holders if worker in membership.rank_of]
    if kill:
        for worker in gone:
            transition.want(m.KillWorker(worker=worker))
    drop_workers(transition, frozenset(gone))
    for rank in ranks:
        assign_rank(transition, rank, choose_standby(transition.state, transition.state.membership.members[rank].node))
    if transition.state.membership.starting - membership.starting:
        if not membership.starting and not _shrinks_at_once(transition.state):
            what = describe_starting(transition.state)
            transition.emit(Waiting(what=f"{what} to start", deadline_s=transition.settings.deadlines.place_deadline_s))
        arm_start_deadline(transition)


def drop_workers(transition: Transition, workers: Set[int]) -> None:
    """Forget workers that ended, or that are being ended: nothing that they owe is waited for."""
    membership = transition.state.membership
    transition.change(
        rank_of=membership.rank_of.without(workers),
        starting=membership.starting - workers,
        spares=membership.spares.without(workers),
    )
    transition.no_longer_await(workers)
    drop_upload_workers(transition, frozenset(workers))
    drop_memory_copy_workers(transition, frozenset(workers))
    step_traces.drop_workers(transition, frozenset(workers), "its process ended before the trace was written")


def drop_all_workers(transition: Transition) -> None:
    """Forget all workers, because the run ends."""
    step_traces.drop_workers(transition, frozenset(transition.state.traces.tracing), "the run ended at once")
    transition.change(rank_of=PersistentMap(), starting=PersistentSet(), spares=PersistentMap())
    transition.await_workers(())


def arm_start_deadline(transition: Transition) -> None:
    """Set the timers for the processes that start."""
    if transition.state.membership.starting:
        transition.arm("place", transition.settings.deadlines.place_deadline_s)
        if _shrinks_at_once(transition.state):
            transition.disarm("shrink")
        elif transition.settings.world.fewest < len(transition.state.membership.members):
            transition.arm("shrink", transition.settings.deadlines.shrink_s)


def assign_rank(transition: Transition, rank: int, standby: int | None, wait_s: float = 0.0) -> None:
    """Give a rank to a standby, or to a new process, which is started after `wait_s`."""
    state = transition.state
    held = StandbyWorker() if standby is None else state.membership.spares[standby]
    worker = state.membership.next_worker if standby is None else standby
    slot = state.membership.members[rank].slot if held.slot is None else held.slot
    member = GroupMember(worker=worker, slot=slot, node=held.node, home=held.home, pid=held.pid)
    transition.change(
        members=state.membership.members.put(rank, member),
        rank_of=state.membership.rank_of.put(worker, rank),
        next_worker=state.membership.next_worker + (standby is None),
        starting=state.membership.starting if held.ready else state.membership.starting | {worker},
        spares=state.membership.spares.without({worker}),
    )
    if standby is None:
        transition.want(m.StartWorker(worker=worker, slot=slot, after_s=wait_s))
    else:
        transition.emit(Promoted(worker=worker, rank=rank, slot=slot, node=member.node))


def choose_standby(state: DriverState, node: str) -> int | None:
    """Return the standby that can take a rank of this node soonest; None if there is none.

    A joining worker that is up will do if there is no warm standby; one that is still to start may never come.
    """
    spares, stay, doomed = state.membership.spares, state.settings.world.spares_stay, _nodes_to_leave(state)
    lasting = {worker: spare for worker, spare in spares.items() if spare.node not in doomed}
    # With `stay`, a node that is not known yet is no match.
    beside = [w for w, s in lasting.items() if s.slot is None and (not stay or (node and s.node == node))]
    fitting = beside or [worker for worker, spare in lasting.items() if spare.slot is not None and spare.ready]
    return min(
        fitting,
        key=lambda worker: (not spares[worker].ready, spares[worker].node != node, worker),
        default=None,
    )


def _nodes_to_leave(state: DriverState) -> frozenset[str]:
    """Return the nodes of members with a notice, if there are other nodes: a notice concerns a whole node as a rule."""
    if not state.handover.leaving:
        return frozenset()
    members = state.membership.members
    nodes = {member.node for member in members} | {spare.node for spare in state.membership.spares.values()}
    doomed = {member.node for member in members if member.worker in state.handover.leaving}
    return frozenset(doomed if nodes - doomed - {""} else ())


def start_standbys(transition: Transition) -> None:
    """Start missing warm standbys and joining workers; none once several in a row ended by themselves."""
    state = transition.state
    if state.membership.spares_lost >= MAX_STANDBY_FAILURES or state.shutdown.stopping:
        return
    members, spares, most = state.membership.members, state.membership.spares, state.settings.world.most
    joining = {spare.slot for spare in spares.values() if spare.slot is not None}
    missing = state.settings.world.spares - (len(spares) - len(joining))
    if missing <= 0 and len(members) + len(joining) >= most:
        return  # the usual case, in which members hold all slots
    held = joining.union(member.slot for member in members)
    free = [slot for slot in range(most) if slot not in held]
    for _ in range(missing):
        number = transition.state.membership.next_worker
        _start_standby(transition, None, members[number % len(members)].slot)
    for slot in free:
        _start_standby(transition, slot, slot)


def _start_standby(transition: Transition, own: int | None, slot: int) -> None:
    worker = transition.state.membership.next_worker
    transition.change(
        next_worker=worker + 1, spares=transition.state.membership.spares.put(worker, StandbyWorker(slot=own))
    )
    transition.want(m.StartWorker(worker=worker, slot=slot, spare=True, beside=own is None))


def on_worker_started(transition: Transition, event: m.WorkerStarted) -> None:
    """Note that a placed process is up."""
    state = transition.state
    if event.worker in state.membership.spares:
        _on_standby_started(transition, event)
        return
    rank = state.membership.rank_of[event.worker]
    _note_accelerators(transition, state.membership.members[rank].slot, event)
    transition.change(starting=state.membership.starting - {event.worker})
    update_member(transition, rank, node=event.node, home=event.home, pid=event.pid)
    transition.emit(Placed(worker=event.worker, node=event.node, pid=event.pid))
    if not transition.state.membership.starting:
        transition.disarm("place", "shrink")


def _on_standby_started(transition: Transition, event: m.WorkerStarted) -> None:
    """Note that a standby is up. The ranks pause for a joining worker, so that it can join."""
    state = transition.state
    waiting = state.membership.spares[event.worker]
    spare = replace(waiting, node=event.node, home=event.home, pid=event.pid, ready=True)
    transition.change(spares=state.membership.spares.put(event.worker, spare), spares_lost=0)
    transition.emit(Placed(worker=event.worker, node=event.node, pid=event.pid, spare=True))
    if spare.slot is not None:
        _note_accelerators(transition, spare.slot, event)
    if state.phase is Phase.RUNNING and can_grow(transition.state):
        transition.request_pause()


def _note_accelerators(transition: Transition, slot: int, event: m.WorkerStarted) -> None:
    if event.accelerators:
        transition.change(accelerators=transition.state.membership.accelerators.put(slot, event.accelerators))


def update_member(transition: Transition, rank: int, **changes: Any) -> None:
    """Replace fields of the member that holds a rank."""
    members = transition.state.membership.members
    transition.change(members=members.put(rank, replace(members[rank], **changes)))


def update_members(transition: Transition, members: Iterable[GroupMember]) -> None:
    """Replace all members; each keeps its rank."""
    transition.change(members=PersistentList(members))


def restart_members(transition: Transition) -> None:
    """Have all ranks restart from the initial state, under a plan to be chosen."""
    transition.change(plan=None)
    update_members(transition, (replace(member, told=False) for member in transition.state.membership.members))


# --- Shrinking and growing --------------------------------------------------------------------------------------------


def complete_members(transition: Transition) -> bool:
    """Return whether all ranks are held by processes that are up; drop those that are late, if the run may shrink."""
    if transition.state.membership.starting and _can_shrink(transition.state):
        _remove_late_members(transition)
    if not transition.state.membership.starting:
        _admit_joiners(transition)
    return not transition.state.membership.starting


def arrange_ranks(transition: Transition, plan: Plan | None) -> None:
    """Take a plan. Assign ranks to nodes as its mesh needs, if no rank was told to its process or all restart."""
    members, former, mesh = (
        transition.state.membership.members,
        transition.state.membership.plan,
        transition.settings.world.mesh,
    )
    transition.change(plan=plan)
    restart = plan is not None and former is not None and plan.layout != former.layout
    if mesh is None or (any(member.told for member in members) and not restart):
        return
    homes = [member.home or member.node for member in members]
    order = assign_slots(plan.mesh if plan else mesh, homes, len(transition.settings.world.devices))
    assign_ranks(transition, tuple(members[place] for place in order))


def can_grow(state: DriverState) -> bool:
    """Whether a joining worker is up, and the run can use it."""
    if state.settings.world.tolerates:
        return False  # dynamic members join by themselves
    room = len(state.membership.members) < state.settings.world.most and state.settings.world.reform == "in_place"
    return room and not state.shutdown.stopping and target_size(state) > len(state.membership.members)


def target_size(state: DriverState) -> int:
    """Return how many of the members and the joining workers that are up the run can use."""
    ready = len(state.membership.members) + len(_joiners_up(state))
    return state.usable_workers(min(ready, state.settings.world.most))


def _joiners_up(state: DriverState) -> list[int]:
    return sorted(worker for worker, spare in state.membership.spares.items() if spare.slot is not None and spare.ready)


def _shrinks_at_once(state: DriverState) -> bool:
    """Whether the run does not wait for the replacement of lost workers.

    It waits for those with which it starts, and where the others could not all continue with the state that they hold.
    """
    members, world = state.membership.members, state.settings.world
    left = len(members) - len(state.membership.starting)
    if not world.shrinks_at_once or world.reform != "in_place" or left < world.fewest:
        return False
    if all(member.fresh for member in members):
        return False
    return state.usable_workers(left) == left and not (
        state.loses_state(left) and state.position.progress > state.copied
    )


def _can_shrink(state: DriverState) -> bool:
    membership, world = state.membership, state.settings.world
    if world.fewest == len(membership.members) or "shrink" in state.timers:
        return False
    if any(world.role_of(membership.rank_of[worker]) != "worker" for worker in membership.starting):
        return False
    left = len(membership.members) - len(membership.starting)
    return left >= world.fewest and state.usable_workers(left) > 0


def _remove_late_members(transition: Transition) -> None:
    """Continue without members that did not start in time; they join when they are up."""
    state, deadlines = transition.state, transition.settings.deadlines
    members, starting = state.membership.members, state.membership.starting
    late = {member.worker: StandbyWorker(slot=member.slot) for member in members if member.worker in starting}
    transition.disarm("place")
    transition.change(starting=PersistentSet(), spares=PersistentMap({**state.membership.spares, **late}))
    waited_s = deadlines.shrink_s if "place" in state.timers else deadlines.place_deadline_s
    waited = "the others do not wait" if _shrinks_at_once(state) else f"no more started within {waited_s:g} s"
    _resize(transition, tuple(member for member in members if member.worker not in late), waited)


def _admit_joiners(transition: Transition) -> None:
    """Give ranks to joining workers that are up; release members for which the plan has no rank."""
    state, count = transition.state, len(transition.state.membership.members)
    total = target_size(state)
    unknown = state.epoch.restore_plan is None  # the step of workers that outlived another driver
    if state.loses_state(total) and (unknown or state.position.progress > state.copied):
        total = state.usable_workers(count)  # the members hold a newer state than any copy: grow once it is copied
    change = total - count
    if change > 0:
        ready = _joiners_up(state)[:change]
        joining = tuple(_member_of_joiner(worker, state.membership.spares[worker]) for worker in ready)
        transition.change(spares=state.membership.spares.without(ready))
        _resize(transition, (*state.membership.members, *joining), "there is room")
    elif change < 0:
        remove_members(transition, _surplus_members(state, -change), "no plan for more")


def _surplus_members(state: DriverState, number: int) -> frozenset[int]:
    """Return that many members, first those whose part of the state others hold too; the last ranks of them."""
    holders: dict[int, list[int]] = {}  # ranks, by part
    for rank, member in enumerate(state.membership.members):
        holders.setdefault(member.part, []).append(rank)
    order = [(part >= 0, -len(ranks), -ranks[-1], part) for part, ranks in holders.items()]
    heapify(order)
    going: list[int] = []
    while len(going) < number:
        *_, part = order[0]
        ranks = holders[part]
        going.append(ranks.pop())
        if ranks:
            heapreplace(order, (part >= 0, -len(ranks), -ranks[-1], part))
        else:
            heappop(order)
    return frozenset(state.membership.members[rank].worker for rank in going)


def _member_of_joiner(worker: int, spare: StandbyWorker) -> GroupMember:
    assert spare.slot is not None, "a joining worker has a slot"
    return GroupMember(worker=worker, slot=spare.slot, node=spare.node, home=spare.home, pid=spare.pid)


def admissible_joiners(state: DriverState) -> list[int]:
    """Return the joining workers that are up, as far as the run may grow."""
    return _joiners_up(state)[: max(0, state.settings.world.most - len(state.membership.members))]


def admit_joiner(transition: Transition, worker: int) -> None:
    """Give a joining worker the next rank."""
    state = transition.state
    transition.change(spares=state.membership.spares.without({worker}))
    assign_ranks(transition, (*state.membership.members, _member_of_joiner(worker, state.membership.spares[worker])))


def assign_ranks(transition: Transition, members: tuple[GroupMember, ...]) -> None:
    """Assign ranks to the members in their order."""
    ranks = PersistentMap((member.worker, rank) for rank, member in enumerate(members))
    transition.change(members=PersistentList(members), rank_of=ranks)


def _resize(transition: Transition, members: tuple[GroupMember, ...], why: str) -> None:
    former = len(transition.state.membership.members)
    assign_ranks(transition, members)
    workers, before = (transition.settings.world.crew(total)[0] for total in (len(members), former))
    transition.emit(Resized(workers=workers, former=before, why=why))


def remove_members(transition: Transition, workers: frozenset[int], why: str) -> None:
    """Continue without these idle members; joining workers replace them later."""
    for worker in sorted(workers):
        transition.want(m.KillWorker(worker=worker))
    drop_workers(transition, workers)
    _resize(
        transition, tuple(member for member in transition.state.membership.members if member.worker not in workers), why
    )


# --- Losses -----------------------------------------------------------------------------------------------------------


def on_standby_died(transition: Transition, event: m.WorkerDied) -> None:
    """Replace a process without a rank that ended; start no more after several in a row."""
    lost = transition.state.membership.spares_lost + 1
    drop_workers(transition, {event.worker})
    transition.change(spares_lost=lost)
    if transition.state.phase is Phase.RUNNING:
        start_standbys(transition)
    if lost == MAX_STANDBY_FAILURES:
        transition.emit(
            Noted(text=f"continuing without warm standbys, since {lost} ended by themselves: {event.cause}")
        )


def on_start_deadline(transition: Transition) -> None:
    """Continue with fewer workers if the user gave no number of them; otherwise end the run."""
    state, world, stopping = transition.state, transition.settings.world, transition.state.shutdown.stopping
    if world.last_resort is not None and not stopping:
        transition.adjust_policy(min_workers=world.last_resort)
        if _can_shrink(transition.state):
            return  # `complete_members` removes the late ones
    total, started = len(state.membership.members), len(state.membership.members) - len(state.membership.starting)
    error = ResourceError(
        f"{started} of {_count_text(total)} started within {state.settings.deadlines.place_deadline_s:g} s",
        where=world.layouts.lacking(started) if world.layouts is not None and started else "",
        remedy=f"free resources or add nodes, or set workers={max(1, started)}, or raise place_deadline_s",
    )
    transition.end_run("stopped" if stopping else "failed", None if stopping else error)


def describe_starting(state: DriverState) -> str:
    """`2 workers and 1 server`, the processes that start; of a coordinator also `1 chief`."""
    rank_of, role_of = state.membership.rank_of, state.settings.world.role_of
    roles = Counter(role_of(rank_of[worker]) for worker in state.membership.starting)
    found = [_count_text(roles[role], role) for role in ("worker", "server", "chief") if roles[role]]
    return " and ".join(filter(None, (", ".join(found[:-1]), found[-1])))


def _count_text(number: int, what: str = "worker") -> str:
    """`2 workers`."""
    return f"{number} {what}{'s' if number != 1 else ''}"


# --- Driver takeover --------------------------------------------------------------------------------------------------


def take_over_workers(transition: Transition, living: Sequence[m.SurvivingWorker] = ()) -> None:
    """Take over the workers of the previous driver that live, and start the missing ones."""
    living, leaving = _reusable_workers(transition, living)
    plan = _adopt_plan(transition, [one for one in living if one is not leaving])
    settings = transition.settings
    workers, most = (plan.workers, plan.workers) if plan else (settings.world.workers, settings.world.most)
    slotted = sorted((one for one in living if one.slot is not None), key=lambda one: (one.waiting, one.rank))
    ranked = [one for rank, one in enumerate(slotted) if rank < (workers if one.waiting else most)]
    assigned = {one.worker for one in ranked}
    waiting = {
        one.worker: StandbyWorker(slot=one.slot, node=one.node, home=one.home, pid=one.pid, ready=True)
        for one in living
        if one.worker not in assigned
    }
    held = {one.slot for one in ranked} | {spare.slot for spare in waiting.values()}
    free = [slot for slot in range(settings.world.most) if slot not in held]
    servers = sum(settings.world.role_of(slot) != "worker" for slot in free)  # the run needs all of them
    members = _members_by_rank(transition, ranked, free[: max(servers, workers - len(ranked))])
    rank_of = PersistentMap(
        (member.worker, rank) for rank, member in enumerate(members) if member.worker != _UNASSIGNED
    )
    transition.enter(
        Phase.GATHERING,
        members=PersistentList(members),
        rank_of=rank_of,
        next_worker=max((transition.state.membership.next_worker, *(one.worker + 1 for one in living))),
        spares=PersistentMap(waiting),
        accelerators=PersistentMap((_slot_of_survivor(one), one.accelerators) for one in living if one.accelerators),
    )
    transition.await_workers(rank_of)
    for one in living:
        transition.emit(Placed(worker=one.worker, node=one.node, pid=one.pid, spare=one.worker in waiting))
    _emit_repeated_steps(transition, living)
    staying = [worker for worker in rank_of if leaving is None or worker != leaving.worker]
    if staying:
        transition.emit(
            Noted(text=f"took over {_count_text(len(living) - (leaving is not None))} of the previous driver")
        )
        transition.call(staying, "leave")
    if leaving is not None:
        _copy_or_replace(transition, leaving)
    if transition.state.awaiting:
        transition.arm("leave", settings.deadlines.leave_deadline_s)
    replace_workers(transition, [rank for rank, member in enumerate(members) if member.worker == _UNASSIGNED])


def _copy_or_replace(transition: Transition, leaving: m.SurvivingWorker) -> None:
    """Have a survivor copy its state, which is whole, before its process is replaced; else replace it now."""
    transition.reached(leaving.step)
    rank = transition.state.membership.rank_of[leaving.worker]
    if not checkpointing.request_survivors_copy(transition, rank):
        replace_workers(transition, [rank], kill=True)


def _emit_repeated_steps(transition: Transition, living: Sequence[m.SurvivingWorker]) -> None:
    """Report how many steps are done again, if no worker holds the newest step that the previous driver reported."""
    state = transition.state
    if any(one.plan is not None for one in living):
        return  # the first rendezvous reports it
    begin, kept = state.committed, state.memory.kept.step if state.memory.kept else 0
    lost = state.position.told - max(begin, kept)
    if lost > 0:
        since = f"the checkpoint of step {begin}" if begin else "the beginning"
        where = f"the copy in memory of step {kept}" if kept > begin else since
        steps = "1 step is" if lost == 1 else f"{lost} steps are"
        text = f"no worker of the previous driver is left: the run continues from {where}; {steps} repeated"
        transition.emit(Noted(text=text))


def _reusable_workers(
    transition: Transition, living: Sequence[m.SurvivingWorker]
) -> tuple[Sequence[m.SurvivingWorker], m.SurvivingWorker | None]:
    """Return the workers that stay for now, and end the others.

    If a group needs new processes these are standbys, and the worker with the newest state. That one is returned as the
    second value too: it ends after it has copied its state.
    """
    if transition.settings.world.reform == "in_place":
        return living, None
    spent = [one for one in living if not one.waiting]
    holders = [one for one in spent if one.plan is not None and one.plan.mesh.size == one.plan.mesh.data]
    leaving = max(holders, key=lambda one: one.step, default=None)
    if spent:
        transition.emit(
            Noted(text=f"ended {_count_text(len(spent))} of the previous driver: this strategy needs new processes")
        )
    for one in spent:
        if one is not leaving:
            transition.want(m.KillWorker(worker=one.worker))
    transition.change(next_worker=max((one.worker for one in spent), default=-1) + 1)
    return [one for one in living if one.waiting or one is leaving], leaving


def _adopt_plan(transition: Transition, living: Sequence[m.SurvivingWorker]) -> Plan | None:
    """Choose the plan of the survivors, if their state would be lost under the run's own plan, and report it."""
    world, layouts = transition.settings.world, transition.settings.world.layouts
    theirs = _plan_of_newest_state(living, transition.state.copied)
    if layouts is None or theirs is None:
        return None
    layouts = _leaner_as_theirs(transition, layouts, theirs)
    own, fewest = layouts.on(world.workers, world.fewest), world.fewest
    if own is not None and own.layout == theirs.layout:
        transition.change(plan=theirs)  # its parts decide who gets which rank if there are more or fewer replicas now
        return None
    if theirs.workers < fewest and world.last_resort is not None:
        fewest = world.last_resort  # as the previous driver did
    plan = layouts.on(theirs.workers, fewest)
    if plan is None or (plan.layout, plan.workers) != (theirs.layout, theirs.workers):
        return None  # the run has other plans by now
    if fewest != world.fewest:
        transition.adjust_policy(min_workers=fewest)
    transition.change(plan=plan)
    why = f"the workers hold a state of {plan.name} that is newer than every complete copy"
    former = layouts.plans[0].name
    transition.emit(Replanned(plan=asdict(plan), name=plan.name, former=former, workers=plan.workers, why=why))
    return plan


def _leaner_as_theirs(transition: Transition, layouts: m.PlanSelector, theirs: Plan) -> m.PlanSelector:
    """Take the plans that need less memory which the previous driver took, if the survivors have one of them."""
    world, found = transition.settings.world, layouts
    for _ in range(_MOST_REPLANS if transition.settings.limits.replan_memory else 0):
        plan = found.on(theirs.workers, min(theirs.workers, world.fewest))
        if plan is None:
            break
        if (plan.layout, plan.accumulation) == (theirs.layout, theirs.accumulation):
            if found is not layouts:
                transition.adjust_policy(layouts=found)
            return found
        if plan.memory_bytes < theirs.memory_bytes:
            break  # each further one needs less still
        leaner = found.leaner(plan)
        if leaner is None:
            break
        found = leaner
    return layouts


def _plan_of_newest_state(living: Sequence[m.SurvivingWorker], copied: int) -> Plan | None:
    """Return the plan of the newest state that the survivors hold completely; None if a copy is as new."""
    newest = max(living, key=lambda one: one.step, default=None)
    if newest is None or newest.plan is None or newest.step <= copied:
        return None
    plan = newest.plan
    parts = {_part_of_survivor(one, plan) for one in living} - {-1}
    return plan if len(parts) * plan.mesh.data == plan.mesh.size else None


def _members_by_rank(
    transition: Transition, living: Sequence[m.SurvivingWorker], free: Sequence[int]
) -> tuple[GroupMember, ...]:
    """Return members by rank: survivors at the ranks that they held, unassigned ones in the free slots.

    Slots of servers are for servers only.
    """
    plan, role_of, size = transition.state.membership.plan, transition.settings.world.role_of, len(living) + len(free)
    served = [slot for slot in free if role_of(slot) != "worker"]
    found = {slot: GroupMember(worker=_UNASSIGNED, slot=slot) for slot in served}
    rest: list[GroupMember] = []
    for one in living:
        member = GroupMember(
            worker=one.worker,
            slot=_slot_of_survivor(one),
            node=one.node,
            home=one.home,
            pid=one.pid,
            told=not one.waiting,
            fresh=one.waiting,
            part=_part_of_survivor(one, plan),
        )
        if 0 <= one.rank < size and one.rank not in found:
            found[one.rank] = member
        else:
            rest.append(member)
    others = iter((*rest, *(GroupMember(worker=_UNASSIGNED, slot=slot) for slot in free if slot not in served)))
    return tuple(found.get(rank) or next(others) for rank in range(size))


def _part_of_survivor(living: m.SurvivingWorker, plan: Plan | None) -> int:
    """Return the number of the replica's part that a survivor holds in the layout of a plan; -1 for none."""
    held = living.plan
    if plan is None or held is None or held.layout != plan.layout:
        return -1
    return held.mesh.part_of(living.rank * held.devices_per_worker)


def _slot_of_survivor(living: m.SurvivingWorker) -> int:
    return -1 if living.slot is None else living.slot
