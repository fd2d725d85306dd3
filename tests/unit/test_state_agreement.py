"""Agreement: the highest step that sound pieces cover, and moves that bring every rank there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainwright.core.topology import StateAgreement, StateTag, StateTransfer
from trainwright.driver.checkpointing import choose_writers
from trainwright.driver.rendezvous import agree_at_step, agree_on_state

WHOLE = frozenset("abc")


def shard(step: int | None, pieces: str, sound: bool = True) -> StateTag:
    return StateTag(step=step, layout="sharded", pieces=frozenset(pieces), total=len(WHOLE), sound=sound)


def test_replicas_go_to_the_highest_step() -> None:
    tags = {0: StateTag(step=7), 1: StateTag(step=8), 2: StateTag(step=None), 3: StateTag(step=8)}
    moves = (StateTransfer(source=1, target=0, piece="state"), StateTransfer(source=1, target=2, piece="state"))
    assert agree_on_state(tags) == StateAgreement(step=8, moves=moves)


def test_an_interrupted_replica_is_no_source() -> None:
    tags = {0: StateTag(step=8, sound=False), 1: StateTag(step=7)}
    assert agree_on_state(tags) == StateAgreement(step=7, moves=(StateTransfer(source=1, target=0, piece="state"),))


def test_no_sound_state_is_no_agreement() -> None:
    assert agree_on_state({0: StateTag(step=8, sound=False)}) is None
    assert agree_on_state({}) is None


def test_fresh_builds_take_the_lowest_rank_s() -> None:
    tags = {0: StateTag(step=4, sound=False), 1: StateTag(step=None), 2: StateTag(step=None)}
    moves = (StateTransfer(source=1, target=0, piece="state"), StateTransfer(source=1, target=2, piece="state"))
    assert agree_on_state(tags) == StateAgreement(step=None, moves=moves)


def test_shards_need_every_piece_at_one_step() -> None:
    assert agree_on_state({0: shard(5, "a"), 1: shard(5, "b"), 2: shard(5, "c")}) == StateAgreement(step=5)
    assert agree_on_state({0: shard(5, "a"), 1: shard(5, "b"), 2: shard(None, "c")}) is None
    assert agree_on_state({0: shard(5, "a"), 1: shard(5, "b"), 2: shard(6, "c")}) is None


def test_a_hybrid_newcomer_gets_its_own_piece_from_the_other_replica() -> None:
    tags = {0: shard(5, "ab"), 1: shard(None, "c"), 2: shard(5, "ab"), 3: shard(5, "c")}
    assert agree_on_state(tags) == StateAgreement(step=5, moves=(StateTransfer(source=3, target=1, piece="c"),))
    assert choose_writers({0: shard(5, "ab"), 1: shard(5, "c"), 2: shard(5, "ab"), 3: shard(5, "c")}) == (0, 1)


def test_pieces_of_different_layouts_do_not_mix() -> None:
    tags = {0: shard(5, "abc"), 1: StateTag(step=5)}
    moves = tuple(StateTransfer(source=0, target=1, piece=piece) for piece in "abc")
    assert agree_on_state(tags) == StateAgreement(step=5, moves=moves)


TAGS = st.builds(
    StateTag,
    step=st.one_of(st.none(), st.integers(0, 3)),
    layout=st.just("sharded"),
    pieces=st.frozensets(st.sampled_from("abc"), min_size=1),
    total=st.just(len(WHOLE)),
    sound=st.booleans(),
)
WORLDS = st.lists(TAGS, min_size=1, max_size=6).map(lambda tags: dict(enumerate(tags)))


def covered(tags: dict[int, StateTag], step: int | None) -> bool:
    held = [tag.pieces for tag in tags.values() if tag.sound and tag.step == step]
    return frozenset().union(*held) == WHOLE


@given(WORLDS)
def test_it_is_the_highest_covered_step(tags: dict[int, StateTag]) -> None:
    steps = [step for step in (3, 2, 1, 0, None) if covered(tags, step)]
    agreement = agree_on_state(tags)
    assert (agreement is None) == (not steps)
    assert agreement is None or agreement.step == steps[0]


@given(WORLDS)
def test_after_the_moves_every_rank_holds_its_pieces_at_that_step(tags: dict[int, StateTag]) -> None:
    agreement = agree_on_state(tags)
    if agreement is None or agreement.step is None:
        assert not any(covered(tags, step) for step in range(4))
        return
    here = {rank for rank, tag in tags.items() if tag.sound and tag.step == agreement.step}
    held = {rank: set(tag.pieces) if rank in here else set() for rank, tag in tags.items()}
    for move in agreement.moves:
        assert move.piece in tags[move.source].pieces and move.source in here
        assert move.source == min(rank for rank in here if move.piece in tags[rank].pieces)
        held[move.target].add(move.piece)
    assert held == {rank: set(tag.pieces) for rank, tag in tags.items()}


@given(WORLDS)
def test_fresh_builds_are_never_trusted_to_be_equal(tags: dict[int, StateTag]) -> None:
    agreement = agree_at_step(tags, None)
    if agreement is not None:
        sources = {move.source for move in agreement.moves}
        untouched = tags.keys() - {move.target for move in agreement.moves}
        assert sources <= untouched
        for piece in WHOLE:
            holders = [rank for rank in untouched if piece in tags[rank].pieces and tags[rank].step is None]
            assert any(tags[rank].sound for rank in holders)
