"""Preemption: a worker with a notice hands its rank over to another process before it ends. No step is lost.

After a notice, the ranks pause after the current step and a checkpoint starts. If the remaining workers hold the whole
state, they continue at once with a standby, a new process or fewer workers. Otherwise the driver waits for the
checkpoint as long as the notice and the deadline of uploads allow, because all ranks will restart from it.

Stragglers are replaced in the same way. Each rank reports the median time of its own part of a step (reading its batch,
forward, backward) when the ranks are idle; clocks of different nodes are never compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median_low

from trainwright.core.events import Leaving, Straggling
from trainwright.driver import dynamic_members, failure_policy
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import await_upload, choose_writers, take_snapshot
from trainwright.driver.driver_state import DriverState, FailureCause, Phase, Transition
from trainwright.driver.membership import (
    choose_standby,
    drop_workers,
    remove_members,
    replace_workers,
    start_standbys,
)

_MARGIN = 0.2  # of the time of a notice: the worker must be gone by then


def on_preemption_notice(transition: Transition, event: m.PreemptionNoticed) -> None:
    """End a standby at once, replace a dynamic member at once, and have any other member hand its rank over.

    Of several notices for a worker, only those of an earlier end count.
    """
    state, worker = transition.state, event.worker
    if worker in state.handover.leaving and transition.now_s + event.left_s >= state.handover.leaving[worker]:
        return
    standby = worker in state.membership.spares
    if not standby and not dynamic_members.is_dynamic(state, worker):
        _request_handover(transition, worker, event.why, event.left_s)
        return
    _announce_leaving(transition, worker, event.why, event.left_s)
    if not standby:
        dynamic_members.replace_member(transition, worker)
        return
    transition.want(m.KillWorker(worker=worker))
    drop_workers(transition, {worker})
    if state.phase is Phase.RUNNING:
        start_standbys(transition)


def replace_preempted(transition: Transition) -> None:
    """Replace workers with a notice that have become dynamic members meanwhile."""
    for worker in sorted(transition.state.handover.leaving):
        if dynamic_members.is_dynamic(transition.state, worker):
            transition.change(
                leaving={other: by_s for other, by_s in transition.state.handover.leaving.items() if other != worker}
            )
            dynamic_members.replace_member(transition, worker)


def _request_handover(transition: Transition, worker: int, why: str, left_s: float = math.inf) -> None:
    """Have a member hand its rank over within `left_s`; without a limit, when it suits."""
    transition.change(leaving={**transition.state.handover.leaving, worker: transition.now_s + left_s})
    _announce_leaving(transition, worker, why, left_s)
    arm_handover_timer(transition)


def _announce_leaving(transition: Transition, worker: int, why: str, left_s: float) -> None:
    """Report that a worker leaves, and place no more workers on its node."""
    membership = transition.state.membership
    rank = membership.rank_of.get(worker, -1)
    node = membership.members[rank].node if rank >= 0 else membership.spares[worker].node
    transition.want(m.ExcludeNode(worker=worker))
    left_s = left_s if math.isfinite(left_s) else 0.0
    transition.emit(Leaving(worker=worker, rank=rank, node=node, why=why, left_s=left_s))


def is_expected_failure(state: DriverState, blame: FailureCause) -> bool:
    """Whether a failure is only the end of a worker that leaves, reported by itself or by its peers."""
    return blame.event.worker in state.handover.leaving or (blame.peer and bool(leaving_members(state)))


def leaving_members(state: DriverState) -> frozenset[int]:
    """Return the members that must leave."""
    return frozenset(worker for worker in state.handover.leaving if worker in state.membership.rank_of)


def wants_handover(state: DriverState, now_s: float) -> bool:
    """Whether steps under way are to pause for a handover."""
    return (
        bool(leaving_members(state))
        and not state.ending
        and not (_awaits_upload(state) and not _is_overdue(state, now_s))
    )


def arm_handover_timer(transition: Transition) -> None:
    """Set a timer for the handover, while steps run or an upload is awaited."""
    by_s = _handover_deadline_s(transition.state)
    if transition.state.phase in (Phase.RUNNING, Phase.WAITING) and math.isfinite(by_s):
        transition.arm("notice", max(0.0, by_s - transition.now_s))


def on_handover_deadline(transition: Transition) -> None:
    """Wait for an upload no longer; workers that stay go on with it. While steps run, `wants_handover` pauses them.

    The answer to a commit is always waited for.
    """
    state, upload = transition.state, transition.state.checkpoints.upload
    if state.phase is Phase.WAITING and not state.ending and upload is not None and not upload.committing:
        transition.disarm("upload")
        transition.enter(Phase.READY)


def begin_handover(transition: Transition) -> bool:
    """Start a checkpoint or the handover for workers that must leave. Return whether something was started."""
    transition.disarm("notice")
    state, going = transition.state, leaving_members(transition.state)
    if not going or state.ending:
        return False
    upload, step, held = state.checkpoints.upload, state.position.step, _others_hold_state(state)
    if _wants_checkpoint(state, transition.now_s):
        staying = {rank: member for rank, member in enumerate(state.membership.members) if member.worker not in going}
        take_snapshot(transition, "upload", writers=choose_writers(staying) if held else None)
        return True
    if not _is_overdue(state, transition.now_s):
        if upload is not None and upload.step == step and _awaits_upload(state):
            await_upload(transition)
            arm_handover_timer(transition)
            return True
        if _awaits_upload(state) or not (held or state.committed >= step):
            return False  # an older upload must end first, or this one failed: steps go on until the next one
    begin_regroup(transition, going)
    return True


def _wants_checkpoint(state: DriverState, now_s: float) -> bool:
    """Whether to take a checkpoint before the handover, once for a step."""
    checkpoints, step = state.checkpoints, state.position.step
    if checkpoints.upload is not None or state.committed >= step or checkpoints.considered == step:
        return False
    # Workers without a deadline leave a state that is safe.
    in_time = math.isfinite(_handover_deadline_s(state)) and not _is_overdue(state, now_s)
    return not _others_hold_state(state) or in_time


def begin_regroup(transition: Transition, going: frozenset[int] = frozenset()) -> None:
    """Release the group of idle ranks, and replace the workers that leave."""
    transition.disarm()
    failure_policy.start_recovery(transition)
    failure_policy.set_cause(transition, None)
    transition.enter(Phase.GATHERING)
    dynamic_members.reabsorb_members(transition)
    state = transition.state
    if state.settings.world.reform == "new_process":
        replace_workers(transition, range(len(state.membership.members)), kill=True)
    else:
        busy = state.awaiting - going
        here = [member.worker for member in state.membership.members if member.worker not in state.membership.starting]
        staying = [worker for worker in here if worker not in going | busy]
        transition.await_workers(busy | frozenset(staying))
        transition.call(sorted(busy), "interrupt", False)
        transition.call(staying, "leave")
        if transition.state.awaiting:
            transition.arm("leave", state.settings.deadlines.leave_deadline_s)
        _refill(transition, going)
    left = transition.state.membership.rank_of
    transition.change(leaving={worker: by_s for worker, by_s in state.handover.leaving.items() if worker in left})


def _refill(transition: Transition, going: frozenset[int]) -> None:
    """Give ranks to standbys; then continue with fewer workers if the run may shrink, or start new processes."""
    for worker in sorted(going):
        rank = transition.state.membership.rank_of[worker]
        if choose_standby(transition.state, transition.state.membership.members[rank].node) is not None:
            replace_workers(transition, [rank], kill=True)
    rest = going & transition.state.membership.rank_of.keys()
    left = len(transition.state.membership.members) - len(rest)
    needed = any(
        transition.settings.world.role_of(transition.state.membership.rank_of[worker]) != "worker" for worker in rest
    )
    if rest and not needed and left >= transition.settings.world.fewest and transition.state.usable_workers(left):
        remove_members(transition, rest, "told to leave")
    elif rest:
        replace_workers(transition, sorted(transition.state.membership.rank_of[worker] for worker in rest), kill=True)


def _others_hold_state(state: DriverState) -> bool:
    """Whether the members that stay hold the whole state, and keep it."""
    going = leaving_members(state)
    whole = frozenset().union(*(member.pieces for member in state.membership.members))
    stay = [member.pieces for member in state.membership.members if member.worker not in going]
    if state.settings.world.reform != "in_place" or not stay or state.loses_state(len(stay)):
        return False
    return whole == frozenset().union(*stay)


def _awaits_upload(state: DriverState) -> bool:
    """Whether the handover waits for an upload: leaving workers owe files of it, or all ranks will restart from it."""
    upload = state.checkpoints.upload
    return upload is not None and (not _others_hold_state(state) or bool(upload.owing & leaving_members(state)))


def _handover_deadline_s(state: DriverState) -> float:
    """Return when the handover must come at the latest."""
    soonest_s = min((state.handover.leaving[worker] for worker in leaving_members(state)), default=math.inf)
    return soonest_s - _MARGIN * state.settings.deadlines.preemption_s


def _is_overdue(state: DriverState, now_s: float) -> bool:
    return now_s >= _handover_deadline_s(state) - failure_policy.TIMER_TOLERANCE_S


# --- Stragglers -------------------------------------------------------------------------------------------------------


_COMPARE_EVERY_S = 60.0  # between pauses to compare, if nothing else pauses the ranks
_MIN_STEPS_BETWEEN = 20  # steps between two comparisons, at least
_SLOW_IN_A_ROW = 2  # comparisons in a row that find the same rank slow
_SLOW_RATIO = 1.5  # to the median of all ranks
_MIN_EXCESS_S = 0.005  # beyond the median
_REPLACE_EVERY_S = 3600.0  # before another worker of the same node is replaced


def seconds_until_comparison(state: DriverState, now_s: float) -> float | None:
    """Return the seconds until steps under way are to pause for a comparison; None for never."""
    if len(state.membership.members) < 2 or state.settings.world.topology == "independent":
        return None
    return max(0.0, _COMPARE_EVERY_S - (now_s - state.phase_s))


def is_comparison_due(state: DriverState, now_s: float) -> bool:
    """Whether it is time for a comparison, by a timer that need not be exact."""
    after_s = seconds_until_comparison(state, now_s)
    return after_s is not None and after_s < _COMPARE_EVERY_S / 100


def compare_ranks(transition: Transition, own_s: Mapping[int, float | None]) -> None:
    """Look for slow ranks while all are idle. `own_s`: median seconds of each rank's own part of a step, if known."""
    members, handover, step = (
        transition.state.membership.members,
        transition.state.handover,
        transition.state.position.step,
    )
    known = {rank: seconds for rank, seconds in own_s.items() if seconds is not None}
    if len(known) < max(2, len(members)) or 0 <= step - handover.compared < _MIN_STEPS_BETWEEN:
        return
    usual_s = median_low(known.values())
    slow = {
        members[rank].worker: seconds
        for rank, seconds in known.items()
        if seconds > _SLOW_RATIO * usual_s and seconds - usual_s > _MIN_EXCESS_S
    }
    transition.change(compared=step, slow={worker: handover.slow.get(worker, 0) + 1 for worker in slow})
    for worker, seconds in slow.items():
        if transition.state.handover.slow[worker] >= _SLOW_IN_A_ROW:
            _on_slow_rank(transition, worker, seconds, usual_s)


