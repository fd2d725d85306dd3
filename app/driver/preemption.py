"""Preemption: a worker with a notice hands its rank over to another process before it ends. No step is lost.

After a notice, the ranks pause after the current step and a checkpoint starts. If the remaining workers hold the whole
state, they continue at once with a standby, a new process or fewer workers. Otherwise the driver waits for the
checkpoint as long as the notice allows, because all ranks will restart from it.

Stragglers are replaced in the same way. Each rank reports the median time of its own part of a step (reading its batch,
forward, backward) when the ranks are idle; clocks of different nodes are never compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median_low

from trainwright.core.events import Leaving, Straggling
from trainwright.driver import dynamic_members
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import abandon_upload, take_snapshot
from trainwright.driver.driver_state import DriverState, FailureCause, Phase, Transition
from trainwright.driver.membership import choose_standby, remove_members, replace_workers, start_standbys

_MARGIN = 0.2  # of the time of a notice, for those who go to be gone by then


def _can_lose_worker(state: DriverState, worker: int) -> bool:
    """Whether the others hold the whole state without this member, those who must go left out."""
    return worker not in state.handover.leaving and _others_hold_state(
        state.with_fields(leaving={**state.handover.leaving, worker: math.inf})
    )


def is_stale_notice(state: DriverState, event: m.PreemptionNoticed) -> bool:
    """Whether a notice is known, or concerns nobody any more."""
    known = event.worker in state.membership.rank_of or event.worker in state.membership.spares
    return not known or event.worker in state.handover.leaving or state.phase is Phase.CLOSING


def on_preemption_notice(turn: Transition, event: m.PreemptionNoticed) -> None:
    """A process will be ended soon. A spare is let go of at once, a rank is handed over (see `begin_handover`)."""
    state = turn.state
    if event.worker in state.membership.spares:
        node = state.membership.spares[event.worker].node
        turn.emit(Leaving(worker=event.worker, node=node, why="preemption notice", left_s=event.left_s))
        turn.want(m.ExcludeNode(worker=event.worker))
        turn.want(m.KillWorker(worker=event.worker))
        turn.change(spares=state.membership.spares.without({event.worker}))
        if state.phase is Phase.RUNNING:
            start_standbys(turn)
    elif dynamic_members.is_dynamic(state, event.worker):
        dynamic_members.on_member_preempted(turn, event)
    else:
        _request_handover(turn, event.worker, "preemption notice", event.left_s)


def _request_handover(turn: Transition, worker: int, why: str, left_s: float = math.inf) -> None:
    """Have a member hand its rank over, within a time or at leisure."""
    state = turn.state
    rank = state.membership.rank_of[worker]
    turn.change(leaving={**state.handover.leaving, worker: turn.now_s + left_s})
    turn.want(m.ExcludeNode(worker=worker))
    told_s = left_s if math.isfinite(left_s) else 0.0
    turn.emit(Leaving(worker=worker, rank=rank, node=state.membership.members[rank].node, why=why, left_s=told_s))
    arm_handover_timer(turn)


def is_expected_failure(state: DriverState, blame: FailureCause) -> bool:
    """Whether a failure is no more than the end of a process that was to end, as itself or its peers tell of it."""
    return blame.event.worker in state.handover.leaving or (blame.peer and bool(leaving_members(state)))


def leaving_members(state: DriverState) -> frozenset[int]:
    """The members that must go."""
    return frozenset(worker for worker in state.handover.leaving if worker in state.membership.rank_of)


def wants_handover(state: DriverState, now_s: float) -> bool:
    """While steps run: whether they are to pause for a hand-over."""
    return (
        bool(leaving_members(state))
        and not state.ending
        and not (_awaits_upload(state) and not _is_overdue(state, now_s))
    )


def arm_handover_timer(turn: Transition) -> None:
    """While steps run, or an upload is waited for: see to it that the hand-over comes in time."""
    by_s = _handover_deadline_s(turn.state)
    if turn.state.phase in (Phase.RUNNING, Phase.WAITING) and math.isfinite(by_s):
        turn.arm("notice", max(0.0, by_s - turn.now_s))


def on_handover_deadline(turn: Transition) -> None:
    """No upload is waited for any longer. While steps run, the next look at `wants_handover` pauses them."""
    if turn.state.phase is Phase.WAITING and not turn.state.ending:
        turn.change(considered=turn.state.position.step)  # the writers of this one are busy still, and there is no time
        abandon_upload(turn, "there was no more time for it before a worker had to go")


def begin_handover(turn: Transition) -> bool:
    """All ranks stand idle: whether something was begun for those who must go, a checkpoint or the hand-over."""
    turn.disarm("notice")
    state = turn.state
    if not leaving_members(state) or state.ending:
        return False
    if _wants_checkpoint(state, turn.now_s):
        if _others_hold_state(state):
            turn.change(writers=_staying_writers(state))
        take_snapshot(turn, "upload")
        return True
    if not _is_overdue(state, turn.now_s):
        if (
            state.checkpoints.upload is not None
            and state.checkpoints.upload.step == state.position.step
            and _awaits_upload(state)
        ):
            turn.enter(Phase.WAITING)
            arm_handover_timer(turn)
            return True
        if _awaits_upload(state) or not (_others_hold_state(state) or state.committed >= state.position.step):
            return False  # an older upload must end first, or this one failed: steps go on until the next one
    begin_regroup(turn, leaving_members(turn.state))
    return True


def _wants_checkpoint(state: DriverState, now_s: float) -> bool:
    """Once for a step, and where it can help: those who go at leisure leave a state that is safe."""
    if (
        state.checkpoints.upload is not None
        or state.committed >= state.position.step
        or state.checkpoints.considered == state.position.step
    ):
        return False
    return not _others_hold_state(state) or (
        math.isfinite(_handover_deadline_s(state)) and not _is_overdue(state, now_s)
    )


def begin_regroup(turn: Transition, going: frozenset[int] = frozenset()) -> None:
    """Release the group of idle ranks, and replace the workers that leave."""
    turn.disarm()
    turn.enter(Phase.GATHERING, since_s=turn.now_s, blame=None)
    dynamic_members.reabsorb_members(turn)
    state = turn.state
    if state.settings.world.reform == "new_process":
        replace_workers(turn, range(len(state.membership.members)), kill=True)
    else:
        busy = state.awaiting - going
        here = [member.worker for member in state.membership.members if member.worker not in state.membership.starting]
        staying = [worker for worker in here if worker not in going | busy]
        turn.change(awaiting=busy | frozenset(staying))
        turn.call(sorted(busy), "interrupt", False)
        turn.call(staying, "leave")
        if turn.state.awaiting:
            turn.arm("leave", state.settings.deadlines.leave_deadline_s)
        _refill(turn, going)
    left = turn.state.membership.rank_of
    turn.change(leaving={worker: by_s for worker, by_s in state.handover.leaving.items() if worker in left})


def _refill(turn: Transition, going: frozenset[int]) -> None:
    """A spare for each, as far as there are some; then fewer where the world may shrink, or new processes."""
    for worker in sorted(going):
        rank = turn.state.membership.rank_of[worker]
        if choose_standby(turn.state, turn.state.membership.members[rank].node) is not None:
            replace_workers(turn, [rank], kill=True)
    rest = going & turn.state.membership.rank_of.keys()
    left = len(turn.state.membership.members) - len(rest)
    needed = any(turn.settings.world.role_of(turn.state.membership.rank_of[worker]) != "worker" for worker in rest)
    if rest and not needed and left >= turn.settings.world.fewest and turn.state.seats(left):
        remove_members(turn, rest, "told to leave")
    elif rest:
        replace_workers(turn, sorted(turn.state.membership.rank_of[worker] for worker in rest), kill=True)


def _others_hold_state(state: DriverState) -> bool:
    """Whether those who stay hold the whole state, and keep it."""
    going = leaving_members(state)
    whole = frozenset().union(*(member.pieces for member in state.membership.members))
    stay = [member.pieces for member in state.membership.members if member.worker not in going]
    if state.settings.world.reform != "in_place" or not stay or state.loses_state(len(stay)):
        return False
    return whole == frozenset().union(*stay)


def _staying_writers(state: DriverState) -> tuple[int, ...]:
    """Ranks that together hold each piece once, of those who stay."""
    going = leaving_members(state)
    holders: dict[str, int] = {}
    for rank, member in enumerate(state.membership.members):
        if member.worker not in going:
            for piece in member.pieces:
                holders.setdefault(piece, rank)
    return tuple(sorted(set(holders.values())))


def _awaits_upload(state: DriverState) -> bool:
    """Whether an upload is worth waiting for: one that those who go still owe, or from which all will begin."""
    upload = state.checkpoints.upload
    return upload is not None and (not _others_hold_state(state) or bool(upload.owing & leaving_members(state)))


def _handover_deadline_s(state: DriverState) -> float:
    """When the hand-over must come at the latest, for those who go to be gone in time."""
    soonest_s = min((state.handover.leaving[worker] for worker in leaving_members(state)), default=math.inf)
    return soonest_s - _MARGIN * state.settings.deadlines.preemption_s


def _is_overdue(state: DriverState, now_s: float) -> bool:
    return now_s >= _handover_deadline_s(state)


# --- Stragglers -------------------------------------------------------------------------------------------------------


_COMPARE_EVERY_S = 60.0  # between pauses to compare, where nothing else pauses the ranks
_MIN_STEPS_BETWEEN = 20  # in a rank's median, and at least between two comparisons
_SLOW_IN_A_ROW = 2  # comparisons in a row that find the same rank slow
_SLOW_RATIO = 1.5  # to the median of all ranks
_MIN_EXCESS_S = 0.005  # beyond the median: a difference worth a word
_REPLACE_EVERY_S = 3600.0  # before another worker of the same node is replaced


def seconds_until_comparison(state: DriverState, now_s: float) -> float | None:
    """Seconds until steps that run are to pause for a comparison; None for never."""
    if len(state.membership.members) < 2 or state.settings.world.topology == "independent":
        return None
    return max(0.0, _COMPARE_EVERY_S - (now_s - state.phase_s))


def is_comparison_due(state: DriverState, now_s: float) -> bool:
    """Whether that time has come, by a timer that need not be exact."""
    after_s = seconds_until_comparison(state, now_s)
    return after_s is not None and after_s < _COMPARE_EVERY_S / 100


def compare_ranks(turn: Transition, own_s: Mapping[int, float | None]) -> None:
    """All ranks stand idle: look who was slow. `own_s`: each rank's median part of a step, where it knows one."""
    state = turn.state
    known = {rank: seconds for rank, seconds in own_s.items() if seconds is not None}
    if (
        len(known) < max(2, len(state.membership.members))
        or 0 <= state.position.step - state.handover.compared < _MIN_STEPS_BETWEEN
    ):
        return
    usual_s = median_low(known.values())
    slow = {
        state.membership.members[rank].worker: seconds
        for rank, seconds in known.items()
        if seconds > _SLOW_RATIO * usual_s and seconds - usual_s > _MIN_EXCESS_S
    }
    turn.change(compared=state.position.step, slow={worker: state.handover.slow.get(worker, 0) + 1 for worker in slow})
    for worker, seconds in slow.items():
        if turn.state.handover.slow[worker] >= _SLOW_IN_A_ROW:
            _on_slow_rank(turn, worker, seconds, usual_s)


def _on_slow_rank(turn: Transition, worker: int, own_s: float, usual_s: float) -> None:
    """Name it once; replace it, at most one worker of a node within an hour."""
    state = turn.state
    rank = state.membership.rank_of[worker]
    node, ratio = state.membership.members[rank].node, own_s / max(usual_s, 1e-9)
    if worker not in state.handover.named_slow:
        turn.change(named_slow=state.handover.named_slow | {worker})
        turn.emit(Straggling(worker=worker, rank=rank, node=node, ratio=ratio, own_s=own_s, usual_s=usual_s))
    least = state.settings.limits.replace_stragglers
    rested = turn.now_s - state.handover.relieved.get(node, -_REPLACE_EVERY_S) >= _REPLACE_EVERY_S
    if least is not None and ratio >= least and rested and _can_lose_worker(state, worker):
        turn.change(relieved={**state.handover.relieved, node: turn.now_s})
        _request_handover(turn, worker, f"its steps took {ratio:.1f} times as long as those of the others")
