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
    steps = sorted({-1 if tag.step is None else tag.step for tag in tags.values() if tag.sound}, reverse=True)
    answers = (agree_at(tags, None if step < 0 else step) for step in steps)
    return next((answer for answer in answers if answer is not None), None)


def agree_at(tags: Mapping[int, StateTag], step: int | None) -> Agreement | None:
    """The agreement at one step, None when its sound pieces cover no layout. See `agree`.

    At step None only the senders keep what they hold: builds are not trusted to be equal.
    """
    ranks = sorted(tags)
    standing = [rank for rank in ranks if tags[rank].sound and tags[rank].step == step]
    for layout, whole in dict.fromkeys((tags[rank].layout, tags[rank].whole) for rank in standing):
        there = [rank for rank in standing if (tags[rank].layout, tags[rank].whole) == (layout, whole)]
        holders = holders_of(there, tags)
        if whole <= holders.keys():
            settled = holders.values() if step is None else there
            return Agreement(step=step, moves=_moves(ranks, tags, frozenset(settled), holders, (layout, whole)))
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
    ranks: list[int],
    tags: Mapping[int, StateTag],
    settled: frozenset[int],
    holders: Mapping[str, int],
    layout: tuple[str, frozenset[str]],
) -> tuple[Move, ...]:
    moves: list[Move] = []
    for rank in ranks:
        if rank not in settled:
            tag = tags[rank]
            own = tag.pieces if (tag.layout, tag.whole) == layout else layout[1]
            moves.extend(Move(source=holders[piece], target=rank, piece=piece) for piece in sorted(own))
    return tuple(moves)
