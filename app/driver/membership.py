"""Who holds which rank: processes placed, spares that wait, and a world that shrinks and grows between its bounds.

A slot is room for one process (a bundle of resources). A spare stands beside a slot and takes none of its resources; a
recruit holds a slot of its own and waits to join. Ranks are given anew in each generation, slots stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from heapq import heapify, heappop, heapreplace

from trainwright.core.errors import ResourceError
from trainwright.core.events import Noted, Placed, Promoted, Resized, Waiting
from trainwright.core.plan import Plan
from trainwright.core.rank_placement import seats
from trainwright.driver import memory_checkpointing
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import forget
from trainwright.driver.persistent_collections import PersistentList, PersistentMap, PersistentSet
from trainwright.driver.shutdown import close
from trainwright.driver.state import Member, Phase, Spare, State
from trainwright.driver.transition import Turn

NOBODY = -1  # holds a rank for which a process is about to be placed
SPARES_TRIED = 3  # that ended by themselves, one after another


def place(turn: Turn, ranks: Iterable[int], *, kill: bool = False) -> None:
    """Give each rank a new process in its slot. `kill` ends those that hold the ranks now."""
    gone: set[int] = set()
    starting = turn.state.starting
    for rank in ranks:
        state = turn.state
        old = state.members[rank]
        if old.worker in state.rank_of:
            gone.add(old.worker)
            if kill:
                turn.want(m.Kill(worker=old.worker))
            turn.change(rank_of=state.rank_of.without({old.worker}))
        fill(turn, rank, spare_for(state, old.node))
    state = turn.state
    turn.change(starting=state.starting - gone, awaiting=state.awaiting - gone)
    forget(turn, frozenset(gone))
    memory_checkpointing.forget(turn, frozenset(gone))
    if turn.state.starting - starting:
        if not starting:
            what = starting_text(turn.state)
            turn.emit(Waiting(what=f"{what} to start", deadline_s=turn.settings.place_deadline_s))
        await_starts(turn)


def await_starts(turn: Turn) -> None:
    """Those who start have so much time."""
    if turn.state.starting:
        turn.arm("place", turn.settings.place_deadline_s)
        if turn.settings.fewest < len(turn.state.members):
            turn.arm("shrink", turn.settings.shrink_s)


def fill(turn: Turn, rank: int, spare: int | None, wait_s: float = 0.0) -> None:
    """Give a rank to a spare, or to a new process, which is started after a while."""
    state = turn.state
    held = None if spare is None else state.spares[spare]
    worker = state.next_worker if spare is None else spare
    slot = state.members[rank].slot if held is None or held.slot is None else held.slot
    member = Member(worker=worker, slot=slot, node=held.node if held else "", home=held.home if held else "")
    turn.change(
        members=state.members.put(rank, member),
        rank_of=state.rank_of.put(worker, rank),
        next_worker=state.next_worker + (spare is None),
        starting=state.starting if held and held.ready else state.starting | {worker},
        spares=state.spares.without({worker}),
    )
    if spare is None:
        turn.want(m.Place(worker=worker, slot=slot, after_s=wait_s))
    else:
        turn.emit(Promoted(worker=worker, rank=rank, slot=slot, node=member.node))


def spare_for(state: State, node: str) -> int | None:
    """The spare that can take a rank of this node soonest; None where there is none.

    A recruit that is up will do where no other spare does, one that is still to come may never.
    """
    stay, doomed = state.settings.spares_stay, doomed_nodes(state)  # then a node that is not known yet is no match
    lasting = {worker: spare for worker, spare in state.spares.items() if spare.node not in doomed}
    beside = [w for w, s in lasting.items() if s.slot is None and (not stay or (node and s.node == node))]
    fitting = beside or [worker for worker, spare in lasting.items() if spare.slot is not None and spare.ready]
    return min(
        fitting,
        key=lambda worker: (not state.spares[worker].ready, state.spares[worker].node != node, worker),
        default=None,
    )


def doomed_nodes(state: State) -> frozenset[str]:
    """Nodes of members that must go, where there are others: such a notice concerns a whole node as a rule."""
    if not state.leaving:
        return frozenset()
    nodes = {member.node for member in state.members} | {spare.node for spare in state.spares.values()}
    doomed = {member.node for member in state.members if member.worker in state.leaving}
    return frozenset(doomed if nodes - doomed - {""} else ())


def replenish(turn: Turn) -> None:
    """Have spares and recruits started, now that steps are running; none after some that ended by themselves."""
    state = turn.state
    if state.spares_lost >= SPARES_TRIED or state.stopping:
        return
    held = {member.slot for member in state.members} | {spare.slot for spare in state.spares.values()}
    free = [slot for slot in range(state.settings.most) if slot not in held]
    missing = state.settings.spares - sum(spare.slot is None for spare in state.spares.values())
    for _ in range(missing):
        number = turn.state.next_worker
        _place_spare(turn, None, state.members[number % len(state.members)].slot)
    for slot in free:
        _place_spare(turn, slot, slot)


def _place_spare(turn: Turn, own: int | None, slot: int) -> None:
    worker = turn.state.next_worker
    turn.change(next_worker=worker + 1, spares=turn.state.spares.put(worker, Spare(slot=own)))
    turn.want(m.Place(worker=worker, slot=slot, spare=True, beside=own is None))


def started(turn: Turn, event: m.Started) -> None:
    """A placed process is up."""
    state = turn.state
    if event.worker in state.spares:
        _spare_started(turn, event)
        return
    rank = state.rank_of[event.worker]
    _note_accelerators(turn, state.members[rank].slot, event)
    member = replace(state.members[rank], node=event.node, home=event.home)
    turn.change(
        members=state.members.put(rank, member),
        starting=state.starting - {event.worker},
    )
    turn.emit(Placed(worker=event.worker, node=event.node, pid=event.pid))
    if not turn.state.starting:
        turn.disarm("place", "shrink")


def _spare_started(turn: Turn, event: m.Started) -> None:
    """A spare is up. For a recruit the others pause, so that it can join."""
    state = turn.state
    spare = replace(state.spares[event.worker], node=event.node, home=event.home, ready=True)
    turn.change(spares=state.spares.put(event.worker, spare), spares_lost=0)
    turn.emit(Placed(worker=event.worker, node=event.node, pid=event.pid, spare=True))
    if spare.slot is not None:
        _note_accelerators(turn, spare.slot, event)
    if state.phase is Phase.RUNNING and may_grow(turn.state):
        pause(turn)


def _note_accelerators(turn: Turn, slot: int, event: m.Started) -> None:
    if event.accelerators:
        turn.change(accelerators=turn.state.accelerators.put(slot, event.accelerators))


# --- shrinking and growing --------------------------------------------------------------------------------------------


def ready_to_form(turn: Turn) -> bool:
    """Whether all ranks are held by processes that are up; gives up those that are missing for too long, if it may."""
    if turn.state.starting and _may_shrink(turn.state):
        _shrink(turn)
    if not turn.state.starting:
        _join(turn)
    return not turn.state.starting


def arrange(turn: Turn, plan: Plan | None) -> None:
    """Lay the ranks over the nodes as the mesh wants them, where none has been told its rank or all begin anew."""
    state, mesh = turn.state, turn.settings.mesh
    anew = plan is not None and state.plan is not None and plan.layout != state.plan.layout
    if mesh is None or (any(member.told for member in state.members) and not anew):
        return
    order = seats(
        plan.mesh if plan else mesh,
        [member.home or member.node for member in state.members],
        len(turn.settings.devices),
    )
    members = tuple(state.members[place] for place in order)
    renumber(turn, members)


def may_grow(state: State) -> bool:
    """Whether a recruit is up, and the survivors can take it in."""
    if state.settings.tolerates:
        return False  # they join by themselves
    room = len(state.members) < state.settings.most and state.settings.reform == "in_place"
    return room and not state.stopping and wanted(state) > len(state.members)


def wanted(state: State) -> int:
    """How many of the members and the recruits that are up the run can use."""
    ready = len(state.members) + len(_ready(state))
    return state.seats(min(ready, state.settings.most))


def _ready(state: State) -> list[int]:
    """Recruits that are up."""
    return sorted(worker for worker, spare in state.spares.items() if spare.slot is not None and spare.ready)


def pause(turn: Turn) -> None:
    """While steps run: have the ranks stop after the same one, soon, for something that is due."""
    if not turn.state.pausing:
        turn.change(pausing=True)
        turn.call([turn.state.members[0].worker], "stop")


def _may_shrink(state: State) -> bool:
    if state.settings.fewest == len(state.members) or "shrink" in state.timers:
        return False
    if any(state.settings.role_of(state.rank_of[worker]) != "worker" for worker in state.starting):
        return False
    left = len(state.members) - len(state.starting)
    return left >= state.settings.fewest and state.seats(left) > 0


def _shrink(turn: Turn) -> None:
    """Go on without those that did not start in time: they join when they come."""
    state = turn.state
    late = {member.worker: Spare(slot=member.slot) for member in state.members if member.worker in state.starting}
    turn.disarm("place")
    turn.change(starting=PersistentSet(), spares=PersistentMap({**state.spares, **late}))
    patience_s = state.settings.shrink_s if "place" in state.timers else state.settings.place_deadline_s
    waited = f"no more started within {patience_s:g} s"
    _seat(turn, tuple(member for member in state.members if member.worker not in late), waited)


def _join(turn: Turn) -> None:
    """Recruits that are up get ranks, as far as there is room; members that the plan has no rank for go."""
    state, count = turn.state, len(turn.state.members)
    total = wanted(state)
    unknown = state.heal is None  # how far those are who outlived another driver
    if state.loses_state(total) and (unknown or state.progress > state.copied):
        total = state.seats(count)  # what the members hold is newer than any copy: they grow when there is one
    change = total - count
    if change > 0:
        ready = _ready(state)[:change]
        joining = tuple(_recruited(worker, state.spares[worker]) for worker in ready)
        turn.change(spares=state.spares.without(ready))
        _seat(turn, (*state.members, *joining), "there is room")
    elif change < 0:
        dismiss(turn, _needless(state, -change), "no plan for more")


def _needless(state: State, number: int) -> frozenset[int]:
    """So many members whose part others hold too, as far as there are such; the last ones where there is a choice."""
    holders: dict[int, list[int]] = {}  # ranks, by part
    for rank, member in enumerate(state.members):
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
    return frozenset(state.members[rank].worker for rank in going)


def _recruited(worker: int, spare: Spare) -> Member:
    assert spare.slot is not None, "a recruit has a slot"
    return Member(worker=worker, slot=spare.slot, node=spare.node, home=spare.home)


def ready_recruits(state: State) -> list[int]:
    """Recruits that are up, as far as the world may grow."""
    return _ready(state)[: max(0, state.settings.most - len(state.members))]


def take_recruit(turn: Turn, worker: int) -> None:
    """Give a recruit the next rank."""
    state = turn.state
    turn.change(spares=state.spares.without({worker}))
    renumber(turn, (*state.members, _recruited(worker, state.spares[worker])))


def renumber(turn: Turn, members: tuple[Member, ...]) -> None:
    """Give the members the ranks of their places."""
    ranks = PersistentMap((member.worker, rank) for rank, member in enumerate(members))
    turn.change(members=PersistentList(members), rank_of=ranks)


def _seat(turn: Turn, members: tuple[Member, ...], why: str) -> None:
    """Number the ranks anew."""
    former = len(turn.state.members)
    renumber(turn, members)
    workers, before = (turn.settings.crew(total)[0] for total in (len(members), former))
    turn.emit(Resized(workers=workers, former=before, why=why))


def dismiss(turn: Turn, workers: frozenset[int], why: str) -> None:
    """Go on without these idle members: recruits come in their stead when there is room."""
    turn.change(awaiting=turn.state.awaiting - workers)
    for worker in sorted(workers):
        turn.want(m.Kill(worker=worker))
    forget(turn, workers)
    memory_checkpointing.forget(turn, workers)
    _seat(turn, tuple(member for member in turn.state.members if member.worker not in workers), why)


# --- losing -----------------------------------------------------------------------------------------------------------


def spare_died(turn: Turn, event: m.Died) -> None:
    """A process without a rank ended; after some that did so one after another no more are started."""
    state = turn.state
    turn.change(
        spares=state.spares.without({event.worker}),
        spares_lost=state.spares_lost + 1,
    )
    if turn.state.phase is Phase.RUNNING:
        replenish(turn)
    if turn.state.spares_lost == SPARES_TRIED:
        turn.emit(
            Noted(text=f"going on without spare workers, since {SPARES_TRIED} ended by themselves: {event.cause}")
        )


def place_expired(turn: Turn) -> None:
    """Not all processes started in time: where nobody said how many there must be, fewer go on from now on."""
    if turn.settings.last_resort is not None and not turn.state.stopping:
        turn.change(settings=replace(turn.settings, min_workers=turn.settings.last_resort))
        if _may_shrink(turn.state):
            return  # `recovering.gathered` sees to it
    state = turn.state
    total, missing, layouts = len(state.members), len(state.starting), state.settings.layouts
    lacking = layouts.lacking(total - missing) if layouts is not None and missing < total else ""
    error = ResourceError(
        f"{total - missing} of {count(total)} started within {state.settings.place_deadline_s:g} s",
        where=lacking,
        remedy=f"free resources or add nodes, or set workers={max(1, total - missing)}, or raise place_deadline_s",
    )
    close(turn, "stopped" if state.stopping else "failed", None if state.stopping else error)


def starting_text(state: State) -> str:
    """Who starts: `2 workers and 1 server`, of a coordinator also `1 chief`."""
    roles = Counter(state.settings.role_of(state.rank_of[worker]) for worker in state.starting)
    found = [count(roles[role], role) for role in ("worker", "server", "chief") if roles[role]]
    return " and ".join(filter(None, (", ".join(found[:-1]), found[-1])))


def count(number: int, what: str = "worker") -> str:
    """`2 workers`."""
    return f"{number} {what}{'s' if number != 1 else ''}"
