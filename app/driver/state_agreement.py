"""Agreement: from what each rank holds to the step at which all will stand, and who sends what to whom. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trainwright.core.group import Agreement, Move, StateTag


def agree(tags: Mapping[int, StateTag]) -> Agreement | None:
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
    answers = (_agreed(tags, step, standing[step]) for step in steps)
    return next((answer for answer in answers if answer is not None), None)


def agree_at(tags: Mapping[int, StateTag], step: int | None) -> Agreement | None:
    """The agreement at one step, None when its sound pieces cover no layout. See `agree`.

    At step None only the senders keep what they hold: builds are not trusted to be equal.
    """
    return _agreed(tags, step, _sound_by_step(tags).get(step, []))


def _sound_by_step(tags: Mapping[int, StateTag]) -> dict[int | None, list[int]]:
    """The ranks whose state is sound, in order, by the step that they stand at."""
    found: dict[int | None, list[int]] = {}
    for rank in sorted(tags):
        if tags[rank].sound:
            found.setdefault(tags[rank].step, []).append(rank)
    return found


def _agreed(tags: Mapping[int, StateTag], step: int | None, standing: Iterable[int]) -> Agreement | None:
    """The agreement at a step at which these ranks stand."""
    by_layout: dict[str, list[int]] = {}
    for rank in standing:
        by_layout.setdefault(tags[rank].layout, []).append(rank)
    for layout, there in by_layout.items():
        holders = holders_of(there, tags)
        if len(holders) == tags[there[0]].total:
            settled = frozenset(holders.values() if step is None else there)
            return Agreement(step=step, moves=_moves(tags, settled, holders, layout))
    return None


def holders_of(ranks: Iterable[int], tags: Mapping[int, StateTag]) -> dict[str, int]:
    """The lowest of the ranks that holds each piece, by piece."""
    holders: dict[str, int] = {}
    for rank in sorted(ranks):
        for piece in tags[rank].pieces:
            holders.setdefault(piece, rank)
    return holders


def writers_of(tags: Mapping[int, StateTag]) -> tuple[int, ...]:
    """The ranks that write a checkpoint: the lowest that holds each piece. Rank 0 alone for replicas."""
    return tuple(sorted(set(holders_of(tags, tags).values())))


def _moves(
    tags: Mapping[int, StateTag], settled: frozenset[int], holders: Mapping[str, int], layout: str
) -> tuple[Move, ...]:
    """A piece that a rank is to hold comes from the one that holds it; where its layout is another, all pieces do."""
    moves: list[Move] = []
    for rank in sorted(tags):
        if rank not in settled:
            tag = tags[rank]
            own = tag.pieces if tag.layout == layout else holders.keys()
            moves.extend(Move(source=holders[piece], target=rank, piece=piece) for piece in sorted(own))
    return tuple(moves)
