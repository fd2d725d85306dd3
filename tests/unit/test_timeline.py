"""Orders of pipeline schedules, and one step as spans."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

import trainwright as tw
from tests.support.published_measurements import VTRAIN_LARGE, VTRAIN_SMALL, mosaicml, planned, vtrain
from trainwright.core.model_profile import LayerCost, ModelProfile
from trainwright.core.plan import FOLDED_SCHEDULES, Plan, loss_stage, section_of, stage_of_section
from trainwright.strategies.cost_model.estimator import expected_terms
from trainwright.strategies.cost_model.machine_model import DEFAULT, EFFICIENCY_NAMES, Calibration, MachineModel
from trainwright.strategies.cost_model.memory_estimate import micro_batches_in_flight
from trainwright.strategies.cost_model.pipeline_schedules import (
    SPLIT_BACKWARD,
    Operation,
    required_operation,
    stage_operations,
)
from trainwright.strategies.cost_model.step_timeline import GRADIENT_BUCKETS, Span, Timeline, timeline
from trainwright.strategies.cost_model.step_work import StepWork, compute_step_work, planned_step_work, sum_by_stage

SCHEDULES = ("", "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
# Nothing costs time but what grows with the work: no messages, no launches, nothing else in a step.
SMOOTH = Calibration(
    logs=tuple(-60.0 if name.endswith("_s") else log for name, log in zip(EFFICIENCY_NAMES, DEFAULT.logs, strict=True))
)
BLOCK = LayerCost(
    name="block", parameters=10**8, parameter_bytes=4 * 10**8, flops=1e12, output_numbers=1e6, kept_numbers=2e6,
    traffic_numbers=1e8,
)  # fmt: skip
MACHINE = MachineModel.of(tw.Cluster.parse("8x8xA100-80GB"))


@st.composite
def pipelines(draw: st.DrawFn, schedules: tuple[str, ...] = SCHEDULES) -> tuple[str, int, int, int]:
    """Schedule, stages, micro-batches and chunks."""
    schedule, stages = draw(st.sampled_from(schedules)), draw(st.integers(1, 6))
    if schedule == "interleaved":
        return schedule, stages, stages * draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return schedule, stages, draw(st.integers(1, 14)), 1 + (schedule in FOLDED_SCHEDULES)


def ordered(schedule: str, stages: int, micro_batches: int, chunks: int) -> list[list[Operation]]:
    return [
        stage_operations(schedule, stage=stage, stages=stages, micro_batches=micro_batches, chunks=chunks)
        for stage in range(stages)
    ]


@given(pipelines())
def test_every_micro_batch_goes_forward_and_back_once_through_each_chunk(case: tuple[str, int, int, int]) -> None:
    schedule, _, micro_batches, chunks = case
    kinds = {"forward", "inputs", "weights"} if schedule in SPLIT_BACKWARD else {"forward", "backward"}
    wanted = Counter(Operation(kind, m, c) for kind in kinds for m in range(micro_batches) for c in range(chunks))
    for operations in ordered(*case):
        assert Counter(operations) == wanted


def max_in_flight(operations: list[Operation]) -> int:
    """The most micro-batches, counted by chunk, whose activations a stage holds at once under an order."""
    held = most = 0
    for kind, _, _ in operations:
        held += {"forward": 1, "backward": -1, "inputs": 0, "weights": -1}[kind]
        most = max(most, held)
    return most


@given(pipelines())
def test_micro_batches_in_flight_are_what_the_memory_is_planned_for(case: tuple[str, int, int, int]) -> None:
    schedule, stages, micro_batches, chunks = case
    plan = Plan.parse(f"pp=2,schedule={schedule or '1f1b'},chunks={chunks}")
    plan = replace(plan, mesh=replace(plan.mesh, pipeline=stages))
    for stage, operations in enumerate(ordered(*case)):
        held = max_in_flight(operations)
        if stages > 1:
            planned = micro_batches_in_flight(replace(plan, schedule=schedule), micro_batches)
            assert held == pytest.approx(sum_by_stage(planned, schedule, stages)[stage])
        if schedule in ("gpipe", "1f1b"):
            assert held == (micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage))


@given(pipelines())
def test_each_section_has_one_place(case: tuple[str, int, int, int]) -> None:
    schedule, stages, _, chunks = case
    places = [stage_of_section(schedule, section=each, stages=stages) for each in range(stages * chunks)]
    assert sorted(places) == [(stage, chunk) for stage in range(stages) for chunk in range(chunks)]
    for section, (stage, chunk) in enumerate(places):
        assert section_of(schedule, stage=stage, stages=stages, chunk=chunk) == section
    assert loss_stage(schedule, stages=stages, chunks=chunks) == (0 if schedule in FOLDED_SCHEDULES else stages - 1)


def test_the_published_orders() -> None:
    """Figures 4 of Narayanan et al. (2021b) and 3 of Qi et al. (2023), 4 stages and 8 micro-batches."""
    letters = {"forward": "F", "backward": "B", "inputs": "B", "weights": "W"}

    def drawn(schedule: str, stage: int, chunks: int = 1) -> str:
        found = stage_operations(schedule, stage=stage, stages=4, micro_batches=8, chunks=chunks)
        return " ".join(f"{letters[kind]}{m + 1}{'ab'[chunk] if chunks > 1 else ''}" for kind, m, chunk in found)

    assert drawn("1f1b", 0) == "F1 F2 F3 F4 B1 F5 B2 F6 B3 F7 B4 F8 B5 B6 B7 B8"
    assert drawn("1f1b", 3) == "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8"
    assert drawn("interleaved", 3, 2).startswith("F1a F2a F3a F4a F1b B1b F2b B2b F3b B3b F4b B4b F5a B1a F6a B2a")
    assert drawn("zero_bubble", 0) == ("F1 F2 F3 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 F8 B5 W5 B6 W6 B7 W7 B8 W8")
    assert drawn("zero_bubble", 3) == ("F1 B1 F2 B2 F3 B3 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 F8 B8 W5 W6 W7 W8")
    with pytest.raises(ValueError, match="6 micro-batches are not a multiple of 4 stages"):
        stage_operations("interleaved", stage=0, stages=4, micro_batches=6, chunks=2)


def test_the_order_of_a_fold_is_torchs() -> None:
    names = {"FORWARD": "forward", "BACKWARD_INPUT": "inputs", "BACKWARD_WEIGHT": "weights"}
    for stages, micro_batches in ((1, 1), (2, 1), (2, 4), (3, 9), (4, 5), (4, 12), (6, 11)):
        theirs = ScheduleZBVZeroBubble.__new__(ScheduleZBVZeroBubble)
        theirs.pp_group_size, theirs._num_stages, theirs.num_stages = stages, 2 * stages, 2 * stages
        theirs._n_microbatches = micro_batches
        for stage, ours in enumerate(ordered("zbv", stages, micro_batches, 2)):
            found = [each for each in theirs._calculate_single_rank_operations(stage) if each is not None]
            assert ours == [
                (names[each.computation_type.name], each.microbatch_index, int(each.stage_index >= stages))
                for each in found
            ]


def work(schedule: str, stages: int, micro_batches: int, chunks: int = 1, more: str = "", layers: int = 12) -> StepWork:
    """Of equal layers, a sample a micro-batch."""
    plan = Plan.parse(f"pp=2,schedule={schedule or '1f1b'},chunks={chunks},micro_batch=1{more}")
    plan = replace(plan, schedule=schedule, mesh=replace(plan.mesh, pipeline=stages))
    profile = ModelProfile(framework="", layers=(BLOCK,) * layers)
    batch = micro_batches * plan.mesh.data_ranks
    return compute_step_work(profile, MACHINE, replace(plan, batch_size=batch, precision="bf16"))


def of_kind(found: Timeline, stage: int, *kinds: str) -> list[Span]:
    return [span for span in found.lanes[stage] if span.kind in kinds]


def done_on(found: Timeline, stage: int) -> list[tuple[Operation, Span, float]]:
    """Operations of a stage with their spans, and when what they give has come where it is needed."""
    spans = [span for span in found.lanes[stage] if span.kind != "idle"]
    return [
        (Operation(one.kind, one.micro_batch, one.chunk), one, two.end_s if two.kind == "send" else one.end_s)  # type: ignore[arg-type]
        for one, two in pairwise(spans)
        if one.kind in ("forward", "backward", "inputs", "weights")
    ]


@given(pipelines(), st.sampled_from(["", ",recompute=full", ",dp=2", ",dp=2,zero=1"]))
def test_spans_keep_the_order_and_wait_for_what_they_need(case: tuple[str, int, int, int], more: str) -> None:
    schedule, stages, _, chunks = case
    assume(chunks * stages <= 12)
    found = timeline(work(*case, more))
    come = {(stage, operation): at for stage in range(stages) for operation, _, at in done_on(found, stage)}
    for stage, lane in enumerate(found.lanes):
        assert lane[0].begin_s == 0.0 and lane[-1].end_s == found.step_s
        assert all(span.begin_s < span.end_s for span in lane)
        assert all(one.end_s == pytest.approx(two.begin_s) for one, two in pairwise(lane))
        assert [operation for operation, _, _ in done_on(found, stage)] == ordered(*case)[stage]
        for operation, span, _ in done_on(found, stage):
            source = required_operation(operation, schedule=schedule, stage=stage, stages=stages, chunks=chunks)
            assert source is None or span.begin_s >= come[source] - 1e-12
            apart = 0 if source is None else abs(source[0] - stage)
            assert apart <= 1 or (schedule == "interleaved" and apart == stages - 1)
    for reductions in found.reductions:
        assert all(one.end_s <= two.begin_s + 1e-12 for one, two in pairwise(reductions))


@given(pipelines(("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")))
def test_equal_stages_take_what_the_papers_say(case: tuple[str, int, int, int]) -> None:
    schedule, stages, micro_batches, chunks = case
    enough = {"zero_bubble": stages, "zbv": 2 * stages - 1}.get(schedule, 1)
    assume(12 % (stages * chunks) == 0 and micro_batches >= enough)
    asked = work(*case)
    asked = replace(asked, sent_bytes=np.zeros_like(asked.sent_bytes))
    found = timeline(asked, SMOOTH)
    forward, back = (sum(s.seconds for s in of_kind(found, 0, *kinds)) / micro_batches
                     for kinds in (("forward",), ("backward", "inputs", "weights")))  # fmt: skip
    assert back == pytest.approx(2 * forward)
    bubble = {"gpipe": forward + back, "1f1b": forward + back, "interleaved": (forward + back) / chunks,
              "zero_bubble": (forward + back) / 3, "zbv": (forward + back) / 6}[schedule]  # fmt: skip
    ended = found.lanes[0][-3 if found.lanes[0][-2].kind == "optimizer" else -2].end_s
    assert ended == pytest.approx(micro_batches * (forward + back) + (stages - 1) * bubble)
    assert found.share("idle") == pytest.approx((stages - 1) * bubble / found.step_s, rel=1e-6, abs=1e-9)


@given(st.integers(2, 6), st.integers(1, 8), st.integers(1, 3))
def test_steps_that_follow_each_other_are_one_long_1f1b(stages: int, more: int, steps: int) -> None:
    count = stages + more - 1
    for stage in range(stages):
        found = [
            each._replace(micro_batch=each.micro_batch + step * count)
            for step in range(steps)
            for each in stage_operations(
                "pipedream", stage=stage, stages=stages, micro_batches=count,
                begun=step > 0, followed=step < steps - 1,
            )
        ]  # fmt: skip
        assert found == stage_operations("1f1b", stage=stage, stages=stages, micro_batches=count * steps)
        plan = Plan.parse(f"pp={stages},schedule=pipedream")
        assert max_in_flight(found) == micro_batches_in_flight(plan, count)[stage] == stages - stage


@given(st.integers(2, 6), st.integers(0, 6), st.sampled_from(["", ",recompute=full", ",dp=2"]))
@settings(max_examples=25)
def test_a_step_that_others_follow_has_no_bubble(stages: int, more: int, choices: str) -> None:
    count = stages + more
    asked = work("pipedream", stages, count, more=choices)
    found = timeline(asked)
    assert found.step_s == pytest.approx(sum(expected_terms(asked, DEFAULT).values()), rel=0.01)
    for stage, lane in enumerate(found.lanes):
        assert lane[0].begin_s == 0.0 and lane[-1].end_s == found.step_s
        assert all(one.end_s == pytest.approx(two.begin_s) for one, two in pairwise(lane))
        for kind in ("forward", "backward"):  # all of a step's, though of two steps in part
            spans = of_kind(found, stage, kind)
            assert {span.micro_batch for span in spans} == set(range(count))
            assert sum(span.seconds for span in spans) == pytest.approx(count * max(span.seconds for span in spans))
        assert sum(span.seconds for span in of_kind(found, stage, "optimizer")) > 0
    if 12 % stages == 0 and "dp" not in choices:  # equal stages that reduce nothing
        assert found.share("idle") < 0.04
    assert found.step_s < timeline(work("1f1b", stages, count, more=choices)).step_s


def test_gradients_are_reduced_as_they_are_made_and_clipping_waits_for_all() -> None:
    found = timeline(work("1f1b", 4, 8, more=",dp=4"))
    for stage, reductions in enumerate(found.reductions):
        last = of_kind(found, stage, "backward")[-1]
        assert len(reductions) == GRADIENT_BUCKETS and last.begin_s < reductions[0].begin_s < last.end_s
        assert reductions[-1].begin_s >= last.end_s
    begun = {of_kind(found, stage, "optimizer")[0].begin_s for stage in range(4)}
    assert begun == {max(spans[-1].end_s for spans in found.reductions)}
    alone = timeline(work("", 1, 4))
    assert not alone.reductions[0] and [s.kind for s in alone.lanes[0]] == ["forward", "backward"] * 4 + ["optimizer", "other"]  # fmt: skip  # noqa: E501


def test_it_is_as_long_as_the_formulas_say_of_every_published_plan() -> None:
    apart = []
    for one in (*vtrain(VTRAIN_SMALL)[::6], *vtrain(VTRAIN_LARGE)[::4], *mosaicml("h100_80gb")[::4]):
        asked = planned_step_work(one.profile, one.cluster, planned(one))
        apart.append(timeline(asked).step_s / sum(expected_terms(asked, DEFAULT).values()) - 1)
    assert max(map(abs, apart)) <= 0.03 and math.fsum(map(abs, apart)) / len(apart) <= 0.005
