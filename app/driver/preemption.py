"""Planned hand-overs: a worker that must go gives its rank to another process before it does. No step is lost.

On a preemption notice the ranks pause after the step under way, and a checkpoint is begun. Where those who stay hold
the whole state they go on at once with a spare, a new process or fewer; otherwise the checkpoint is waited for, as long
as the notice allows, since all will begin from it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from trainwright.core.events import Leaving
from trainwright.driver import dynamic_members
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import abandon, snapshot
from trainwright.driver.membership import dismiss, place, replenish, spare_for
from trainwright.driver.state import Blame, Phase, State
from trainwright.driver.transition import Turn

_MARGIN = 0.2  # of the time of a notice, for those who go to be gone by then


def leaves_the_state(state: State, worker: int) -> bool:
    """Whether the others hold the whole state without this member, those who must go left out."""
    return worker not in state.leaving and _is_safe(replace(state, leaving={**state.leaving, worker: math.inf}))


def is_old_news(state: State, event: m.Noticed) -> bool:
    """Whether a notice is known, or concerns nobody any more."""
    known = event.worker in state.rank_of or event.worker in state.spares
    return not known or event.worker in state.leaving or state.phase is Phase.CLOSING


def noticed(turn: Turn, event: m.Noticed) -> None:
    """A process will be ended soon. A spare is let go of at once, a rank is handed over (see `step_aside`)."""
    state = turn.state
    if event.worker in state.spares:
        node = state.spares[event.worker].node
        turn.emit(Leaving(worker=event.worker, node=node, why="preemption notice", left_s=event.left_s))
        turn.want(m.Shun(worker=event.worker))
        turn.want(m.Kill(worker=event.worker))
        turn.change(spares=state.spares.without({event.worker}))
        if state.phase is Phase.RUNNING:
            replenish(turn)
    elif dynamic_members.tolerates(state, event.worker):
        dynamic_members.depart(turn, event)
    else:
        leave(turn, event.worker, "preemption notice", event.left_s)


def leave(turn: Turn, worker: int, why: str, left_s: float = math.inf) -> None:
    """Have a member hand its rank over, within a time or at leisure."""
    state = turn.state
    rank = state.rank_of[worker]
    turn.change(leaving={**state.leaving, worker: turn.now_s + left_s})
    turn.want(m.Shun(worker=worker))
    told_s = left_s if math.isfinite(left_s) else 0.0
    turn.emit(Leaving(worker=worker, rank=rank, node=state.members[rank].node, why=why, left_s=told_s))
    arm(turn)


def was_expected(state: State, blame: Blame) -> bool:
    """Whether a failure is no more than the end of a process that was to end, as itself or its peers tell of it."""
    return blame.event.worker in state.leaving or (blame.peer and bool(goers(state)))


def goers(state: State) -> frozenset[int]:
    """The members that must go."""
    return frozenset(worker for worker in state.leaving if worker in state.rank_of)


def may_go(state: State, now_s: float) -> bool:
    """While steps run: whether they are to pause for a hand-over."""
    return bool(goers(state)) and not state.ending and not (_awaits_upload(state) and not _short(state, now_s))


def arm(turn: Turn) -> None:
    """While steps run, or an upload is waited for: see to it that the hand-over comes in time."""
    by_s = _by_s(turn.state)
    if turn.state.phase in (Phase.RUNNING, Phase.WAITING) and math.isfinite(by_s):
        turn.arm("notice", max(0.0, by_s - turn.now_s))


def time_is_short(turn: Turn) -> None:
    """No upload is waited for any longer. While steps run, the next look at `may_go` pauses them."""
    if turn.state.phase is Phase.WAITING and not turn.state.ending:
        turn.change(considered=turn.state.step)  # the writers of this one are busy still, and there is no time
        abandon(turn, "there was no more time for it before a worker had to go")


def step_aside(turn: Turn) -> bool:
    """All ranks stand idle: whether something was begun for those who must go, a checkpoint or the hand-over."""
    turn.disarm("notice")
    state = turn.state
    if not goers(state) or state.ending:
        return False
    if _wants_checkpoint(state, turn.now_s):
        if _is_safe(state):
            turn.change(writers=_writers(state))
        snapshot(turn, "upload")
        return True
    if not _short(state, turn.now_s):
        if state.upload is not None and state.upload.step == state.step and _awaits_upload(state):
            turn.enter(Phase.WAITING)
            arm(turn)
            return True
        if _awaits_upload(state) or not (_is_safe(state) or state.committed >= state.step):
            return False  # an older upload must end first, or this one failed: steps go on until the next one
    regroup(turn, goers(turn.state))
    return True


def _wants_checkpoint(state: State, now_s: float) -> bool:
    """Once for a step, and where it can help: those who go at leisure leave a state that is safe."""
    if state.upload is not None or state.committed >= state.step or state.considered == state.step:
        return False
    return not _is_safe(state) or (math.isfinite(_by_s(state)) and not _short(state, now_s))


def regroup(turn: Turn, going: frozenset[int] = frozenset()) -> None:
    """All who take part stand idle: they let go of their group, and some that go have others in their stead."""
    turn.disarm()
    turn.enter(Phase.GATHERING, since_s=turn.now_s, blame=None)
    dynamic_members.fold(turn)
    state = turn.state
    if state.settings.reform == "new_process":
        place(turn, range(len(state.members)), kill=True)
    else:
        busy = state.awaiting - going
        here = [member.worker for member in state.members if member.worker not in state.starting]
        staying = [worker for worker in here if worker not in going | busy]
        turn.change(awaiting=busy | frozenset(staying))
        turn.call(sorted(busy), "interrupt", False)
        turn.call(staying, "leave")
        if turn.state.awaiting:
            turn.arm("leave", state.settings.leave_deadline_s)
        _refill(turn, going)
    left = turn.state.rank_of
    turn.change(leaving={worker: by_s for worker, by_s in state.leaving.items() if worker in left})


def _refill(turn: Turn, going: frozenset[int]) -> None:
    """A spare for each, as far as there are some; then fewer where the world may shrink, or new processes."""
    for worker in sorted(going):
        rank = turn.state.rank_of[worker]
        if spare_for(turn.state, turn.state.members[rank].node) is not None:
            place(turn, [rank], kill=True)
    rest = going & turn.state.rank_of.keys()
    left = len(turn.state.members) - len(rest)
    needed = any(turn.settings.role_of(turn.state.rank_of[worker]) != "worker" for worker in rest)
    if rest and not needed and left >= turn.settings.fewest and turn.state.seats(left):
        dismiss(turn, rest, "told to leave")
    elif rest:
        place(turn, sorted(turn.state.rank_of[worker] for worker in rest), kill=True)


def _is_safe(state: State) -> bool:
    """Whether those who stay hold the whole state, and keep it."""
    going = goers(state)
    whole = frozenset().union(*(member.pieces for member in state.members))
    stay = [member.pieces for member in state.members if member.worker not in going]
    if state.settings.reform != "in_place" or not stay or state.loses_state(len(stay)):
        return False
    return whole == frozenset().union(*stay)


def _writers(state: State) -> tuple[int, ...]:
    """Ranks that together hold each piece once, of those who stay."""
    going = goers(state)
    holders: dict[str, int] = {}
    for rank, member in enumerate(state.members):
        if member.worker not in going:
            for piece in member.pieces:
                holders.setdefault(piece, rank)
    return tuple(sorted(set(holders.values())))


def _awaits_upload(state: State) -> bool:
    """Whether an upload is worth waiting for: one that those who go still owe, or from which all will begin."""
    upload = state.upload
    return upload is not None and (not _is_safe(state) or bool(upload.owing & goers(state)))


def _by_s(state: State) -> float:
    """When the hand-over must come at the latest, for those who go to be gone in time."""
    soonest_s = min((state.leaving[worker] for worker in goers(state)), default=math.inf)
    return soonest_s - _MARGIN * state.settings.preemption_s


def _short(state: State, now_s: float) -> bool:
    return now_s >= _by_s(state)
