"""A device without memory ends the run once, with what was predicted and used, and the plans that need less."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import trainwright as tw
from tests.simulation.plans import Plans, staged
from tests.support.driver_harness import Story
from tests.support.work_orders import table_job
from trainwright.core.cluster import ACCELERATORS
from trainwright.core.data import PeakMemory
from trainwright.core.errors import DeviceOutOfMemory, JobError, PeerLost, UserCodeError
from trainwright.core.events import Failed, Replanned
from trainwright.core.plan import Plan
from trainwright.core.topology import Address, StateTag
from trainwright.driver import messages as m
from trainwright.driver.driver_state import Phase
from trainwright.driver.messages import PlanSelector
from trainwright.planning.alternative_layouts import alternative_plans, explain_out_of_memory
from trainwright.strategies.search.plan_ranking import estimate_of, plans_within, search_plans
from trainwright.strategies.search.plan_request import PlanRequest
from trainwright.strategies.torch.engines.base import TorchEngine
from trainwright.strategies.torch.torch_errors import TorchUserCode

GIB = 2**30
GPT = tw.transformer_profile(hidden=2048, layers=24, heads=16, sequence=2048, vocabulary=51_200)
REQUEST = PlanRequest(profile=GPT, cluster=tw.Cluster.parse("1x8xA100-80GB"), batch_size=64, precision="bf16")
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.14 GiB"


def oom() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(FULL)


# --- Which error it is ------------------------------------------------------------------------------------------------


def test_user_code_without_memory_is_an_error_of_its_own() -> None:
    text = "the backward pass ran out of the device's memory: CUDA out of memory"
    with pytest.raises(DeviceOutOfMemory, match=text), TorchUserCode("the backward pass", "rank 3"):
        raise oom()
    with pytest.raises(UserCodeError) as other, TorchUserCode("the model", "rank 3"):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not isinstance(other.value, DeviceOutOfMemory)


def test_a_step_without_memory_outside_of_user_code_is_one_too_unless_the_group_was_aborted() -> None:
    def work() -> None:
        raise oom()

    engine = TorchEngine()
    with pytest.raises(DeviceOutOfMemory, match="a step ran out of the device's memory"):
        engine._guarded(work)
    engine._aborted = lambda: True
    with pytest.raises(PeerLost):
        engine._guarded(work)


def test_tensorflow() -> None:
    import tensorflow as tf

    from trainwright.strategies.tensorflow.training.tensorflow_errors import TensorFlowUserCode

    full = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[64,4096]")
    assert isinstance(TensorFlowUserCode("the model", "rank 0").meaning(full), DeviceOutOfMemory)
    large = tf.errors.ResourceExhaustedError(None, None, "Received message larger than max (1 vs. 2)")
    assert not isinstance(TensorFlowUserCode("the model", "rank 0").meaning(large), DeviceOutOfMemory)


# --- The driver -------------------------------------------------------------------------------------------------------


def failed(story: Story, memory: PeakMemory | None = None, *, worker: int = 1, verb: str = "run") -> m.FinishRun | None:
    error = DeviceOutOfMemory("the model ran out of the device's memory", where="rank 1; worker 1 on n1")
    failure = m.CallFailure(kind="user", error=error, memory=memory)
    generation = story.state.epoch.generation
    story.tell(m.CallRaised(worker=worker, generation=generation, verb=verb, failure=failure))
    return story.state.shutdown


def test_it_is_not_tried_again_and_the_error_says_what_fits() -> None:
    asked: list[Any] = []

    def explain(*question: Any) -> tuple[str, str]:
        asked.append(question)
        return "the plan predicted 1 GiB", "take another plan"

    peak = PeakMemory(allocated_bytes=5)
    story = Story(explain_memory=explain, failures=3).running()
    ended: Any = failed(story, peak)
    assert asked == [(None, 1, peak)]
    assert story.state.phase.value in ("closing", "releasing") and not story.all(m.StartWorker)
    assert isinstance(ended.error, DeviceOutOfMemory)
    assert str(ended.error) == (
        "the model ran out of the device's memory; the plan predicted 1 GiB (rank 1; worker 1 on n1)\n"
        "  -> take another plan"
    )
    (event,) = story.emitted(Failed)
    assert (event.rank, event.node) == (1, "n1")


def test_a_rank_that_lost_its_peer_first_does_not_hide_it() -> None:
    story = Story(explain_memory=lambda *_: ("", "")).running()
    story.raises(0, "run", "peer", PeerLost("another rank was lost"))
    ended: Any = failed(story)
    assert isinstance(ended.error, DeviceOutOfMemory) and ended.outcome == "failed"


def test_a_survivor_without_memory_to_form_again_is_replaced_and_a_new_process_ends_the_run() -> None:
    """The survivor trained under this plan; another process may have the memory that the old state takes."""

    def again(story: Story) -> Story:
        return story.start().returns("reserve", Address(host="h", port=1))

    story = Story(explain_memory=lambda *_: ("", "")).running().tell(m.WorkerDied(worker=0, cause="signal 9"))
    again(story.raises(1, "run", "peer", PeerLost("gone")))
    assert failed(story, verb="form").error is None
    assert story.all(m.KillWorker) == [m.KillWorker(worker=1)]
    assert story.all(m.StartWorker) == [m.StartWorker(worker=3, slot=1)]
    again(story.raises(2, "form", "peer", PeerLost("gone")))
    ended: Any = failed(story, worker=3, verb="form")
    assert isinstance(ended.error, DeviceOutOfMemory) and ended.outcome == "failed"


WIDE, LEAN = staged(1, 2, "wide"), staged(2, 2, "lean")


def replanning(**changes: Any) -> Story:
    """Two ranks train under a plan for which there is another that needs less memory."""
    return Story(**{"layouts": Plans(plans=(WIDE,), lean=LEAN), "replan_memory": True, **changes}).running()


def test_the_run_continues_under_a_plan_that_needs_less() -> None:
    story = replanning()
    assert failed(story).error is None
    assert [event.rank for event in story.emitted(Failed)] == [1]
    failed(story, worker=0)  # the other rank's batch is as large: one plan is enough for both
    story.returns("leave", None)
    assert story.state.phase is Phase.RESERVING and story.state.recovery.failures == 1
    assert {call.argument.plan.strategy for call in story.calls("reserve")} == {"lean"}
    (changed,) = story.emitted(Replanned)
    assert (changed.former, changed.workers) == (WIDE.name, 2)
    assert changed.why == "the device of rank 1 ran out of memory"


def test_a_plan_with_smaller_micro_batches_is_told_too() -> None:
    plans = Plans(plans=(WIDE,), lean=replace(WIDE, accumulation=4))
    story = replanning(layouts=plans)
    failed(story)
    story.returns("leave", None)
    assert [event.name for event in story.emitted(Replanned)] == ["wide (dp=2,accumulation=4)"]


def test_where_no_plan_on_trial_has_the_memory_a_leaner_one_is_taken() -> None:
    plans = Plans(plans=(WIDE, staged(1, 2, "other")), lean=LEAN)
    story = Story(layouts=plans, replan_memory=True, failures=0).up().formed()
    failed(story, verb="restore")
    story.returns("leave", None, workers=[0]).formed()
    assert failed(story, verb="restore").error is None
    story.returns("leave", None, workers=[0])
    assert {call.argument.plan.strategy for call in story.calls("reserve")} == {"lean"}
    assert story.state.trials is None and story.state.recovery.failures == 0


def test_the_next_driver_continues_under_the_leaner_plan_of_the_survivors() -> None:
    living = tuple(
        m.SurvivingWorker(worker=rank, rank=rank, slot=rank, node="n", pid=rank, step=7, plan=LEAN) for rank in range(2)
    )
    story = Story(layouts=Plans(plans=(WIDE,), lean=LEAN), replan_memory=True)
    story.tell(m.LeaseAcquired(token=3, head=None, living=living)).returns("leave", None)
    assert {call.argument.plan.strategy for call in story.calls("reserve")} == {"lean"}
    layouts = story.state.settings.world.layouts
    assert layouts is not None and layouts.plans == (LEAN,)


def test_a_rank_that_lost_its_peer_first_does_not_hide_that_a_smaller_plan_is_needed() -> None:
    story = replanning().raises(0, "run", "peer", PeerLost("another rank was lost"))
    assert failed(story).error is None
    story.returns("leave", None)
    assert {call.argument.plan.strategy for call in story.calls("reserve")} == {"lean"}


@pytest.mark.parametrize("changes", [{"replan_memory": False}, {"layouts": Plans(plans=(WIDE,))}, {"layouts": None}])
def test_the_run_ends_where_no_other_plan_is_asked_for_or_none_needs_less(changes: dict[str, Any]) -> None:
    ended: Any = failed(replanning(**changes))
    assert isinstance(ended.error, DeviceOutOfMemory)


def test_the_second_plan_in_a_row_that_is_too_large_ends_the_run() -> None:
    story = replanning()
    failed(story)
    story.returns("leave", None).formed(StateTag(step=0))
    ended: Any = failed(story, verb="restore")
    assert isinstance(ended.error, DeviceOutOfMemory)


def test_a_run_that_failed_too_often_ends_with_the_prediction_and_what_fits() -> None:
    asked: list[Any] = []

    def explain(*question: Any) -> tuple[str, str]:
        asked.append(question)
        return "the plan predicted 1 GiB", "use a smaller batch_size"

    story = replanning(explain_memory=explain, failures=0)
    failed(story)
    story.returns("leave", None)
    ended: Any = story.state.shutdown
    assert isinstance(ended.error, DeviceOutOfMemory)
    assert [(plan.strategy, rank) for plan, rank, _ in asked] == [("wide", 1)]
    assert "the plan predicted 1 GiB; failure 1 in a row" in ended.error.what
    assert ended.error.remedy == "use a smaller batch_size"


# --- What would fit ---------------------------------------------------------------------------------------------------


def chosen(strategy: str) -> Plan:
    return next(plan for plan in search_plans(REQUEST).plans if plan.strategy == strategy)


def leaner(plan: Plan, /, **fields: Any) -> PlanSelector | None:
    """The plans of a run that need less than the first."""
    job = table_job(batch_size=64, precision="bf16", **fields)
    plans = alternative_plans(job, PlanRequest.of(job, GPT, REQUEST.cluster), (plan,))
    assert plans is not None
    return plans.leaner(plan)


def test_a_leaner_plan_is_predicted_to_need_a_tenth_less_for_as_many_workers() -> None:
    plan = chosen("sharded")
    found = leaner(plan)
    for _ in range(2):
        assert found is not None
        best = found.plans[0]
        assert best.workers == plan.workers and best.batch_size == plan.batch_size
        assert max(estimate_of(best).stage_memory_bytes) <= 0.9 * max(estimate_of(plan).stage_memory_bytes)
        assert found.leaner(plan) is found, "other ranks that ran out of memory change nothing"
        assert found.on(plan.workers, plan.workers) == best
        plan, found = best, found.leaner(best)


@pytest.mark.parametrize(
    ("fields", "accumulations"),
    [
        ({}, range(1, 100)),
        ({"accumulation": 2}, range(1, 100)),
        ({"accumulation": 1}, [1]),
        ({"batch_norm": "sync"}, [1]),
        ({"local_state": ("memory",)}, [2]),  # as before
    ],
    ids=str,
)
def test_a_leaner_plan_keeps_what_the_job_needs(fields: dict[str, Any], accumulations: Any) -> None:
    """A strategy; one micro-batch where the batch is seen at once, and each one's own state."""
    found = leaner(chosen("data_parallel"), strategy="data_parallel", **fields)
    assert chosen("data_parallel").accumulation == 2
    if found is not None:
        best = found.plans[0]
        assert best.strategy == "data_parallel" and best.accumulation in accumulations
        assert (
            estimate_of(best).stage_memory_bytes[0] < 0.9 * estimate_of(chosen("data_parallel")).stage_memory_bytes[0]
        )
    else:
        assert fields, "recomputation alone may not be enough"


