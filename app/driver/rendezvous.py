"""A new generation: ports, the group, the state that every rank will stand at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace

from trainwright.core.events import Formed, Replanned
from trainwright.core.group import Address, Generation, Peer, Role, StateTag
from trainwright.core.plan import Plan
from trainwright.core.rank_placement import ranks_by_node
from trainwright.driver import plan_trials
from trainwright.driver.crash_loops import note
from trainwright.driver.dynamic_members import group_of
from trainwright.driver.loss_spikes import rolled_back
from trainwright.driver.membership import arrange, place, renumber
from trainwright.driver.memory_checkpointing import keepers_of
from trainwright.driver.messages import Heal
from trainwright.driver.persistent_collections import PersistentList, PersistentSet
from trainwright.driver.state import Member, Phase, State
from trainwright.driver.state_agreement import agree, agree_at, writers_of
from trainwright.driver.transition import Turn
from trainwright.driver.worker_requests import Reservation


def reserve(turn: Turn) -> None:
    """Begin the next generation: every rank binds a port."""
    plan = plan_trials.candidate(turn) or _plan(turn)
    state = turn.state
    generation = Generation(token=state.generation.token, number=state.generation.number + 1)
    if plan is not None and state.plan is not None and plan.layout == state.plan.layout:
        _keep_parts(turn, plan)
    arrange(turn, plan)
    turn.disarm()
    turn.enter(Phase.RESERVING, generation=generation, plan=plan)
    turn.change(awaiting=PersistentSet(member.worker for member in turn.state.members))
    wanted: dict[Role, Reservation] = {}  # one for all of a role, so that it is pickled once
    for rank, member in enumerate(turn.state.members):
        role = state.settings.role_of(rank)
        wanted.setdefault(role, Reservation(generation=generation, plan=plan, role=role))
        turn.call([member.worker], "reserve", wanted[role])
    turn.arm("call", state.settings.call_deadline_s)


def _plan(turn: Turn) -> Plan | None:
    """The plan for as many workers as there are; another layout than before is told of."""
    state, layouts = turn.state, turn.settings.layouts
    if layouts is None:
        return None
    plan, former = layouts.on(len(state.members), turn.settings.fewest), state.plan or layouts.plans[0]
    assert plan is not None and plan.workers == len(state.members), "the members were seated for a plan"
    if plan.layout != former.layout:
        why = layouts.lacking(plan.workers)
        turn.emit(Replanned(plan=asdict(plan), name=plan.name, former=former.name, workers=plan.workers, why=why))
    return plan


def _keep_parts(turn: Turn, plan: Plan) -> None:
    """Where there are more or fewer replicas than before, give each member a rank that holds what it holds.

    Whoever can stay at a rank does, those first who hold a part of the state.
    """
    parts = [plan.mesh.part_of(rank * plan.devices_per_worker) for rank in range(plan.workers)]
    places: dict[int, list[int]] = {}  # ranks, by part
    for rank, part in enumerate(parts):
        places.setdefault(part, []).append(rank)
    by_part, every = {part: iter(ranks) for part, ranks in places.items()}, iter(range(len(parts)))
    claims: tuple[Callable[[int, Member], Iterable[int]], ...] = (
        lambda rank, member: [rank] if parts[rank] == member.part else [],
        lambda rank, member: by_part.get(member.part, ()),  # what one has looked at and not taken, nobody can take
        lambda rank, member: [rank],
        lambda rank, member: every,
    )
    seated: dict[int, Member] = {}
    unseated = dict(enumerate(turn.state.members))
    for claim in claims:
        for rank, member in [*unseated.items()]:
            free = next((other for other in claim(rank, member) if other not in seated), None)
            if free is not None:
                seated[free] = unseated.pop(rank)
    members = tuple(seated[rank] for rank in range(len(parts)))
    renumber(turn, members)


def reserved(turn: Turn) -> None:
    """All ports are known: tell each rank who its peers are."""
    state, settings = turn.state, turn.settings
    addresses: Mapping[int, Address] = state.answers
    peers = tuple(
        Peer(rank=rank, address=addresses[rank], role=settings.role_of(rank), node=member.node)
        for rank, member in enumerate(state.members)
    )
    turn.enter(
        Phase.FORMING,
        awaiting=PersistentSet(member.worker for member in state.members),
        members=PersistentList(member if member.told else replace(member, told=True) for member in state.members),
        peers=peers,
    )
    for rank, member in enumerate(state.members):
        turn.call([member.worker], "form", group_of(turn.state, rank))
    turn.arm("call", settings.call_deadline_s)


def formed(turn: Turn) -> None:
    """All say what they hold: choose the state to go on from. With none at all, every process begins anew."""
    state = turn.state
    tags: Mapping[int, StateTag] = state.answers
    heal = choose_heal(state, tags)
    if heal is None:
        turn.disarm()
        turn.enter(Phase.GATHERING)
        place(turn, range(len(state.members)), kill=True)
        return
    if heal.source == "replica":
        turn.reached(heal.step)
    note(turn)
    heal = replace(heal, passing=turn.state.passing)
    turn.enter(Phase.HEALING, heal=heal)
    turn.call_all("heal", heal)
    turn.arm("call", state.settings.call_deadline_s)


def choose_heal(state: State, tags: Mapping[int, StateTag]) -> Heal | None:
    """The first rung that holds: the ranks' own states, what is kept in memory, the newest checkpoint, a fresh build.

    A fresh build is one that was never trained (step None); where only trained and torn states are left, there is
    none, and the answer is None. After a spike the ranks' own states are of no use.
    """
    agreement = None if state.spiked else agree(tags)
    kept_step = state.kept.step if state.kept else -1
    newest = max(kept_step, state.committed)
    if agreement is not None and agreement.step is not None and agreement.step >= newest:
        return Heal(step=agreement.step, source="replica", moves=agreement.moves)
    if state.kept is not None and kept_step > state.committed:
        return Heal(step=kept_step, source="keeper", kept=state.kept)
    if state.head is not None:
        return Heal(step=state.head.step, source="checkpoint", checkpoint=state.head)
    fresh = agree_at(tags, None)
    return Heal(step=0, source="initial", moves=fresh.moves) if fresh else None


def healed(turn: Turn) -> None:
    """Every rank stands at the same step: the generation is ready."""
    state, heal = turn.state, turn.state.heal
    assert heal is not None, "healed without a cure"
    tags: Mapping[int, StateTag] = state.answers
    reform = state.settings.reform
    assert all((tag.step or 0) == heal.step for tag in tags.values()), f"ranks stand apart, not at {heal.step}"
    if state.trials is not None:
        plan_trials.begin(turn)
        return
    workers, servers = state.settings.crew(len(state.members))
    turn.emit(
        Formed(
            generation=state.generation.number,
            workers=workers,
            servers=servers,
            step=heal.step,
            source=heal.source,
            checkpoint=heal.checkpoint.path if heal.checkpoint else "",
            survivors=sum(not member.fresh for member in state.members),
            seconds=turn.now_s - state.since_s,
            steps_lost=max(0, state.progress - heal.step, state.told - heal.step),
            nodes=ranks_by_node([member.node for member in state.members]),
        )
    )
    turn.change(
        phase=Phase.READY,
        step=heal.step,
        progress=heal.step,
        members=PersistentList(
            _ready(member, tags[rank], state.plan, rank) for rank, member in enumerate(state.members)
        ),
        writers=writers_of(tags),
        keepers=() if state.keep_off else keepers_of(tags, [member.node for member in state.members], reform),
        kept_s=turn.now_s if heal.source != "keeper" else state.kept_s,
        layout=tags[0].layout,
        considered=-1,
        losses=rolled_back(state, heal.step),
        evaluated=min(state.evaluated, heal.step) if state.spiked else state.evaluated,
        spiked=0,
        told=0,
    )


def _ready(member: Member, tag: StateTag, plan: Plan | None, rank: int) -> Member:
    """A member that holds its part of the state."""
    part = plan.mesh.part_of(rank * plan.devices_per_worker) if plan else 0
    if not member.fresh and (member.pieces, member.part) == (tag.pieces, part):
        return member
    return replace(member, fresh=False, pieces=tag.pieces, part=part)
