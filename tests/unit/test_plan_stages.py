"""Plans of pipelines: where they are cut, when they are chosen, and why they cannot be."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest

import trainwright as tw
from tests.support.planner_cases import DEEP, LAPTOP, LAYERS, decide
from trainwright.core.cluster import Cluster, Node
from trainwright.core.errors import PlanError
from trainwright.core.plan import loss_stage
from trainwright.strategies.search.registry import STALE_WEIGHTS

PIPELINE = "trainwright.strategies.torch.engines.pipeline:Pipeline"


def test_a_pipeline_is_cut_before_named_layers() -> None:
    chosen = decide(profile=DEEP, strategy="pipeline", plan="schedule=1f1b").chosen
    assert chosen.engine == PIPELINE and sum(chosen.stages) == len(LAYERS)
    (first,) = accumulate(chosen.stages[:-1])
    assert chosen.cuts == (LAYERS[first].name,)
    assert ("cut before", LAYERS[first].name) in [tuple(row) for row in _rows(chosen)]


def test_chunks_are_cut_apart() -> None:
    chosen = decide(profile=DEEP, plan="pp=2,schedule=interleaved,chunks=2,accumulation=4").chosen
    assert chosen.engine == PIPELINE and chosen.cuts == ("layers.2", "layers.4", "layers.6")


def test_a_model_that_is_folded_ends_where_it_begins() -> None:
    chosen = decide(profile=DEEP, plan="pp=2,schedule=zbv,accumulation=4").chosen
    assert chosen.chunks == 2 and chosen.cuts == ("layers.2", "layers.4", "layers.6")
    assert [chosen.feed_of(rank).inputs for rank in range(2)] == [True, False]
    assert loss_stage(chosen.schedule, stages=2, chunks=2) == 0
    memory = chosen.estimate.stage_memory_bytes  # type: ignore[union-attr]
    heavy = replace(DEEP, layers=(replace(LAYERS[0], parameters=10**6), *LAYERS[1:-1], replace(LAYERS[-1], parameters=10**6)))  # fmt: skip  # noqa: E501
    fuller = decide(profile=heavy, plan="pp=2,schedule=zbv,accumulation=4").chosen
    assert fuller.stages == chosen.stages and fuller.estimate is not None
    assert fuller.estimate.stage_memory_bytes[1] == memory[1]  # both ends are on the first stage
    added = 900_000 * 4  # to the gradients, one layer at a time
    assert fuller.estimate.stage_memory_bytes[0] - memory[0] == 2 * 900_000 * 16 + added


@pytest.mark.parametrize("text", ["pp=2,schedule=zbv,chunks=3", "pp=2,schedule=1f1b,chunks=2"])
def test_chunks_that_a_schedule_cannot_have(text: str) -> None:
    with pytest.raises(PlanError, match="chunks"):
        decide(profile=DEEP, plan=text)


def test_an_interleaved_stage_holds_as_many_chunks_as_are_asked_for() -> None:
    chosen = decide(profile=DEEP, plan="pp=2,schedule=interleaved,chunks=4,accumulation=4").chosen
    assert chosen.chunks == 4 and len(chosen.cuts) == 7


def test_without_micro_batches_it_is_model_parallelism() -> None:
    chosen = decide(profile=DEEP, strategy="model_parallel").chosen
    assert chosen.engine == PIPELINE and chosen.schedule == "" and len(chosen.cuts) == 1


def test_it_is_chosen_where_a_device_cannot_hold_the_model() -> None:
    assert decide(profile=DEEP).chosen.strategy == "data_parallel"
    small = Cluster(nodes=(Node(name="a", cpus=2, memory_bytes=14 * 2**20),))
    decision = decide(small, profile=DEEP)
    assert decision.chosen.strategy in ("sharded", "pipeline", "model_parallel")
    assert "data_parallel" in {item.strategy for item in decision.infeasible}


def test_stale_gradients_are_never_chosen_unasked() -> None:
    asked = decide(profile=DEEP, plan="pp=2,schedule=pipedream,accumulation=4").chosen
    drained = decide(profile=DEEP, plan="pp=2,schedule=1f1b,accumulation=4").chosen
    assert asked.engine == PIPELINE and asked.streamed and asked.estimate and drained.estimate
    assert ("note", STALE_WEIGHTS) in _rows(asked) and "one step stale" in STALE_WEIGHTS
    assert asked.estimate.step_s < drained.estimate.step_s  # so that it would be, were it offered
    added = zip(asked.estimate.stage_memory_bytes, drained.estimate.stage_memory_bytes, strict=True)
    assert [one - other for one, other in added] == [4 * 100_000 * 4] * 2
    for plan in ("pp=2,accumulation=4", "pp=2", None):
        decision = decide(profile=DEEP, plan=plan, strategy="pipeline")
        offered = [decision.chosen, *(each.plan for each in decision.rejected)]
        assert not any(each.streamed or STALE_WEIGHTS in each.notes for each in offered)
    assert not any(plan.streamed for plan in tw.rank(DEEP, LAPTOP, batch_size=64, precision="fp32"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": None, "step": max, "inputs": ()}, "step= calls the model as a whole"),
        ({"profile": replace(DEEP, untraced="ValueError: no")}, "cannot be traced.*ValueError: no"),
        ({"profile": replace(DEEP, keras_backend="torch")}, "the calls of Keras layers"),
        ({"workers": 1}, "workers=1 is pinned"),
        ({"plan": "pp=2,dp=2", "workers": 2, "strategy": None}, "multiply to 4, and the job has workers=2.*workers=4"),
        ({"plan": "pp=9", "strategy": None}, "pipeline: 9 stages for 8 layers .use pp=8 or fewer"),
        ({"plan": "pp=2,dp=8", "batch_size": 4, "strategy": None}, "batch_size=4 is smaller than the 8 data ranks"),
        ({"plan": "pp=2,schedule=interleaved,accumulation=3"}, "3 micro-batches are not a multiple of the 2 stages"),
        ({"plan": "pp=4,schedule=pipedream,accumulation=3"}, "3 micro-batches for the 4 stages.*accumulation=4"),
        ({"plan": "pp=2,schedule=interleaved,chunks=5,accumulation=2"}, "chunks|layers"),
    ],
)
def test_why_it_cannot_be(changes: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){words}"):
        decide(LAPTOP, **{"profile": DEEP, "strategy": "pipeline", **changes})  # type: ignore[arg-type]


def test_a_world_that_may_shrink_begins_with_the_stages_that_there_is_room_for() -> None:
    chosen = decide(LAPTOP, profile=DEEP, strategy="pipeline", min_workers=1, max_workers=2).chosen
    assert chosen.mesh.pipeline == chosen.workers == 2


def test_what_is_computed_again_has_engines_for_modules_of_torch() -> None:
    for how in ("selective", "full"):
        assert decide(profile=DEEP, plan=f"dp=2,recompute={how}").chosen.recompute == how
    for profile in (replace(DEEP, keras_backend="torch"), replace(DEEP, framework="tensorflow")):
        with pytest.raises(PlanError):
            decide(profile=profile, plan="dp=2,recompute=full")


def _rows(chosen: object) -> list[tuple[str, str]]:
    from trainwright.reporting.plan_view import plan_rows

    return plan_rows(chosen)  # type: ignore[arg-type]


SPLIT = replace(
    DEEP, heads=4, layers=tuple(replace(each, splits=True, leads=not number % 2) for number, each in enumerate(LAYERS))
)


@pytest.mark.parametrize(
    ("text", "engine", "zero"),
    [
        ("tp=2", "tensor_parallel:TensorParallel", 0),
        ("dp=2,tp=2", "tensor_parallel:TensorParallel", 0),
        ("fsdp=2,tp=2", "fsdp:Sharded", 3),
        ("dp=2,zero=2,tp=2", "fsdp:Sharded", 2),
        ("dp=2,fsdp=2,tp=2", "fsdp:Sharded", 3),
        ("pp=2,tp=2", "pipeline:Pipeline", 0),
        ("pp=2,fsdp=2", "pipeline:Pipeline", 1),
        ("pp=2,dp=2,fsdp=2", "pipeline:Pipeline", 1),
        ("pp=2,dp=2,tp=2", "pipeline:Pipeline", 0),
        ("pp=2,fsdp=2,tp=2", "pipeline:Pipeline", 1),
    ],
)
def test_products_are_carried_out(text: str, engine: str, zero: int) -> None:
    chosen = decide(profile=SPLIT, plan=f"{text},accumulation=2").chosen
    assert chosen.engine.endswith(engine) and chosen.zero == zero
    assert not any(SPLIT.layers[int(cut.partition(".")[2]) - 1].leads for cut in chosen.cuts if chosen.mesh.tensor > 1)


def test_a_jobs_own_tensor_plan_makes_layers_divisible() -> None:
    with pytest.raises(PlanError, match="no layer of this model is known to be divisible"):
        decide(profile=DEEP, plan="tp=2")
    own = {"layers.[024]": "column", "layers.[135]": "row"}
    assert decide(profile=DEEP, plan="tp=2", tensor_plan=own).chosen.mesh.tensor == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pp=2,fsdp=2,schedule=zero_bubble", "schedule=zero_bubble gives wrong losses"),
        ("pp=2,fsdp=2,schedule=pipedream,accumulation=4", "two versions of a stage's weights, and FSDP2 gathers one"),
        ("tp=3", "no degree from 2 divides 4 heads"),
    ],
)
def test_combinations_that_are_wrong_are_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){words}"):
        decide(profile=SPLIT, plan=text)
