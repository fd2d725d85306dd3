"""Copies of the state in the nodes' memory: they outlive every process, and are newer than the last checkpoint.

One version is whole at any time, a second one may be on its way; it counts when each keeper has delivered its files.
Nothing is kept where the ranks' own memory does as well: each piece lives on two nodes, in processes that survive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from trainwright.core.events import Kept, Noted
from trainwright.core.group import Reform, StateTag
from trainwright.driver import messages as m
from trainwright.driver.due_times import keep_interval_s
from trainwright.driver.persistent_collections import PersistentSet
from trainwright.driver.state import Keeping, State
from trainwright.driver.transition import Turn

COPIES = 2  # on as many nodes, where there are
TOKEN_BITS = 32  # a later driver's versions are higher


def keepers_of(tags: Mapping[int, StateTag], nodes: Sequence[str], reform: Reform) -> tuple[int, ...]:
    """The ranks that copy what they hold: for each piece the lowest holder on each of two nodes, where there are two.

    None where each piece lives on two nodes, in processes that survive; a copy of some pieces alone is of no use.

    Args:
        tags: what each rank holds, by rank.
        nodes: by rank.
    """
    holders: dict[str, dict[str, int]] = {}  # the lowest on each node, by piece
    for rank in sorted(tags):
        for piece in tags[rank].pieces:
            holders.setdefault(piece, {}).setdefault(nodes[rank], rank)
    needed = reform == "new_process" or any(len(by_node) < COPIES for by_node in holders.values())
    keepers = {rank for by_node in holders.values() for rank in islice(by_node.values(), COPIES)}
    return tuple(sorted(keepers)) if needed else ()


def wants_keep(state: State, now_s: float) -> bool:
    """Whether the ranks, idle at `state.step`, are to be copied into memory now."""
    interval_s = keep_interval_s(state)
    if interval_s is None or state.keeping is not None or state.ending:
        return False
    return state.step > state.copied and now_s - state.kept_s >= interval_s


def begin(turn: Turn, copies: Mapping[int, m.Snapshot]) -> None:
    """The keepers' pieces are copied: have them delivered, while the ranks go on."""
    state = turn.state
    workers = [state.members[rank].worker for rank in state.keepers]
    keeping = Keeping(
        version=max(state.versions, state.generation.token << TOKEN_BITS) + 1,
        step=state.step,
        owing=PersistentSet(workers),
        size_bytes=sum(copies[rank].size_bytes for rank in state.keepers),
        blocked_s=max(copies[rank].blocked_s for rank in state.keepers),
        started_s=turn.now_s,
    )
    turn.change(keeping=keeping, versions=keeping.version, kept_s=turn.now_s, copied_s=keeping.blocked_s)
    hold = (state.kept.version,) if state.kept else ()
    turn.call(workers, "keep", m.KeepOrder(version=keeping.version, hold=hold))


def delivered(turn: Turn, event: m.Returned) -> None:
    """One keeper's files are in memory; after the last one the version counts."""
    state = turn.state
    node = state.members[state.rank_of[event.worker]].node
    files = tuple(m.KeptFile(node=node, file=file) for file in event.value)
    turn.change(keeping=replace(_keeping(state), files=_keeping(state).files + files))
    _answered(turn, frozenset({event.worker}))


def forget(turn: Turn, workers: frozenset[int]) -> None:
    """These workers will deliver nothing more: the version on its way will not be."""
    keeping = turn.state.keeping
    if keeping is not None and keeping.owing & workers:
        turn.change(keeping=replace(keeping, spoiled=True))
        _answered(turn, workers)


def forget_from(turn: Turn, step: int) -> None:
    """No copy that holds this step is to be used, by this driver or one after it."""
    kept, keeping = turn.state.kept, turn.state.keeping
    if kept is not None and kept.step >= step:
        turn.change(kept=None)
        turn.want(m.Seal(kept=None))
    if keeping is not None and keeping.step >= step:
        turn.change(keeping=replace(keeping, spoiled=True))


def refused(turn: Turn, event: m.Raised) -> None:
    """A node has no room for a copy: keep no more, and say so."""
    turn.change(keepers=(), keep_off=True)
    turn.emit(Noted(text=f"no more copies of the state are kept in memory: {event.failure.error}"))
    forget(turn, frozenset({event.worker}))


def _answered(turn: Turn, workers: frozenset[int]) -> None:
    keeping = _keeping(turn.state)
    keeping = replace(keeping, owing=keeping.owing - workers)
    turn.change(keeping=keeping if keeping.owing else None)
    if not keeping.owing and not keeping.spoiled:
        kept = m.KeptState(version=keeping.version, step=keeping.step, files=keeping.files)
        turn.change(kept=kept)
        turn.want(m.Seal(kept=kept))
        turn.emit(
            Kept(
                step=keeping.step,
                size_bytes=keeping.size_bytes,
                nodes=sorted({file.node for file in keeping.files}),
                blocked_s=keeping.blocked_s,
                seconds=turn.now_s - keeping.started_s,
            )
        )


def _keeping(state: State) -> Keeping:
    assert state.keeping is not None, "nothing is being kept"
    return state.keeping
