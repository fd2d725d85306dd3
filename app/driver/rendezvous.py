"""The rendezvous: ranks bind ports, form a group and agree on the step and its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace

from trainwright.core.events import Formed, Replanned
from trainwright.core.plan import Plan, ranks_by_node
from trainwright.core.topology import Address, Generation, Peer, Role, StateAgreement, StateTag, StateTransfer
from trainwright.driver import plan_trials
from trainwright.driver.checkpointing import choose_memory_copy_ranks
from trainwright.driver.driver_state import DriverState, GroupMember, Phase, Transition
from trainwright.driver.dynamic_members import group_for
from trainwright.driver.failure_policy import losses_until, record_crash_loop
from trainwright.driver.membership import arrange_ranks, assign_ranks, replace_workers
from trainwright.driver.messages import ReserveRequest, RestorePlan
from trainwright.driver.persistent_collections import PersistentList, PersistentSet


def begin_rendezvous(turn: Transition) -> None:
    """Start the next rendezvous epoch: every rank binds a port."""
    plan = plan_trials.next_candidate(turn) or _plan_for_members(turn)
    state = turn.state
    generation = Generation(token=state.epoch.generation.token, number=state.epoch.generation.number + 1)
    if plan is not None and state.membership.plan is not None and plan.layout == state.membership.plan.layout:
        _keep_state_parts(turn, plan)
    arrange_ranks(turn, plan)
    turn.disarm()
    turn.enter(Phase.RESERVING, generation=generation, plan=plan)
    turn.change(awaiting=PersistentSet(member.worker for member in turn.state.membership.members))
    wanted: dict[Role, ReserveRequest] = {}  # one for all of a role, so that it is pickled once
    for rank, member in enumerate(turn.state.membership.members):
        role = state.settings.world.role_of(rank)
        wanted.setdefault(role, ReserveRequest(generation=generation, plan=plan, role=role))
        turn.call([member.worker], "reserve", wanted[role])
    turn.arm("call", state.settings.deadlines.call_deadline_s)


def _plan_for_members(turn: Transition) -> Plan | None:
    """Return the plan for the present number of workers; report a change of layout."""
    state, layouts = turn.state, turn.settings.world.layouts
    if layouts is None:
        return None
    plan, former = (
        layouts.on(len(state.membership.members), turn.settings.world.fewest),
        state.membership.plan or layouts.plans[0],
    )
    assert plan is not None and plan.workers == len(state.membership.members), "the members have the ranks of a plan"
    if plan.layout != former.layout:
        why = layouts.lacking(plan.workers)
        turn.emit(Replanned(plan=asdict(plan), name=plan.name, former=former.name, workers=plan.workers, why=why))
    return plan


def _keep_state_parts(turn: Transition, plan: Plan) -> None:
    """Where there are more or fewer replicas than before, give each member a rank that holds what it holds.

    Whoever can stay at a rank does, those first who hold a part of the state.
    """
    parts = [plan.mesh.part_of(rank * plan.devices_per_worker) for rank in range(plan.workers)]
    places: dict[int, list[int]] = {}  # ranks, by part
    for rank, part in enumerate(parts):
        places.setdefault(part, []).append(rank)
    by_part, every = {part: iter(ranks) for part, ranks in places.items()}, iter(range(len(parts)))
    claims: tuple[Callable[[int, GroupMember], Iterable[int]], ...] = (
        lambda rank, member: [rank] if parts[rank] == member.part else [],
        lambda rank, member: by_part.get(member.part, ()),  # what one has looked at and not taken, nobody can take
        lambda rank, member: [rank],
        lambda rank, member: every,
    )
    seated: dict[int, GroupMember] = {}
    unseated = dict(enumerate(turn.state.membership.members))
    for claim in claims:
        for rank, member in [*unseated.items()]:
            free = next((other for other in claim(rank, member) if other not in seated), None)
            if free is not None:
                seated[free] = unseated.pop(rank)
    members = tuple(seated[rank] for rank in range(len(parts)))
    assign_ranks(turn, members)


def on_ports_reserved(turn: Transition) -> None:
    """Tell each rank its peers, once all ports are known."""
    state, settings = turn.state, turn.settings
    addresses: Mapping[int, Address] = state.answers
    peers = tuple(
        Peer(rank=rank, address=addresses[rank], role=settings.world.role_of(rank), node=member.node)
        for rank, member in enumerate(state.membership.members)
    )
    turn.enter(
        Phase.FORMING,
        awaiting=PersistentSet(member.worker for member in state.membership.members),
        members=PersistentList(
            member if member.told else replace(member, told=True) for member in state.membership.members
        ),
        peers=peers,
    )
    for rank, member in enumerate(state.membership.members):
        turn.call([member.worker], "form", group_for(turn.state, rank))
    turn.arm("call", settings.deadlines.call_deadline_s)


def on_group_formed(turn: Transition) -> None:
    """Choose the state to continue from, once all ranks reported theirs. Without any, replace every process."""
    state = turn.state
    tags: Mapping[int, StateTag] = state.answers
    heal = _choose_restore_plan(state, tags)
    if heal is None:
        turn.disarm()
        turn.enter(Phase.GATHERING)
        replace_workers(turn, range(len(state.membership.members)), kill=True)
        return
    if heal.source == "replica":
        turn.reached(heal.step)
    record_crash_loop(turn)
    heal = replace(heal, passing=turn.state.recovery.passing)
    turn.enter(Phase.HEALING, heal=heal)
    turn.call_all("heal", heal)
    turn.arm("call", state.settings.deadlines.call_deadline_s)


def _choose_restore_plan(state: DriverState, tags: Mapping[int, StateTag]) -> RestorePlan | None:
    """Choose the source of the state: the ranks' own, an in-memory checkpoint, the newest checkpoint, a fresh build.

    A fresh build is one that was never trained (step None); where only trained and torn states are left, there is
    none, and the answer is None. After a spike the ranks' own states are of no use.
    """
    agreement = None if state.recovery.spiked else agree_on_state(tags)
    kept_step = state.memory.kept.step if state.memory.kept else -1
    newest = max(kept_step, state.committed)
    if agreement is not None and agreement.step is not None and agreement.step >= newest:
        return RestorePlan(step=agreement.step, source="replica", moves=agreement.moves)
    if state.memory.kept is not None and kept_step > state.committed:
        return RestorePlan(step=kept_step, source="keeper", kept=state.memory.kept)
    if state.checkpoints.head is not None:
        return RestorePlan(step=state.checkpoints.head.step, source="checkpoint", checkpoint=state.checkpoints.head)
    fresh = agree_at_step(tags, None)
    return RestorePlan(step=0, source="initial", moves=fresh.moves) if fresh else None


def on_state_restored(turn: Transition) -> None:
    """Complete the rendezvous: every rank is at the same step."""
    state, heal = turn.state, turn.state.epoch.heal
    assert heal is not None, "there is no restore plan"
    tags: Mapping[int, StateTag] = state.answers
    reform = state.settings.world.reform
    assert all((tag.step or 0) == heal.step for tag in tags.values()), (
        f"ranks are at different steps, not at {heal.step}"
    )
    if state.trials is not None:
        plan_trials.begin_probe(turn)
        return
    workers, servers = state.settings.world.crew(len(state.membership.members))
    turn.emit(
        Formed(
            generation=state.epoch.generation.number,
            workers=workers,
            servers=servers,
            step=heal.step,
            source=heal.source,
            checkpoint=heal.checkpoint.path if heal.checkpoint else "",
            survivors=sum(not member.fresh for member in state.membership.members),
            seconds=turn.now_s - state.recovery.since_s,
            steps_lost=max(0, state.position.progress - heal.step, state.position.told - heal.step),
            nodes=ranks_by_node([member.node for member in state.membership.members]),
        )
    )
    turn.change(
        phase=Phase.READY,
        step=heal.step,
        progress=heal.step,
        members=PersistentList(
            _member_with_state(member, tags[rank], state.membership.plan, rank)
            for rank, member in enumerate(state.membership.members)
        ),
        writers=choose_writers(tags),
        keepers=()
        if state.memory.keep_off
        else choose_memory_copy_ranks(tags, [member.node for member in state.membership.members], reform),
        kept_s=turn.now_s if heal.source != "keeper" else state.memory.kept_s,
        layout=tags[0].layout,
        considered=-1,
        losses=losses_until(state, heal.step),
        evaluated=min(state.segment.evaluated, heal.step) if state.recovery.spiked else state.segment.evaluated,
        spiked=0,
        told=0,
    )


def _member_with_state(member: GroupMember, tag: StateTag, plan: Plan | None, rank: int) -> GroupMember:
    """A member that holds its part of the state."""
    part = plan.mesh.part_of(rank * plan.devices_per_worker) if plan else 0
    if not member.fresh and (member.pieces, member.part) == (tag.pieces, part):
        return member
    return replace(member, fresh=False, pieces=tag.pieces, part=part)


# --- Agreement --------------------------------------------------------------------------------------------------------


def agree_on_state(tags: Mapping[int, StateTag]) -> StateAgreement | None:
    """The highest step that sound pieces of one layout cover, and the moves that bring every rank there.

    Survivors may stand at k and k + 1; newcomers hold a state that was never trained (step None, below every other).
    A rank's own pieces are those of its tag where it has the agreed layout, otherwise the whole. A piece comes from
    the lowest rank that holds it.

    Args:
        tags: what each rank holds, by rank.

    Returns:
        None when no step is covered: the state must come from elsewhere.
    """
    standing = _sound_by_step(tags)
    steps = sorted(standing, key=lambda step: -1 if step is None else step, reverse=True)
    answers = (_agreement_of_ranks(tags, step, standing[step]) for step in steps)
    return next((answer for answer in answers if answer is not None), None)


def agree_at_step(tags: Mapping[int, StateTag], step: int | None) -> StateAgreement | None:
    """The agreement at one step, None when its sound pieces cover no layout. See `agree_on_state`.

    At step None only the senders keep what they hold: builds are not trusted to be equal.
    """
    return _agreement_of_ranks(tags, step, _sound_by_step(tags).get(step, []))


def _sound_by_step(tags: Mapping[int, StateTag]) -> dict[int | None, list[int]]:
    """The ranks whose state is sound, in order, by the step that they stand at."""
    found: dict[int | None, list[int]] = {}
    for rank in sorted(tags):
        if tags[rank].sound:
            found.setdefault(tags[rank].step, []).append(rank)
    return found


def _agreement_of_ranks(
    tags: Mapping[int, StateTag], step: int | None, standing: Iterable[int]
) -> StateAgreement | None:
    """The agreement at a step at which these ranks stand."""
    by_layout: dict[str, list[int]] = {}
    for rank in standing:
        by_layout.setdefault(tags[rank].layout, []).append(rank)
    for layout, there in by_layout.items():
        holders = _holders_of_pieces(there, tags)
        if len(holders) == tags[there[0]].total:
            settled = frozenset(holders.values() if step is None else there)
            return StateAgreement(step=step, moves=_moves_to_ranks(tags, settled, holders, layout))
    return None


def _holders_of_pieces(ranks: Iterable[int], tags: Mapping[int, StateTag]) -> dict[str, int]:
    """The lowest of the ranks that holds each piece, by piece."""
    holders: dict[str, int] = {}
    for rank in sorted(ranks):
        for piece in tags[rank].pieces:
            holders.setdefault(piece, rank)
    return holders


def choose_writers(tags: Mapping[int, StateTag]) -> tuple[int, ...]:
    """The ranks that write a checkpoint: the lowest that holds each piece. Rank 0 alone for replicas."""
    return tuple(sorted(set(_holders_of_pieces(tags, tags).values())))


def _moves_to_ranks(
    tags: Mapping[int, StateTag], settled: frozenset[int], holders: Mapping[str, int], layout: str
) -> tuple[StateTransfer, ...]:
    """A piece that a rank is to hold comes from the one that holds it; where its layout is another, all pieces do."""
    moves: list[StateTransfer] = []
    for rank in sorted(tags):
        if rank not in settled:
            tag = tags[rank]
            own = tag.pieces if tag.layout == layout else holders.keys()
            moves.extend(StateTransfer(source=holders[piece], target=rank, piece=piece) for piece in sorted(own))
    return tuple(moves)