def _on_slow_rank(transition: Transition, worker: int, own_s: float, usual_s: float) -> None:
    """Report a slow rank once; replace it, at most one worker of a node within an hour."""
    state = transition.state
    rank = state.membership.rank_of[worker]
    node, ratio = state.membership.members[rank].node, own_s / max(usual_s, 1e-9)
    if worker not in state.handover.named_slow:
        transition.change(named_slow=state.handover.named_slow | {worker})
        transition.emit(Straggling(worker=worker, rank=rank, node=node, ratio=ratio, own_s=own_s, usual_s=usual_s))
    least = state.settings.limits.replace_stragglers
    rested = transition.now_s - state.handover.relieved.get(node, -_REPLACE_EVERY_S) >= _REPLACE_EVERY_S
    if least is not None and ratio >= least and rested and _can_lose_worker(state, worker):
        transition.change(relieved={**state.handover.relieved, node: transition.now_s})
        _request_handover(transition, worker, f"its steps took {ratio:.1f} times as long as those of the others")


def _can_lose_worker(state: DriverState, worker: int) -> bool:
    """Whether the others hold the whole state without this member and those that leave."""
    return worker not in state.handover.leaving and _others_hold_state(
        state.with_fields(leaving={**state.handover.leaving, worker: math.inf})
    )
