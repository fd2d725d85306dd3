"""A new generation: ports, the group, the state that every rank will stand at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trainwright.core.arranging import ranks_by_node
from trainwright.core.events import Formed
from trainwright.core.group import Address, Generation, Group, Peer, StateTag
from trainwright.driver.agree import agree, agree_at, writers_of
from trainwright.driver.keeping import keepers_of
from trainwright.driver.loops import note
from trainwright.driver.messages import Heal
from trainwright.driver.spikes import rolled_back
from trainwright.driver.staffing import place
from trainwright.driver.state import Phase, State
from trainwright.driver.turn import Turn


def reserve(turn: Turn) -> None:
    """Begin the next generation: every rank binds a port."""
    state = turn.state
    generation = Generation(token=state.generation.token, number=state.generation.number + 1)
    turn.disarm()
    turn.enter(Phase.RESERVING, generation=generation)
    turn.call_all("reserve", generation)
    turn.arm("call", state.settings.call_deadline_s)


def reserved(turn: Turn) -> None:
    """All ports are known: tell each rank who its peers are."""
    state, settings = turn.state, turn.settings
    addresses: Mapping[int, Address] = state.answers
    peers = tuple(
        Peer(rank=rank, address=addresses[rank], node=member.node) for rank, member in enumerate(state.members)
    )
    turn.enter(
        Phase.FORMING,
        awaiting=frozenset(member.worker for member in state.members),
        members=tuple(member if member.told else replace(member, told=True) for member in state.members),
    )
    for rank, member in enumerate(state.members):
        group = Group(
            generation=state.generation,
            rank=rank,
            peers=peers,
            devices=settings.devices,
            slot=member.slot,
            accelerators=state.accelerators.get(member.slot, ()),
            threads=settings.threads,
            deadline_s=settings.call_deadline_s,
        )
        turn.call([member.worker], "form", group)
    turn.arm("call", settings.call_deadline_s)


def formed(turn: Turn) -> None:
    """All say what they hold: choose the state to go on from. With none at all, every process begins anew."""
    state = turn.state
    tags: Mapping[int, StateTag] = state.answers
    heal = choose_heal(state, tags)
    if heal is None:
        turn.disarm()
        turn.enter(Phase.GATHERING)
        place(turn, range(len(state.members)), kill=True)
        return
    if heal.source == "replica":
        turn.reached(heal.step)
    note(turn)
    heal = replace(heal, passing=turn.state.passing)
    turn.enter(Phase.HEALING, heal=heal)
    turn.call_all("heal", heal)
    turn.arm("call", state.settings.call_deadline_s)


def choose_heal(state: State, tags: Mapping[int, StateTag]) -> Heal | None:
    """The first rung that holds: the ranks' own states, what is kept in memory, the newest checkpoint, a fresh build.

    A fresh build is one that was never trained (step None); where only trained and torn states are left, there is
    none, and the answer is None. After a spike the ranks' own states are of no use.
    """
    agreement = None if state.spiked else agree(tags)
    kept_step = state.kept.step if state.kept else -1
    newest = max(kept_step, state.committed)
    if agreement is not None and agreement.step is not None and agreement.step >= newest:
        return Heal(step=agreement.step, source="replica", moves=agreement.moves)
    if state.kept is not None and kept_step > state.committed:
        return Heal(step=kept_step, source="keeper", kept=state.kept)
    if state.head is not None:
        return Heal(step=state.head.step, source="checkpoint", checkpoint=state.head)
    fresh = agree_at(tags, None)
    return Heal(step=0, source="initial", moves=fresh.moves) if fresh else None


def healed(turn: Turn) -> None:
    """Every rank stands at the same step: the generation is ready."""
    state, heal = turn.state, turn.state.heal
    assert heal is not None, "healed without a cure"
    tags: Mapping[int, StateTag] = state.answers
    reform = state.settings.reform
    assert all((tag.step or 0) == heal.step for tag in tags.values()), f"ranks stand apart, not at {heal.step}"
    turn.emit(
        Formed(
            generation=state.generation.number,
            workers=len(state.members),
            step=heal.step,
            source=heal.source,
            checkpoint=heal.checkpoint.path if heal.checkpoint else "",
            survivors=sum(not member.fresh for member in state.members),
            seconds=turn.now_s - state.since_s,
            steps_lost=max(0, state.progress - heal.step),
            nodes=ranks_by_node([member.node for member in state.members]),
        )
    )
    turn.change(
        phase=Phase.READY,
        step=heal.step,
        progress=heal.step,
        members=tuple(replace(member, fresh=False) if member.fresh else member for member in state.members),
        writers=writers_of(tags),
        pieces=tuple(tags[rank].pieces for rank in sorted(tags)),
        keepers=() if state.keep_off else keepers_of(tags, [member.node for member in state.members], reform),
        kept_s=turn.now_s if heal.source != "keeper" else state.kept_s,
        layout=tags[0].layout,
        considered=-1,
        losses=rolled_back(state, heal.step),
        evaluated=min(state.evaluated, heal.step) if state.spiked else state.evaluated,
        spiked=0,
    )