def test_a_pin_that_means_nothing_without_another_does_not_hide_all_plans() -> None:
    assert leaner(chosen("sharded"), plan="dp=8,zero=2,wire=bf16", strategy="sharded") is not None


def test_after_a_replan_of_few_workers_the_plan_fits_when_all_are_back() -> None:
    """Not one device, nor more micro-batches than rows need."""
    plan = chosen("data_parallel")
    plans = alternative_plans(table_job(min_workers=1, batch_size=64), replace(REQUEST, min_workers=1), (plan,))
    assert plans is not None
    shrunk = plans.on(1, 1)
    assert shrunk is not None
    found = plans.leaner(shrunk)
    assert found is not None
    small, whole = found.on(1, 1), found.on(plan.workers, 1)
    assert small is not None and small.workers == 1 and whole is not None and whole.workers == plan.workers
    assert whole.strategy != "one_device" and whole.accumulation * whole.mesh.data_ranks <= whole.batch_size


@pytest.mark.parametrize("strategy", ["data_parallel", "sharded"])
def test_plans_that_need_less_are_named_with_memory_and_time(strategy: str) -> None:
    plan = chosen(strategy)
    peak = PeakMemory(allocated_bytes=78 * GIB, reserved_bytes=79 * GIB)
    figures, remedy = explain_out_of_memory(REQUEST, plan, None, 3, peak)
    assert plan.estimate is not None
    predicted = max(plan.estimate.stage_memory_bytes)
    assert figures == (
        f"the plan predicted {predicted / GIB:.3g} GiB of the device's 79.1 GiB, "
        "and tensors used 78 GiB (79 GiB reserved)"
    )
    assert remedy.startswith("a plan that needs less memory: strategy=") and 0 < remedy.count("; or ") <= 2
    within = plans_within(REQUEST, int(0.9 * predicted))
    assert within and all(max(each.estimate.stage_memory_bytes) <= 0.9 * predicted for each in within if each.estimate)
    assert any(f'strategy="{each.strategy}", plan="{each.text}"' in remedy for each in within)
    for part in remedy.partition(": ")[2].split("; or "):
        Plan.parse(part.partition('plan="')[2].partition('"')[0])


