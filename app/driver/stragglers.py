"""Ranks that take longer than the others over their own part of a step: named, and replaced where the job says so.

A rank's part is what it does before it waits for others: reading its batch, forward, backward. Each reports the median
over its last steps whenever the ranks stand idle; clocks of different nodes are never compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_low

from trainwright.core.events import Straggling
from trainwright.driver.preemption import leave, leaves_the_state
from trainwright.driver.state import State
from trainwright.driver.transition import Turn

LOOK_S = 60.0  # between pauses to compare, where nothing else pauses the ranks
STEPS = 20  # in a rank's median, and at least between two comparisons
AGAIN = 2  # comparisons in a row that find the same rank slow
RATIO = 1.5  # to the median of all ranks
LEAST_S = 0.005  # beyond the median: a difference worth a word
HOUR_S = 3600.0  # before another worker of the same node is replaced


def look_after_s(state: State, now_s: float) -> float | None:
    """Seconds until steps that run are to pause for a comparison; None for never."""
    if len(state.members) < 2 or state.settings.topology == "independent":
        return None
    return max(0.0, LOOK_S - (now_s - state.phase_s))


def look_is_due(state: State, now_s: float) -> bool:
    """Whether that time has come, by a timer that need not be exact."""
    after_s = look_after_s(state, now_s)
    return after_s is not None and after_s < LOOK_S / 100


def compare(turn: Turn, own_s: Mapping[int, float | None]) -> None:
    """All ranks stand idle: look who was slow. `own_s`: each rank's median part of a step, where it knows one."""
    state = turn.state
    known = {rank: seconds for rank, seconds in own_s.items() if seconds is not None}
    if len(known) < max(2, len(state.members)) or 0 <= state.step - state.compared < STEPS:
        return
    usual_s = median_low(known.values())
    slow = {
        state.members[rank].worker: seconds
        for rank, seconds in known.items()
        if seconds > RATIO * usual_s and seconds - usual_s > LEAST_S
    }
    turn.change(compared=state.step, slow={worker: state.slow.get(worker, 0) + 1 for worker in slow})
    for worker, seconds in slow.items():
        if turn.state.slow[worker] >= AGAIN:
            _found(turn, worker, seconds, usual_s)


def _found(turn: Turn, worker: int, own_s: float, usual_s: float) -> None:
    """Name it once; replace it, at most one worker of a node within an hour."""
    state = turn.state
    rank = state.rank_of[worker]
    node, ratio = state.members[rank].node, own_s / max(usual_s, 1e-9)
    if worker not in state.named_slow:
        turn.change(named_slow=state.named_slow | {worker})
        turn.emit(Straggling(worker=worker, rank=rank, node=node, ratio=ratio, own_s=own_s, usual_s=usual_s))
    least = state.settings.replace_stragglers
    rested = turn.now_s - state.relieved.get(node, -HOUR_S) >= HOUR_S
    if least is not None and ratio >= least and rested and leaves_the_state(state, worker):
        turn.change(relieved={**state.relieved, node: turn.now_s})
        leave(turn, worker, f"its steps took {ratio:.1f} times as long as those of the others")
