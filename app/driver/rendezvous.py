"""The rendezvous: ranks bind ports, form a group and agree on the step and its state. Trials of plans before the run.

Each plan on trial is timed in a rendezvous epoch of its own, on the same processes: all ranks take throwaway steps and
rebuild their engine afterwards. A plan that fails is set aside, and the fastest is chosen. The plan that would run
without trials comes first. The driver recovers from failures of its processes as it would later, and an error that all
plans raise is reported as the error of this plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace

from trainwright.core.errors import DeviceOutOfMemory, headline
from trainwright.core.events import Formed, Noted, Replanned
from trainwright.core.plan import Plan, ranks_by_node
from trainwright.core.topology import Address, Generation, Peer, Role, StateAgreement, StateTag, StateTransfer
from trainwright.driver import checkpointing, failure_policy, segments, step_traces
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import piece_holders
from trainwright.driver.driver_state import DriverState, GroupMember, Phase, Transition
from trainwright.driver.dynamic_members import form_group
from trainwright.driver.membership import (
    arrange_ranks,
    assign_ranks,
    replace_workers,
    restart_members,
    update_members,
)
from trainwright.driver.messages import PlanTrials, ProbeRequest, ReserveRequest, RestorePlan

PROBE_STEPS, PROBE_SECONDS = 8, 3.0  # of timed steps, at most; a step that takes longer is timed once


def start_epochs(transition: Transition, token: int) -> None:
    """Number the rendezvous epochs of a driver from 1 on."""
    transition.change(generation=Generation(token=token, number=0))


def begin_rendezvous(transition: Transition) -> None:
    """Start the next rendezvous epoch: every rank binds a port."""
    plan = _next_candidate(transition) or _plan_for_members(transition)
    state = transition.state
    generation = Generation(token=state.epoch.generation.token, number=state.epoch.generation.number + 1)
    if plan is not None and state.membership.plan is not None and plan.layout == state.membership.plan.layout:
        _keep_state_parts(transition, plan)
    arrange_ranks(transition, plan)
    transition.disarm()
    transition.enter(Phase.RESERVING, generation=generation)
    transition.await_workers(member.worker for member in transition.state.membership.members)
    wanted: dict[Role, ReserveRequest] = {}  # one for each role, so that it is pickled once
    for rank, member in enumerate(transition.state.membership.members):
        role = state.settings.world.role_of(rank)
        wanted.setdefault(role, ReserveRequest(generation=generation, plan=plan, role=role))
        transition.call([member.worker], "reserve", wanted[role])
    transition.arm("call", state.settings.deadlines.call_deadline_s)


def _plan_for_members(transition: Transition) -> Plan | None:
    """Return the plan for the present number of workers; report a change of layout or, after a replan, of batches."""
    layouts, count = transition.settings.world.layouts, len(transition.state.membership.members)
    if layouts is None:
        return None
    plan, former = (
        layouts.on(count, transition.settings.world.fewest),
        transition.state.membership.plan or layouts.plans[0],
    )
    assert plan is not None and plan.workers == count, "each member has a rank in the plan"
    smaller = plan.workers == former.workers and plan.accumulation > former.accumulation
    if plan.layout != former.layout or smaller:
        blame, why = transition.state.recovery.blame, layouts.lacking(plan.workers)
        if blame is not None and isinstance(blame.error, DeviceOutOfMemory):
            why = f"the device of rank {blame.event.rank} ran out of memory"
        transition.emit(Replanned(plan=asdict(plan), name=plan.name, former=former.name, workers=plan.workers, why=why))
    return plan


def _keep_state_parts(transition: Transition, plan: Plan) -> None:
    """Give each member a rank whose part of the state it holds, if there are more or fewer replicas than before.

    Members that hold a part of the state choose first. A member keeps its rank if it can.
    """
    parts = [plan.mesh.part_of(rank * plan.devices_per_worker) for rank in range(plan.workers)]
    places: dict[int, list[int]] = {}  # ranks, by part
    for rank, part in enumerate(parts):
        places.setdefault(part, []).append(rank)
    by_part, every = {part: iter(ranks) for part, ranks in places.items()}, iter(range(len(parts)))
    claims: tuple[Callable[[int, GroupMember], Iterable[int]], ...] = (
        lambda rank, member: [rank] if parts[rank] == member.part else [],
        lambda rank, member: by_part.get(member.part, ()),  # a rank that one member had to skip is taken
        lambda rank, member: [rank],
        lambda rank, member: every,
    )
    assigned: dict[int, GroupMember] = {}
    unassigned = dict(enumerate(transition.state.membership.members))
    for claim in claims:
        for rank, member in [*unassigned.items()]:
            free = next((other for other in claim(rank, member) if other not in assigned), None)
            if free is not None:
                assigned[free] = unassigned.pop(rank)
    members = tuple(assigned[rank] for rank in range(len(parts)))
    assign_ranks(transition, members)


def on_ports_reserved(transition: Transition) -> None:
    """Tell each rank its peers, once all ports are known."""
    members, role_of = transition.state.membership.members, transition.settings.world.role_of
    addresses: Mapping[int, Address] = transition.state.answers
    peers = tuple(
        Peer(rank=rank, address=addresses[rank], role=role_of(rank), node=member.node)
        for rank, member in enumerate(members)
    )
    transition.enter(Phase.FORMING)
    transition.await_workers(member.worker for member in members)
    update_members(transition, (member if member.told else replace(member, told=True) for member in members))
    form_group(transition, peers)
    transition.arm("call", transition.settings.deadlines.call_deadline_s)


def on_group_formed(transition: Transition) -> None:
    """Choose the state to continue from, once all ranks reported theirs. If there is none, replace every process."""
    state = transition.state
    tags: Mapping[int, StateTag] = state.answers
    restore_plan = _choose_restore_plan(state, tags)
    if restore_plan is None:
        transition.disarm()
        transition.enter(Phase.GATHERING)
        replace_workers(transition, range(len(state.membership.members)), kill=True)
        return
    if restore_plan.source == "replica":
        failure_policy.note_step(transition, restore_plan.step)
    failure_policy.record_crash_loop(transition)
    report = next((tag.report for tag in tags.values() if tag.report and tag.report.step == restore_plan.step), None)
    restore_plan = replace(restore_plan, passing=transition.state.recovery.passing, report=report)
    transition.enter(Phase.RESTORING, restore_plan=restore_plan)
    transition.call_all("restore", restore_plan)
    transition.arm("call", state.settings.deadlines.call_deadline_s)


def _choose_restore_plan(state: DriverState, tags: Mapping[int, StateTag]) -> RestorePlan | None:
    """Choose the source of the state: the ranks' own, an in-memory checkpoint, the newest checkpoint, a fresh build.

    A fresh build was never trained (step None). Return None if only torn states are left. After a loss spike, the
    ranks' own states are not used, nor are states after an evaluation that is missing.
    """
    agreement = None if state.recovery.spiked else agree_on_state(tags)
    if agreement is not None and (agreement.step or 0) > checkpointing.latest_usable_step(state):
        agreement = None
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


def on_state_restored(transition: Transition) -> None:
    """Complete the rendezvous: every rank is at the same step."""
    state, restore_plan, members = (
        transition.state,
        transition.state.epoch.restore_plan,
        transition.state.membership.members,
    )
    assert restore_plan is not None, "there is no restore plan"
    tags: Mapping[int, StateTag] = state.answers
    assert all((tag.step or 0) == restore_plan.step for tag in tags.values()), (
        f"ranks are at different steps, not at {restore_plan.step}"
    )
    if state.trials is not None:
        _begin_probe(transition)
        return
    workers, servers = state.settings.world.crew(len(members))
    transition.emit(
        Formed(
            generation=state.epoch.generation.number,
            workers=workers,
            servers=servers,
            step=restore_plan.step,
            source=restore_plan.source,
            checkpoint=restore_plan.checkpoint.path if restore_plan.checkpoint else "",
            survivors=sum(not member.fresh for member in members),
            seconds=transition.now_s - state.recovery.since_s,
            steps_lost=max(0, state.position.progress - restore_plan.step, state.position.told - restore_plan.step),
            nodes=ranks_by_node([member.node for member in members]),
        )
    )
    transition.enter(Phase.READY)
    plan = state.membership.plan
    update_members(
        transition, (_member_with_state(member, tags[rank], plan, rank) for rank, member in enumerate(members))
    )
    transition.stand_at(restore_plan.step)
    checkpointing.on_state_restored(transition, tags)
    segments.forget_evaluations_after(transition, restore_plan.step)
    failure_policy.on_state_restored(transition, restore_plan.step)
    step_traces.on_state_restored(transition, restore_plan.step)


def _member_with_state(member: GroupMember, tag: StateTag, plan: Plan | None, rank: int) -> GroupMember:
    """Return a member that holds its part of the state."""
    part = plan.mesh.part_of(rank * plan.devices_per_worker) if plan else 0
    if not member.fresh and (member.pieces, member.part) == (tag.pieces, part):
        return member
    return replace(member, fresh=False, pieces=tag.pieces, part=part)


# --- Agreement --------------------------------------------------------------------------------------------------------


def agree_on_state(tags: Mapping[int, StateTag]) -> StateAgreement | None:
    """Return the highest step that sound pieces of one layout cover, and the transfers that bring every rank there.

    Survivors may be at steps k and k + 1; new processes hold a state that was never trained (step None, below every
    other). A rank needs the pieces of its tag if it has the agreed layout, and all pieces otherwise. A piece comes from
    the lowest rank that holds it.

    Args:
        tags: what each rank holds, by rank.

    Returns:
        None if no step is covered: the state must come from elsewhere.
    """
    standing = _sound_by_step(tags)
    steps = sorted(standing, key=lambda step: -1 if step is None else step, reverse=True)
    answers = (_agreement_of_ranks(tags, step, standing[step]) for step in steps)
    return next((answer for answer in answers if answer is not None), None)


def agree_at_step(tags: Mapping[int, StateTag], step: int | None) -> StateAgreement | None:
    """Return the agreement at one step; None if its sound pieces cover no layout. See `agree_on_state`.

    At step None only the senders keep what they hold, because two builds may differ.
    """
    return _agreement_of_ranks(tags, step, _sound_by_step(tags).get(step, []))


def _sound_by_step(tags: Mapping[int, StateTag]) -> dict[int | None, list[int]]:
    """Return the ranks whose state is sound, in order, by step."""
    found: dict[int | None, list[int]] = {}
    for rank in sorted(tags):
        if tags[rank].sound:
            found.setdefault(tags[rank].step, []).append(rank)
    return found


def _agreement_of_ranks(
    tags: Mapping[int, StateTag], step: int | None, standing: Iterable[int]
) -> StateAgreement | None:
    """Return the agreement at a step, which these ranks have reached."""
    by_layout: dict[str, list[int]] = {}
    for rank in standing:
        by_layout.setdefault(tags[rank].layout, []).append(rank)
    for layout, there in by_layout.items():
        holders = piece_holders(tags, there)
        if len(holders) == tags[there[0]].total:
            settled = frozenset(holders.values() if step is None else there)
            return StateAgreement(step=step, moves=_moves_to_ranks(tags, settled, holders, layout))
    return None


def _moves_to_ranks(
    tags: Mapping[int, StateTag], settled: frozenset[int], holders: Mapping[str, int], layout: str
) -> tuple[StateTransfer, ...]:
    """Return the transfers of the pieces that each rank needs."""
    moves: list[StateTransfer] = []
    for rank in sorted(tags):
        if rank not in settled:
            tag = tags[rank]
            own = tag.pieces if tag.layout == layout else holders.keys()
            moves.extend(StateTransfer(source=holders[piece], target=rank, piece=piece) for piece in sorted(own))
    return tuple(moves)


# --- Trials of plans --------------------------------------------------------------------------------------------------


def begin_trials(transition: Transition, acquired: m.LeaseAcquired) -> None:
    """Try all plans, if there are several and the run has not begun yet."""
    layouts, begun = transition.settings.world.layouts, acquired.head or acquired.kept or acquired.living
    if layouts is not None and len(layouts.plans) > 1 and not begun:
        transition.change(trials=PlanTrials(left=tuple(range(len(layouts.plans)))))


def _next_candidate(transition: Transition) -> Plan | None:
    """Return the plan to try next, for the epoch that begins; None if there are not the workers for it."""
    trials, layouts = transition.state.trials, transition.settings.world.layouts
    if trials is None or layouts is None:
        return None
    plan = layouts.plans[trials.left[0]]
    if plan.workers != len(transition.state.membership.members):
        _end_trials(transition)
        return None
    transition.change(trials=replace(trials, trying=True, since_s=trials.since_s or transition.now_s))
    return plan


def _begin_probe(transition: Transition) -> None:
    """Have the steps of a plan timed, when all ranks are ready."""
    transition.enter(Phase.PROBING)
    transition.call_all("probe", ProbeRequest(steps=PROBE_STEPS, seconds=PROBE_SECONDS))
    transition.arm("hang", transition.state.hang_deadline_s)


def on_probe_returned(transition: Transition) -> None:
    """Note the time of a step under a plan, and try the next one."""
    trials = _current_trials(transition.state)
    step_s = {**trials.step_s, trials.left[0]: max(transition.state.answers.values())}
    trials = replace(trials, left=trials.left[1:], step_s=step_s, trying=False)
    transition.change(trials=trials if _is_worthwhile(transition, trials) else _cut_short(trials))
    transition.disarm()
    failure_policy.set_cause(transition, None)
    transition.enter(Phase.GATHERING)
    transition.call_all("leave")
    transition.arm("leave", transition.settings.deadlines.leave_deadline_s)


def _is_worthwhile(transition: Transition, trials: PlanTrials) -> bool:
    """Whether there is time for another plan, as long as the ones before; the chosen plan is formed once more."""
    share, tried = transition.settings.limits.probe_share, len(trials.step_s) + len(trials.aside)
    run_s = transition.settings.length.total_steps * min(trials.step_s.values())
    return share is None or (transition.now_s - trials.since_s) * (tried + 2) / tried <= share * run_s


def _cut_short(trials: PlanTrials) -> PlanTrials:
    """Set all other plans aside."""
    why = "forming groups takes too long beside the run for it to be measured"
    return replace(trials, left=(), aside={**trials.aside, **dict.fromkeys(trials.left, why)})


def is_optional_trial(state: DriverState) -> bool:
    """Whether the run can continue without the plan on trial."""
    return state.trials is not None and state.trials.trying and state.trials.left[0] > 0


def reject_plan(transition: Transition, error: Exception) -> None:
    """Set the plan on trial aside. Do nothing if it was already: other ranks raise as well, or lose their peers."""
    trials, layouts = _current_trials(transition.state), transition.settings.world.layouts
    if not trials.trying:
        return
    assert layouts is not None, "there are plans to try"
    place = trials.left[0]
    why = headline(error)
    aside, first = {**trials.aside, place: why}, trials.first or error
    transition.change(trials=replace(trials, left=trials.left[1:], aside=aside, first=first, trying=False))
    transition.emit(Noted(text=f"{layouts.plans[place].name} is set aside, since it failed when it was tried: {why}"))


def settle_trials(transition: Transition) -> bool:
    """Choose the fastest plan once all were tried. Return False if none works, which ends the run."""
    state = transition.state
    if is_optional_trial(state) and state.recovery.blame is not None:
        reject_plan(transition, state.recovery.blame.error)
    trials, layouts = transition.state.trials, transition.settings.world.layouts
    if trials is None or trials.left:
        return True
    assert layouts is not None, "there were plans to try"
    if not trials.step_s:
        leaner = None
        if isinstance(trials.first, DeviceOutOfMemory) and transition.settings.limits.replan_memory:
            leaner = layouts.leaner(min(layouts.plans, key=lambda plan: plan.memory_bytes))
        if leaner is None:
            transition.end_run("failed", trials.first)
            return False
        _end_trials(transition)
        transition.adjust_policy(layouts=leaner)
        return True
    chosen, event = layouts.measured(trials.step_s, trials.aside)
    _end_trials(transition)
    transition.adjust_policy(layouts=chosen)
    transition.emit(replace(event, seconds=transition.now_s - trials.since_s))
    return True


def _end_trials(transition: Transition) -> None:
    """End the trials; all ranks restart from the initial state."""
    transition.change(trials=None)
    restart_members(transition)


def _current_trials(state: DriverState) -> PlanTrials:
    assert state.trials is not None, "no plan is on trial"
    return state.trials
