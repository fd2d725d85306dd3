"""A world that shrinks and grows between its bounds, as the driver decides about it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.plans import Plans, staged
from tests.simulation.scenario import Fault, Scenario
from tests.simulation.world import simulate
from tests.support.driver_harness import Story, progressed
from tests.support.streams import collect, ids, real, stream
from trainwright.core import events
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.core.topology import RestartMode, StateTag
from trainwright.driver import messages as m
from trainwright.driver.driver_state import Phase
from trainwright.driver.run_policy import RunPolicy
from trainwright.strategies.cost_model.pipeline_schedules import stage_operations


def three(**settings: object) -> Story:
    """Workers 0, 1 and 2 step; two may go on alone, four are wanted."""
    return progressed(Story(**{"workers": 3, "min_workers": 2, "total_steps": 40, **settings}).running(), 1)


def lost(story: Story, worker: int, step: int = 2) -> Story:
    """A worker dies, the others stand idle at `step`."""
    story.tell(m.WorkerDied(worker=worker, cause="its node is gone"))
    others = [member.worker for member in story.state.membership.members if member.worker in story.state.awaiting]
    story.returns("run", m.SegmentReport(step=step), workers=others)
    return story.returns("leave", None, workers=others)


def test_without_a_replacement_in_time_the_others_go_on_with_ranks_of_their_own() -> None:
    story = lost(three(), 1)
    assert story.state.phase is Phase.GATHERING and story.state.membership.starting == {3}
    story.expires("shrink")
    assert [(call.worker, call.verb) for call in story.all(m.CallWorker)] == [(0, "reserve"), (2, "reserve")]
    assert story.emitted(events.Resized)[0].workers == 2 and story.state.membership.rank_of == {0: 0, 2: 1}
    assert not story.state.timers.keys() & {"place", "shrink"}
    story.formed(StateTag(step=2), StateTag(step=2))
    assert [call.argument.moves for call in story.calls("restore")] == [(), ()]


def test_by_choice_the_others_do_not_wait_for_a_replacement_which_joins_later() -> None:
    story = lost(three(shrinks_at_once=True), 1)
    assert [(call.worker, call.verb) for call in story.all(m.CallWorker)] == [(0, "reserve"), (2, "reserve")]
    (resized,) = story.emitted(events.Resized)
    assert (resized.workers, resized.why) == (2, "the others do not wait")
    assert not story.emitted(events.Waiting)
    assert not story.state.timers.keys() & {"place", "shrink"}
    story.formed(StateTag(step=2), StateTag(step=2)).returns("restore", StateTag(step=2))
    story.tell(m.WorkerStarted(worker=3, node="n3", pid=3)).segment(3).returns("leave", None)
    assert [call.worker for call in story.calls("reserve")] == [0, 2, 3]


@pytest.mark.parametrize(("others", "reform"), [({3}, "in_place"), ({2}, "in_place"), (set(), "new_process")])
def test_it_waits_where_the_others_could_not_all_go_on_with_their_state(others: set[int], reform: RestartMode) -> None:
    """Two stages, twice: three ranks would restart under another layout, or one of them would be left over."""
    plans = Plans(plans=(staged(2, 4),), others=frozenset(others))
    story = Story(
        workers=4, min_workers=2, total_steps=40, steps_per_epoch=40, layouts=plans, shrinks_at_once=True, reform=reform
    ).running()  # fmt: skip
    progressed(story, 1).tell(m.WorkerDied(worker=3, cause="its node is gone"))
    assert story.state.phase is Phase.GATHERING and "shrink" in story.state.timers
    assert not story.all(m.KillWorker) and not story.emitted(events.Resized) and story.emitted(events.Waiting)


def test_by_choice_too_a_run_waits_for_the_workers_with_which_it_starts() -> None:
    story = Story(workers=3, min_workers=2, shrinks_at_once=True)
    story.tell(m.LeaseAcquired(token=1, head=None))
    story.tell(*(m.WorkerStarted(worker=worker, node="n", pid=worker) for worker in (0, 1)))
    assert story.state.phase is Phase.GATHERING and {"place", "shrink"} <= story.state.timers.keys()
    story.tell(m.WorkerDied(worker=1, cause="killed"), m.WorkerStarted(worker=2, node="n", pid=2))
    assert story.state.phase is Phase.GATHERING and "shrink" in story.state.timers


def test_below_the_fewest_it_waits_until_one_more_is_up() -> None:
    story = lost(three(min_workers=3, workers=4, max_workers=4), 1)
    story.tell(m.WorkerDied(worker=2, cause="killed too")).expires("shrink")
    assert story.state.phase is Phase.GATHERING and len(story.state.membership.starting) == 2
    story.tell(m.WorkerStarted(worker=4, node="n4", pid=4))
    assert [call.worker for call in story.calls("reserve")] == [0, 4, 3]
    assert story.state.membership.spares.keys() == {5}


def test_a_late_one_joins_after_a_pause_that_costs_no_step() -> None:
    story = lost(three(), 1).expires("shrink")
    story.formed(StateTag(step=2), StateTag(step=2)).returns("restore", StateTag(step=2))
    story.tell(m.WorkerStarted(worker=3, node="n3", pid=3))
    assert [(call.worker, call.verb) for call in story.all(m.CallWorker)] == [(0, "stop")]
    story.segment(3)
    assert [(call.worker, call.verb) for call in story.all(m.CallWorker)] == [(0, "leave"), (2, "leave")]
    story.returns("leave", None)
    assert [call.worker for call in story.calls("reserve")] == [0, 2, 3]
    assert story.emitted(events.Resized)[0].former == 2 and story.state.recovery.failures <= 1
    story.formed(StateTag(step=3), StateTag(step=3), StateTag(step=None)).returns("restore", StateTag(step=3))
    assert story.emitted(events.Formed)[0].steps_lost == 0 and story.state.position.step == 3


def test_room_for_more_is_asked_for_once_steps_run() -> None:
    story = Story(workers=2, max_workers=4).running()
    progressed(story, 1)
    assert story.all(m.StartWorker) == [
        m.StartWorker(worker=2, slot=2, spare=True),
        m.StartWorker(worker=3, slot=3, spare=True),
    ]
    story.tell(m.WorkerStarted(worker=3, node="n", pid=3), m.WorkerStarted(worker=2, node="n", pid=2))
    assert len(story.calls("stop")) == 1
    story.segment(2).returns("leave", None)
    assert [call.worker for call in story.calls("reserve")] == [0, 1, 2, 3]


def test_a_failure_takes_waiting_recruits_in_at_no_further_cost() -> None:
    story = progressed(Story(workers=2, max_workers=3).running(), 1)
    story.tell(m.WorkerDied(worker=1, cause="killed"), m.WorkerStarted(worker=2, node="n", pid=2))
    story.returns("run", m.SegmentReport(step=2), workers=[0])
    story.returns("leave", None, workers=[0]).tell(m.WorkerStarted(worker=3, node="n", pid=3))
    assert [call.worker for call in story.calls("reserve")] == [0, 3, 2]


def test_a_recruit_that_is_up_takes_a_lost_rank_where_no_spare_does() -> None:
    story = progressed(Story(workers=2, max_workers=3).running(), 1)
    story.tell(m.WorkerStarted(worker=2, node="n", pid=2), m.WorkerDied(worker=1, cause="killed"))
    assert story.emitted(events.Promoted)[0].slot == 2 and not story.all(m.StartWorker)


def test_nobody_joins_a_run_that_is_to_end() -> None:
    story = progressed(Story(workers=2, max_workers=3).running(), 1).tell(m.StopRequested())
    story.tell(m.WorkerStarted(worker=2, node="n", pid=2))
    assert not story.calls("stop")
    assert story.segment(2).calls("snapshot")


def relaid(**settings: object) -> Story:
    """One worker is left of two stages; another is up, and the checkpoint that both would begin from is waited for."""
    plans = Plans(plans=(staged(2, 2),), others=frozenset({1}))
    steps = {"total_steps": 40, "steps_per_epoch": 40, **settings}
    story = progressed(Story(min_workers=1, layouts=plans, **steps).running(), 1)
    story.tell(m.WorkerDied(worker=1, cause="its node is gone"))
    story.returns("run", m.SegmentReport(step=2), workers=[0])
    story.returns("leave", None, workers=[0]).expires("shrink").formed(StateTag(step=None))
    progressed(story.returns("restore", StateTag(step=0)), 3).tell(m.WorkerStarted(worker=2, node="n", pid=2))
    story.segment(4).snapshot(4)
    assert story.calls("upload") and story.state.phase is Phase.WAITING
    return story


def test_a_store_that_is_slow_puts_growing_off_and_ends_nobody() -> None:
    story = relaid().expires("upload")
    assert not story.all(m.KillWorker) and story.state.recovery.failures == 0 and story.state.position.step == 4
    assert [call.verb for call in story.all(m.CallWorker)] == ["run"]
    assert "1 of 2 workers" in story.emitted(events.Noted)[0].text
    assert [call.verb for call in story.segment(9).all(m.CallWorker)] == ["run"], "the upload is still on its way"
    story.returns("upload", (), workers=[0]).now_s += story.state.settings.saving.upload_deadline_s
    story.committed(4).segment(12)
    assert [call.verb for call in story.all(m.CallWorker)] == ["run"], "the next one would take as long"


def test_a_checkpoint_that_is_due_is_not_waited_for_where_the_last_one_took_too_long() -> None:
    story = relaid(checkpoint_steps=20).expires("upload").returns("upload", (), workers=[0])
    story.now_s += story.state.settings.saving.upload_deadline_s
    story.committed(4).segment(20).snapshot(20)
    assert [call.verb for call in story.all(m.CallWorker)] == ["upload", "run"] and story.state.phase is Phase.RUNNING


@pytest.mark.parametrize(
    "end", [m.WorkerDied(worker=2, cause="its node is gone"), m.PreemptionNoticed(worker=2, left_s=25.0)]
)
def test_nobody_waits_for_a_store_where_the_one_who_was_to_join_is_gone(end: m.DriverEvent) -> None:
    story = relaid().tell(end)
    assert [call.verb for call in story.all(m.CallWorker)] == ["run"] and "upload" not in story.state.timers
    assert story.returns("upload", (), workers=[0]).all(m.CommitCheckpoint)
    assert story.committed(4).state.phase is Phase.RUNNING and story.state.committed == 4


def test_a_store_that_is_quick_lets_it_grow_from_a_checkpoint_of_that_step() -> None:
    story = relaid().returns("upload", (), workers=[0]).committed(4).returns("leave", None)
    assert [call.worker for call in story.calls("reserve")] == [0, 2]
    restore_plan = story.formed(StateTag(step=None)).calls("restore")[0].argument
    assert (restore_plan.source, restore_plan.step) == ("checkpoint", 4)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_world_shrinks_and_grows_back_in_the_simulation(at_once: bool) -> None:
    steps = {"total_steps": 400, "steps_per_epoch": 400}
    settings = RunPolicy.of(workers=4, min_workers=3, shrink_s=8.0, shrinks_at_once=at_once, **steps)
    slow = (Fault(kind="slow start", at_s=1.0),)
    faults = (*slow * (not at_once), Fault(kind="kill", at_s=6.0, target=0.5))
    outcome = simulate(Scenario(seed=2, settings=settings, faults=faults))
    sizes = [(event.former, event.workers) for event in outcome.emitted if isinstance(event, events.Resized)]
    assert outcome.outcomes == ["done"] and sizes == [(4, 3), (3, 4)]


PLAN = Plan(strategy="data_parallel", engine="e", mesh=Mesh(data=4), batch_size=64, placement=WorkerResources(cpus=1))


@given(data=st.integers(1, 9), shard=st.integers(1, 3), accumulation=st.integers(1, 5), now=st.integers(1, 12))
def test_a_plan_on_fewer_workers_has_the_same_batch_and_no_larger_micro_batch(
    data: int, shard: int, accumulation: int, now: int
) -> None:
    planned = Plan(
        strategy="s", engine="e", mesh=Mesh(data=data, shard=shard), batch_size=960, accumulation=accumulation,
        placement=WorkerResources(cpus=1),
    )  # fmt: skip
    resized = planned.resized(now * shard)
    assert resized.workers == now * shard and resized.batch_size == planned.batch_size
    assert resized.mesh.data * resized.accumulation >= min(now, data) * accumulation
    assert now < data or resized.accumulation == accumulation
    assert planned.resized(planned.workers) == planned


def test_a_world_that_holds_no_whole_replica_is_refused() -> None:
    with pytest.raises(ValueError, match="5 workers are not a multiple of the 2"):
        Plan(
            strategy="s", engine="e", mesh=Mesh(data=2, shard=2), batch_size=8, placement=WorkerResources(cpus=1)
        ).resized(5)


@settings(max_examples=20)
@given(cuts=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=4), batch=st.integers(6, 30))
def test_a_world_that_changes_in_the_middle_of_an_epoch_sees_the_same_global_batches(
    cuts: list[tuple[int, int]], batch: int
) -> None:
    """Each cut: so many workers for so many steps."""
    data, planned = ids(97), Plan(
        strategy="s", engine="e", mesh=Mesh(data=4), batch_size=batch, placement=WorkerResources(cpus=1)
    )  # fmt: skip
    whole = [sorted(real(feed)) for feed in collect(stream(data, batch_size=batch, epochs=8))]
    step = 0
    for workers, steps in cuts:
        plan = planned.resized(workers)
        shares = [
            stream(data, worker, workers, batch_size=batch, epochs=8, accumulation=plan.accumulation).feeds(step)
            for worker in range(workers)
        ]
        for now in range(step, min(step + steps, len(whole))):
            assert sorted(sample for share in shares for sample in real(next(share))) == whole[now]
        for share in shares:
            share.close()
        step = min(step + steps, len(whole))


@pytest.mark.parametrize(("text", "workers"), [("dp=4,pp=4,accumulation=4", 12), ("dp=3,pp=2,accumulation=2", 4)])
def test_a_smaller_interleaved_pipeline_has_an_order_of_micro_batches(text: str, workers: int) -> None:
    planned = Plan.parse(f"{text},schedule=interleaved,chunks=2")
    smaller = planned.resized(workers)
    assert smaller.accumulation * smaller.mesh.data >= planned.accumulation * planned.mesh.data
    assert smaller.resized(workers) == smaller
    assert stage_operations(
        "interleaved", stage=0, stages=smaller.mesh.pipeline, micro_batches=smaller.accumulation, chunks=2
    )