def test_what_the_job_pins_does_not_hide_a_plan_that_fits() -> None:
    plan = chosen("data_parallel")
    pinned = replace(REQUEST, accumulation=plan.accumulation, workers=8)
    of_pinned, of_free = (explain_out_of_memory(each, plan, None, 0, None) for each in (pinned, REQUEST))
    assert of_pinned == of_free


def test_where_no_plan_needs_less_the_batch_or_the_nodes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACCELERATORS, "A100-80GB", replace(ACCELERATORS["A100-80GB"], memory_bytes=2**50))
    small = replace(REQUEST, cluster=tw.Cluster.parse("1xA100-80GB"), batch_size=1)
    least = search_plans(small).plans[0]
    assert least.estimate is not None
    tiny = replace(least, estimate=replace(least.estimate, stage_memory_bytes=(1000,)))
    _, remedy = explain_out_of_memory(small, tiny, None, 0, None)
    assert remedy.startswith("no plan on these nodes needs less memory: ")


def test_nothing_is_said_without_a_prediction() -> None:
    assert explain_out_of_memory(REQUEST, replace(chosen("sharded"), estimate=None), None, 0, None) == ("", "")


def test_a_plan_that_cannot_change_during_a_run_is_refused() -> None:
    with pytest.raises(JobError, match='on_oom= cannot be used with run="fit": TensorFlow'):
        tw.Job(name="a", model=object, train=table_job().train, batch_size=2, run="fit", on_oom="replan")
