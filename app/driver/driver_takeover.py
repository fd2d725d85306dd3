"""What a new driver takes over from one that died: its workers, at the ranks and in the layout that they hold.

Where those who live hold a whole state that is newer than any copy, in another layout than the run's plan has, the run
goes on in theirs, and changes to its plan as room that returned does: from a checkpoint of the very step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from trainwright.core.events import Noted, Placed, Replanned
from trainwright.core.plan import Plan
from trainwright.driver import messages as m
from trainwright.driver.membership import NOBODY, count, place
from trainwright.driver.persistent_collections import PersistentList, PersistentMap, PersistentSet
from trainwright.driver.state import Member, Phase, Spare
from trainwright.driver.transition import Turn


def begin(turn: Turn, living: Sequence[m.Living] = ()) -> None:
    """Take over what lives of the driver before us, and start what is missing."""
    living = _usable(turn, living)
    plan = _adopted(turn, living)
    settings = turn.settings
    workers, most = (plan.workers, plan.workers) if plan else (settings.workers, settings.most)
    slotted = sorted((one for one in living if one.slot is not None), key=lambda one: (one.waiting, one.rank))
    ranked = [one for rank, one in enumerate(slotted) if rank < (workers if one.waiting else most)]
    seated = {one.worker for one in ranked}
    waiting = {
        one.worker: Spare(slot=one.slot, node=one.node, home=one.home, ready=True)
        for one in living
        if one.worker not in seated
    }
    held = {one.slot for one in ranked} | {spare.slot for spare in waiting.values()}
    free = [slot for slot in range(settings.most) if slot not in held]
    servers = sum(settings.role_of(slot) != "worker" for slot in free)  # none can do without them
    members = _seated(turn, ranked, free[: max(servers, workers - len(ranked))])
    rank_of = PersistentMap((member.worker, rank) for rank, member in enumerate(members) if member.worker != NOBODY)
    turn.enter(
        Phase.GATHERING,
        members=PersistentList(members),
        rank_of=rank_of,
        next_worker=max((turn.state.next_worker, *(one.worker + 1 for one in living))),
        spares=PersistentMap(waiting),
        accelerators=PersistentMap((_slot(one), one.accelerators) for one in living if one.accelerators),
        awaiting=PersistentSet(rank_of),
    )
    for one in living:
        turn.emit(Placed(worker=one.worker, node=one.node, pid=one.pid, spare=one.worker in waiting))
    _tell_lost(turn, living)
    if rank_of:
        turn.emit(Noted(text=f"took over {count(len(living))} that outlived the driver before"))
        turn.call(list(rank_of), "leave")
        turn.arm("leave", settings.leave_deadline_s)
    place(turn, [rank for rank, member in enumerate(members) if member.worker == NOBODY])


def _tell_lost(turn: Turn, living: Sequence[m.Living]) -> None:
    """Say which steps are done again, where no process holds what the driver before had reached."""
    state = turn.state
    if any(one.plan is not None for one in living):
        return  # the first group tells what was lost
    begin, kept = state.committed, state.kept.step if state.kept else 0
    lost = state.told - max(begin, kept)
    if lost > 0:
        since = f"the checkpoint of step {begin}" if begin else "the beginning"
        where = f"the copy in memory of step {kept}" if kept > begin else since
        steps = "1 step after it is" if lost == 1 else f"{lost} steps after it are"
        text = f"no worker outlived the driver before: the run goes on from {where}, and {steps} done again"
        turn.emit(Noted(text=text))


def _usable(turn: Turn, living: Sequence[m.Living]) -> Sequence[m.Living]:
    """Those who can form a group: where that takes new processes, spares alone. The others end."""
    if turn.settings.reform == "in_place":
        return living
    spent = [one.worker for one in living if not one.waiting]
    if spent:
        turn.emit(Noted(text=f"{count(len(spent))} of the driver before ended: this strategy begins in new processes"))
    for worker in spent:
        turn.want(m.Kill(worker=worker))
    turn.change(next_worker=max(spent, default=-1) + 1)
    return [one for one in living if one.waiting]


def _adopted(turn: Turn, living: Sequence[m.Living]) -> Plan | None:
    """The plan that those who live worked under, where their state would be lost under the run's own; it is told of."""
    state, settings, layouts = turn.state, turn.settings, turn.settings.layouts
    theirs = _held(living, state.copied)
    if layouts is None or theirs is None:
        return None
    own = layouts.on(settings.workers, settings.fewest)
    if own is not None and own.layout == theirs.layout:
        turn.change(plan=theirs)  # whose parts seat them where there are more or fewer replicas now
        return None
    if theirs.workers < settings.fewest and settings.last_resort is not None:
        settings = replace(settings, min_workers=settings.last_resort)  # as the driver before did
    plan = layouts.on(theirs.workers, settings.fewest)
    if plan is None or (plan.layout, plan.workers) != (theirs.layout, theirs.workers):
        return None  # the run's plans are others by now
    turn.change(settings=settings, plan=plan)
    why = f"those who outlived the driver before hold {plan.name} of a step that no copy is of"
    told = Replanned(plan=asdict(plan), name=plan.name, former=layouts.plans[0].name, workers=plan.workers, why=why)
    turn.emit(told)
    return plan


def _held(living: Sequence[m.Living], copied: int) -> Plan | None:
    """The plan whose newest state those who live hold all parts of; None where a copy is as new."""
    newest = max(living, key=lambda one: one.step, default=None)
    if newest is None or newest.plan is None or newest.step <= copied:
        return None
    plan = newest.plan
    parts = {_part(one, plan) for one in living} - {-1}
    return plan if len(parts) * plan.mesh.data == plan.mesh.size else None


def _seated(turn: Turn, living: Sequence[m.Living], free: Sequence[int]) -> tuple[Member, ...]:
    """Those who live at the ranks that they held, whose part of the model they have; nobody yet in the free slots.

    The slots of servers are theirs alone.
    """
    plan, role_of, size = turn.state.plan, turn.settings.role_of, len(living) + len(free)
    served = [slot for slot in free if role_of(slot) != "worker"]
    found = {slot: Member(worker=NOBODY, slot=slot) for slot in served}
    rest: list[Member] = []
    for one in living:
        member = Member(
            worker=one.worker,
            slot=_slot(one),
            node=one.node,
            home=one.home,
            told=not one.waiting,
            fresh=one.waiting,
            part=_part(one, plan),
        )
        if 0 <= one.rank < size and one.rank not in found:
            found[one.rank] = member
        else:
            rest.append(member)
    others = iter((*rest, *(Member(worker=NOBODY, slot=slot) for slot in free if slot not in served)))
    return tuple(found.get(rank) or next(others) for rank in range(size))


def _part(living: m.Living, plan: Plan | None) -> int:
    """The part of a replica that one holds in the layout of a plan; -1 for none."""
    held = living.plan
    if plan is None or held is None or held.layout != plan.layout:
        return -1
    return held.mesh.part_of(living.rank * held.devices_per_worker)


def _slot(living: m.Living) -> int:
    return -1 if living.slot is None else living.slot
