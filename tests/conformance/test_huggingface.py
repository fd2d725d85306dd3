"""A Llama of Hugging Face's transformers as its users have it, divided: it learns and writes as on one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from tests.support.conformance import problems, torch_case
from tests.support.conformance.harness import Pool, World
from tests.support.conformance.problems import PROBLEMS
from tests.support.conformance.torch_case import adamw
from trainwright.core.data import Batch, Columns, Feed, StepReport
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.driver.messages import Decoding, PredictRequest
from trainwright.inference.inference_model import gather_outputs, split_into_feeds
from trainwright.inference.run_inference import Logits, Sampling, Tokens, extend_prompts

TORCH = "trainwright.strategies.torch"
PROBLEM = replace(PROBLEMS["ragged"], seed=3)
VOCABULARY, CONTEXT, STEPS = 61, 11, 5


def llama() -> nn.Module:
    """Imported in the ranks alone: it takes seconds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config).double()
    return model


def cross_entropy(outputs: Any, tokens: Tensor) -> Tensor:
    """Of each token but the first."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)


def own_loss(model: Any, batch: Any) -> Any:
    """The output with the model's own loss, a mean over tokens, which it computes in float32."""
    return model(input_ids=batch["tokens"], labels=batch["tokens"])


def columns() -> Columns:
    return {"tokens": np.random.default_rng(5).integers(0, VOCABULARY, (PROBLEM.rows, CONTEXT))}


def sample() -> Batch:
    return Batch(columns={"tokens": columns()["tokens"][:1]}, weights=np.ones(1), samples=np.zeros(1, np.int64))


def trained(pool: Pool, engine: str, mesh: Mesh, step: Any = None, **choices: Any) -> Any:
    """Reports and last state of a few steps on batches that do not divide."""
    layout = Plan(
        strategy="conformance", engine=f"{TORCH}.engines.{engine}", mesh=mesh, batch_size=PROBLEM.batch_size,
        placement=WorkerResources(cpus=1), accumulation=2, **choices,
    )  # fmt: skip
    job = ModelSpec(
        model=llama, loss=None if step else cross_entropy, step=step, optimizer=adamw, total_steps=STEPS,
        inputs=("tokens",), keywords=("input_ids",), targets=("tokens",), clip_norm=1.0, seed=3, sample=sample,
        outputs=("logits",),
    )  # fmt: skip
    ids, data = problems.batches(PROBLEM), columns()
    feeds: list[list[Feed]] = [problems.feeds(PROBLEM, layout, step, ids[step], data) for step in range(STEPS)]
    with World(pool, "torch", layout, job) as world:
        world.start(feeds[0])
        reports: list[StepReport] = world.train(feeds)[0]
        return reports, torch_case.state(world.files()), written(world)


def written(world: World) -> list[list[int]]:
    """What the model writes on where it was trained: all ranks predict alike, one of them has the logits."""
    asked = list[str]()

    def answers(tokens: Tokens, place: int, decoding: Decoding) -> Logits | None:
        feeds = split_into_feeds(world.plan, {"tokens": tokens})
        requests = [PredictRequest(feeds=own, place=place, decoding=decoding) for own in feeds]
        found = gather_outputs(world.plan, world.every("decode", lambda rank: (requests[rank],)), feeds[0])
        pieces = [piece["logits"][:, 0] for piece in found]
        asked.extend([decoding] if pieces else [])
        return np.concatenate(pieces) if pieces else None

    def predict(tokens: Tokens, place: int) -> Logits:
        found = answers(tokens, place, "")
        assert found is not None
        return found

    def decode(tokens: Tokens, known: int) -> Logits | None:
        return answers(tokens, tokens.shape[1] - 1, "next" if known else "first")

    prompts = columns()["tokens"][:2, :3]
    texts = [
        extend_prompts(predict, prompts, CONTEXT, 4, Sampling(temperature=0.0), cached).tolist()
        for cached in (decode, None)
    ]
    assert texts[0] == texts[1]
    assert asked[:4] == ["first", "next", "next", "next"] or world.plan.mesh.pipeline > 1
    return texts[0]


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Any:
    """What one device does."""
    return trained(pool, "base:OneDevice", Mesh())


CUT: dict[str, Any] = {"cuts": ("model.layers.1",), "schedule": "1f1b"}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"engine": "fsdp:Sharded", "mesh": Mesh(shard=2)}, id="sharded"),
        pytest.param({"engine": "pipeline:Pipeline", "mesh": Mesh(pipeline=2), **CUT}, id="pipeline"),
        pytest.param({"engine": "tensor_parallel:TensorParallel", "mesh": Mesh(tensor=2)}, id="tensor"),
    ],
)
def test_a_llama_is_that_of_one_device(pool: Pool, layout: dict[str, Any], alone: Any) -> None:
    reports, state, text = trained(pool, **layout)
    expected, whole, told = alone
    assert text == told
    assert [report.loss for report in reports] == pytest.approx([report.loss for report in expected], rel=1e-9)
    norms = [report.gradient_norm for report in expected]
    assert [report.gradient_norm for report in reports] == pytest.approx(norms, rel=1e-9)
    assert state.keys() == whole.keys()
    for key in state.keys() - {"state.json"}:
        assert np.allclose(state[key], whole[key], rtol=1e-9, atol=1e-9), key


@pytest.mark.parametrize(
    ("engine", "mesh"), [("fsdp:Sharded", Mesh(shard=2)), ("tensor_parallel:TensorParallel", Mesh(tensor=2))]
)
def test_the_models_own_loss_is_the_mean_over_tokens(pool: Pool, engine: str, mesh: Mesh, alone: Any) -> None:
    reports, *_ = trained(pool, engine, mesh, own_loss)
    assert [report.loss for report in reports] == pytest.approx([report.loss for report in alone[0]], rel=1e-5)
