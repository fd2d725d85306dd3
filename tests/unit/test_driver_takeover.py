"""A new driver takes over what outlived the one before, as the driver decides about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.plans import Plans, stage_piece, staged
from tests.support.driver_harness import HEAD, Story
from trainwright.core import events
from trainwright.core.engine import CheckpointFile
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.core.topology import StateTag
from trainwright.driver import messages as m
from trainwright.driver.driver_state import Phase

KEPT = m.MemoryCheckpoint(
    version=7, step=6, files=(m.NodeMemoryFile(node="n0", file=CheckpointFile(name="s", size_bytes=1, sha256="")),)
)


def living(worker: int, slot: int | None, *, waiting: bool = False) -> m.SurvivingWorker:
    ids = (f"g{slot}",)
    return m.SurvivingWorker(worker=worker, node=f"n{worker}", pid=worker, slot=slot, waiting=waiting, accelerators=ids)


def taken_over(*those: m.SurvivingWorker, kept: m.MemoryCheckpoint | None = None, **settings: object) -> Story:
    story = Story(**{"total_steps": 20, "steps_per_epoch": 20, **settings})
    return story.tell(m.LeaseAcquired(token=3, head=HEAD, living=those, kept=kept))


def test_living_workers_keep_their_processes_and_the_newest_step() -> None:
    story = taken_over(living(4, 0), living(9, 1))
    assert [(call.worker, call.verb) for call in story.all(m.CallWorker)] == [(4, "leave"), (9, "leave")]
    assert not story.all(m.StartWorker) and "took over 2 workers" in story.emitted(events.Noted)[0].text
    story.returns("leave", None).formed(StateTag(step=11), StateTag(step=11))
    assert story.calls("restore")[0].argument.source == "replica"
    story.returns("restore", StateTag(step=11))
    assert story.emitted(events.Formed)[0].survivors == 2 and story.state.phase is Phase.RUNNING


REPLICAS = Plan(strategy="s", engine="m:E", mesh=Mesh(data=2), batch_size=8, placement=WorkerResources(cpus=1.0))


def test_where_processes_cannot_form_again_the_one_with_the_newest_state_copies_it_first() -> None:
    older, newer = (replace(living(worker, slot), plan=REPLICAS, step=step, rank=slot)
                    for worker, slot, step in ((4, 0, 11), (9, 1, 12)))  # fmt: skip
    story = taken_over(older, newer, kept=KEPT, reform="new_process", keep_s=10.0)
    assert story.all(m.KillWorker) == [m.KillWorker(worker=4)]
    (call,) = story.calls("leave")
    assert call.worker == 9 and call.argument.hold == (KEPT.version,)
    story.returns("leave", m.MemoryCopyTaken(files=KEPT.files, step=12), workers=[9])
    assert story.all(m.KillWorker) == [m.KillWorker(worker=9)]
    restore_plan = story.start().formed().calls("restore")[0].argument
    assert (restore_plan.source, restore_plan.step) == ("keeper", 12)
    story.returns("restore", StateTag(step=12))
    assert [(event.steps_lost, event.survivors) for event in story.emitted(events.Formed)] == [(0, 0)]


@pytest.mark.parametrize(("step", "fields"), [(11, {"keep_s": None}), (11, {"topology": "coordinator"}), (6, {})])
def test_where_processes_cannot_form_again_and_no_copy_is_wanted_all_end_at_once(
    step: int, fields: dict[str, object]
) -> None:
    those = [replace(living(worker, slot), plan=REPLICAS, step=step, rank=slot) for worker, slot in ((4, 0), (9, 1))]
    story = taken_over(*those, kept=KEPT, reform="new_process", **{"keep_s": 10.0, **fields})
    assert {*story.all(m.KillWorker)} == {m.KillWorker(worker=4), m.KillWorker(worker=9)}
    assert not story.calls("leave") and story.start().formed().calls("restore")[0].argument.step == KEPT.step


def test_ranks_that_have_nobody_get_new_processes_in_free_slots() -> None:
    story = taken_over(living(4, 1), workers=3)
    assert [(place.worker, place.slot) for place in story.all(m.StartWorker)] == [(5, 0), (6, 2)]
    assert story.state.membership.rank_of == {4: 0, 5: 1, 6: 2}


def test_a_spare_that_lives_takes_a_free_rank_and_its_slot() -> None:
    story = taken_over(living(4, 0), living(5, None, waiting=True), spares=1)
    assert story.emitted(events.Promoted) == [events.Promoted(worker=5, rank=1, slot=1, node="n5")]
    assert not story.all(m.StartWorker)


def test_a_spare_that_had_taken_a_rank_is_a_worker_like_any_other() -> None:
    story = taken_over(living(7, 1), living(4, 0))
    assert [member.slot for member in story.state.membership.members] == [1, 0] and not story.state.membership.spares


def test_accelerators_of_the_living_are_known() -> None:
    story = taken_over(living(4, 0), living(9, 1))
    assert story.state.membership.accelerators == {0: ("g0",), 1: ("g1",)}


def test_a_silent_one_is_replaced_like_any_survivor() -> None:
    story = taken_over(living(4, 0), living(9, 1)).returns("leave", None, workers=[4])
    story.expires("leave")
    assert story.all(m.KillWorker) == [m.KillWorker(worker=9)] and [
        place.slot for place in story.all(m.StartWorker)
    ] == [1]


def test_without_a_worker_the_keepers_copy_is_newer_than_the_checkpoint() -> None:
    story = taken_over(kept=KEPT, workers=1).start().formed()
    restore_plan = story.calls("restore")[0].argument
    assert (restore_plan.source, restore_plan.kept) == ("keeper", KEPT)


def test_versions_of_the_driver_before_are_held_and_never_used_again() -> None:
    story = taken_over(kept=KEPT, workers=1, keep_s=1.0).start().formed().returns("restore", StateTag(step=6))
    story.now_s += 1.0
    story.expires("pause").segment(9)
    order = story.returns("snapshot", m.SnapshotTaken(step=9, size_bytes=1, blocked_s=0.0)).calls("keep")[0].argument
    assert order.hold == (7,) and order.version > 3 << 32


def alone(step: int = 7, *, kept: m.MemoryCheckpoint | None = None, **settings: object) -> Story:
    """One worker outlived a driver that had gone on with it instead of two stages."""
    plans = Plans(plans=(staged(2, 2),), others=frozenset({1}))
    one = replace(living(4, 0), rank=0, plan=staged(1, 1, "other"), step=step)
    return taken_over(one, kept=kept, **{"layouts": plans, "min_workers": 1, **settings})


@pytest.mark.parametrize("bounds", [{}, {"min_workers": None, "last_resort": 1}])
def test_a_state_in_the_layout_that_the_driver_before_had_changed_to_is_gone_on_with(bounds: dict[str, object]) -> None:
    story = alone(**bounds)
    assert not story.all(m.StartWorker) and story.emitted(events.Replanned)[0].name == "other"
    story.returns("leave", None)
    assert story.calls("reserve")[0].argument.plan.strategy == "other" and not story.emitted(events.Replanned)
    story.formed(StateTag(step=7)).returns("restore", StateTag(step=7))
    assert (story.emitted(events.Formed)[0].source, story.state.position.step) == ("replica", 7)
    story.tell(m.StepsCompleted(generation=story.state.epoch.generation, step=8))
    story.tell(m.WorkerStarted(worker=5, node="n", pid=5)).segment(9).snapshot(9, worker=4)
    story.returns("upload", (), workers=[4]).committed(9).returns("leave", None)
    assert story.emitted(events.Replanned)[0].workers == 2 and [c.worker for c in story.calls("reserve")] == [4, 5]


def test_a_recruit_that_lives_too_waits_until_that_state_is_safe() -> None:
    plans = Plans(plans=(staged(2, 2),), others=frozenset({1}))
    one = replace(living(4, 0), rank=0, plan=staged(1, 1, "other"), step=7)
    story = taken_over(one, living(5, 1, waiting=True), layouts=plans, min_workers=1).returns("leave", None)
    assert [call.worker for call in story.calls("reserve")] == [4] and story.state.membership.spares.keys() == {5}
    story.formed(StateTag(step=7)).returns("restore", StateTag(step=7))
    assert story.calls("snapshot"), "it is grown at once, from a checkpoint"


@pytest.mark.parametrize(
    "story",
    [alone(step=4), alone(kept=replace(KEPT, step=7)), alone(layouts=Plans(plans=(staged(1, 2, "other"),)))],
    ids=["a checkpoint is as new", "a copy is as new", "it is the run's own"],
)
def test_a_state_that_is_not_lost_in_the_run_s_own_layout_changes_nothing(story: Story) -> None:
    assert len(story.state.membership.members) == 2 and story.all(m.StartWorker) and not story.emitted(events.Replanned)


@pytest.mark.parametrize(
    ("before", "ranks", "bounds", "stages"),
    [
        (2, [0, 1], {"workers": 4, "min_workers": 2}, [0, 0, 1, 1]),
        (2, [0, 1], {"workers": 4}, [0, 0, 1, 1]),
        (4, [0, 1, 2], {"workers": 2, "max_workers": 4}, [0, 1]),
    ],
    ids=["fewer than now", "fewer than may be now", "more than now"],
)
def test_the_newest_state_lives_on_where_the_driver_before_had_more_or_fewer_replicas(
    before: int, ranks: list[int], bounds: dict[str, int], stages: list[int]
) -> None:
    """Whoever holds a stage gets a rank of it; one who holds what others hold too goes where some must."""
    plan = staged(2, before)
    those = [replace(living(rank, rank), rank=rank, plan=plan, step=9) for rank in ranks]
    story = taken_over(*those, layouts=Plans(plans=(staged(2, 2),)), **bounds)
    story.returns("leave", None, workers=ranks)
    if story.state.membership.starting:
        story.start()
    held = {rank: plan.mesh.stage_of(rank) for rank in ranks}
    members = [member.worker for member in story.state.membership.members]
    assert {stage for worker, stage in zip(members, stages, strict=True) if held.get(worker) == stage} == {0, 1}
    assert not story.emitted(events.Replanned)
    tags = [
        StateTag(
            step=9 if held.get(worker) == stage else None,
            layout="pp",
            pieces=frozenset({stage_piece(stage, 2)}),
            total=2,
        )
        for worker, stage in zip(members, stages, strict=True)
    ]
    restore_plan = story.formed(*tags).state.epoch.restore_plan
    assert restore_plan is not None and (restore_plan.source, restore_plan.step) == ("replica", 9)


def test_a_part_of_a_state_is_no_reason_to_keep_its_layout() -> None:
    plans = Plans(plans=(staged(1, 2),), others=frozenset())
    one = replace(living(4, 0), rank=0, plan=staged(2, 2), step=7)
    assert not taken_over(one, layouts=plans).emitted(events.Replanned)


def test_a_run_that_is_done_takes_nobody_over() -> None:
    story = Story(total_steps=4).tell(m.LeaseAcquired(token=3, head=HEAD, living=(living(4, 0),)))
    assert story.all(m.ReleaseLease) and not story.all(m.CallWorker)


def test_a_world_that_may_grow_keeps_all_that_live() -> None:
    story = taken_over(living(4, 0), living(5, 1), living(6, 2), workers=2, max_workers=3)
    assert len(story.state.membership.members) == 3 and not story.all(m.StartWorker)


def test_workers_that_never_had_a_rank_get_one_and_a_recruit_does_not_before_its_turn() -> None:
    """The driver before died while they started."""
    story = taken_over(living(0, 0, waiting=True), living(1, 1, waiting=True))
    assert (
        story.state.membership.rank_of == {0: 0, 1: 1}
        and not story.all(m.StartWorker)
        and not story.emitted(events.Resized)
    )
    assert all(member.fresh for member in story.state.membership.members)
    grown = taken_over(living(7, 2, waiting=True), living(4, 0), living(5, 1), workers=2, max_workers=3)
    assert grown.state.membership.rank_of == {4: 0, 5: 1} and grown.state.membership.spares.keys() == {7}


def test_everyone_keeps_the_rank_that_it_held_and_a_new_process_takes_the_hole() -> None:
    """What a rank holds of a divided model is of no use to another one."""
    held = [replace(living(worker, worker), rank=rank) for worker, rank in ((0, 3), (1, 1), (2, 2))]
    story = taken_over(*held, workers=4)
    assert [member.worker for member in story.state.membership.members] == [3, 1, 2, 0]
    assert [(place.worker, place.slot) for place in story.all(m.StartWorker)] == [(3, 3)]
