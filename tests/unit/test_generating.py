"""Text from what a model predicts: what it is given, how a token is drawn, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpt
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from tests.support import prediction_jobs, torch_engines
from trainwright.core.data import Batch, Columns, Feed
from trainwright.core.errors import JobError
from trainwright.core.topology import Capabilities
from trainwright.inference import run_inference as generating
from trainwright.inference.run_inference import Logits, Sampling, Tokens, extend_prompts
from trainwright.strategies.torch.engines.base import OneDevice

VOCABULARY, CONTEXT = 7, 4
GREEDY = Sampling(temperature=0.0)


def counting(tokens: Tokens, place: int) -> Logits:
    """What follows on a token is the next number; it is as sure as it was given tokens."""
    assert tokens.shape[1] == CONTEXT
    return np.eye(VOCABULARY)[(tokens[:, place] + 1) % VOCABULARY] * 9.0


def test_the_likeliest_follows_and_of_a_long_text_the_end_is_given() -> None:
    text = extend_prompts(counting, np.array([[1, 2], [5, 6]]), CONTEXT, 6, GREEDY)
    assert text.tolist() == [[1, 2, 3, 4, 5, 6, 0, 1], [5, 6, 0, 1, 2, 3, 4, 5]]
    assert extend_prompts(counting, np.arange(6)[None] % VOCABULARY, CONTEXT, 1, GREEDY)[0, -1] == 6


def test_only_what_training_judged_is_taken() -> None:
    """Of a row's tokens all but the last had a next one to be judged by."""

    def untrained_at_the_end(tokens: Tokens, place: int) -> Logits:
        return counting(tokens, place) * (-1 if place == CONTEXT - 1 else 1)

    text = extend_prompts(untrained_at_the_end, np.array([[1, 2]]), CONTEXT, 6, GREEDY)
    assert text.tolist() == [[1, 2, 3, 4, 5, 6, 0, 1]]
    assert (
        extend_prompts(lambda tokens, place: np.eye(VOCABULARY)[tokens[:, place]], np.array([[1, 2]]), 1, 2, GREEDY)[
            0, -1
        ]
        == 2
    )


def test_as_many_as_wished_are_drawn_from_where_all_are_as_likely() -> None:
    logits, random = np.zeros((200, VOCABULARY)), np.random.default_rng(0)
    assert len(set(Sampling(top_k=2).draw(logits, random).tolist())) == 2


def test_the_same_seed_draws_the_same() -> None:
    flat = lambda tokens, place: np.zeros((len(tokens), VOCABULARY))  # noqa: E731
    one, again, other = (
        extend_prompts(flat, np.zeros((2, 1), np.int64), CONTEXT, 20, Sampling(seed=seed)).tolist()
        for seed in (1, 1, 2)
    )
    assert one == again != other


def test_tokens_are_drawn_by_their_chance_among_the_likeliest() -> None:
    chances = np.array([0.5, 0.3, 0.15, 0.05])
    logits, random = np.log(np.tile(chances, (20_000, 1))), np.random.default_rng(0)
    drawn = np.bincount(Sampling().draw(logits, random), minlength=4) / 20_000
    np.testing.assert_allclose(drawn, chances, atol=0.015)
    top = Counter(Sampling(top_k=2).draw(logits, random).tolist())
    assert top.keys() == {0, 1} and top[0] / 20_000 == pytest.approx(0.5 / 0.8, abs=0.015)
    cold = np.bincount(Sampling(temperature=0.5).draw(logits, random), minlength=4) / 20_000
    np.testing.assert_allclose(cold, chances**2 / (chances**2).sum(), atol=0.015)


def test_what_cannot_be_continued_is_said_at_once() -> None:
    rows = {"x": np.zeros((4, CONTEXT), np.int64), "z": np.zeros(4)}
    job = tw.Job(name="n", model=dict, optimizer=list, loss=max, inputs=("x", "z"), batch_size=1,
                 train=tw.datasets.table(rows))  # fmt: skip
    with pytest.raises(JobError) as caught:
        tw.generate(job, [[0.5]], count=0, temperature=-1.0, top_k=0)
    assert len(caught.value.problems) == 5


def served(monkeypatch: pytest.MonkeyPatch, logits: npt.NDArray[np.float64], dtype: type[np.integer]) -> tw.Job:
    """A job whose model, trained on tokens of a type, answers every feed with the same for each row."""

    def predict_step(feed: Feed) -> Columns:
        return {"output": np.stack([logits] * feed.rows)}

    engine = SimpleNamespace(load=lambda reader: None, predict_step=predict_step, capabilities=Capabilities())
    monkeypatch.setattr(generating, "with_checkpoint", lambda job, step, load: load(None))
    monkeypatch.setattr(generating, "single_rank_engine", lambda spec, plan: engine)
    return tw.Job(name="n", model=lambda: torch.nn.Embedding(VOCABULARY, VOCABULARY), optimizer=torch.optim.SGD,
                  loss=max, inputs="x", batch_size=4,
                  train=tw.datasets.table({"x": np.zeros((4, CONTEXT), dtype)}))  # fmt: skip


@pytest.mark.parametrize("shape", [(VOCABULARY,), (1, VOCABULARY), (CONTEXT, 2, VOCABULARY)])
def test_an_output_that_is_not_one_of_each_token_is_no_logits(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    job = served(monkeypatch, np.zeros(shape), np.int64)
    with pytest.raises(JobError, match=r"is not logits of shape \(rows, tokens, vocabulary\)"):
        tw.generate(job, [[1, 2]], count=2, here=True)


def test_tokens_that_the_column_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both those that are given and those that are drawn."""
    logits = np.zeros((CONTEXT, 300))
    logits[:, 255] = 1.0
    job = served(monkeypatch, logits, np.uint8)
    assert tw.generate(job, [[255]], count=2, temperature=0.0, here=True).tolist() == [[255, 255, 255]]
    for prompt in (256, -1):
        with pytest.raises(JobError, match=f"token {prompt} does not fit the uint8 .*: 0 to 255"):
            tw.generate(job, [[1, prompt]], count=1, here=True)
    logits[:, 299] = 2.0
    with pytest.raises(JobError, match="token 299 does not fit"):
        tw.generate(job, [[1]], count=2, temperature=0.0, here=True)


SIZE = gpt.Size(context=12, width=16, depth=2, heads=4, groups=2, hidden=16, batch_size=2, epochs=1, rate=0.1,
                vocabulary=31)  # fmt: skip


class Forgetful(nn.Module):
    """A language model whose argument `cache` means something else."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt.GPT(SIZE)

    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        return self.model(tokens)


class Output(dict[str, Any]):
    """With its items as attributes, as transformers has it."""

    __getattr__ = dict.__getitem__


class Returning(nn.Module):
    """A language model with a cache as transformers 5.24 names it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt.GPT(SIZE)

    def forward(self, tokens: Tensor, cache: Any = None, use_cache: bool | None = None) -> Any:
        kept = {} if cache is None else cache
        return Output(logits=self.model(tokens, kept if use_cache else None), cache=kept)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=12,
    ))  # fmt: skip
    return model


@pytest.mark.parametrize(
    ("build", "fields", "keeps", "heats"),
    [
        pytest.param(lambda: gpt.GPT(SIZE), {"inputs": "tokens"}, True, (0.0, 1.0), id="own"),
        pytest.param(llama, {"inputs": {"input_ids": "tokens"}}, True, (1.0,), id="huggingface"),
        pytest.param(Returning, {"inputs": {"tokens": "tokens"}}, True, (1.0,), id="returned"),
        pytest.param(Forgetful, {"inputs": "tokens"}, False, (1.0,), id="none"),
    ],
)
def test_with_a_cache_the_text_is_the_same_and_each_token_is_computed_once(
    build: Callable[[], nn.Module],
    fields: Any,
    keeps: bool,
    heats: tuple[float, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the rows are divided into micro-batches, and in a text that becomes longer than a row of training."""
    widths = list[int]()

    def counted() -> nn.Module:
        model = build()
        model.register_forward_pre_hook(
            lambda _, args, named: widths.append((*args, *named.values())[0].shape[1]), with_kwargs=True
        )
        return model

    def loss(outputs: Any, tokens: Tensor) -> Tensor:
        logits = outputs if isinstance(outputs, Tensor) else outputs.logits
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        ).view(len(tokens), -1)

    rows = {"tokens": np.random.default_rng(3).integers(0, 31, (4, SIZE.context))}
    data = tw.datasets.table(rows)
    job = prediction_jobs.job(tmp_path, model=counted, loss=loss, targets="tokens", train=data, batch_size=2, **fields)
    batch = Batch(columns=rows, weights=np.ones(4), samples=np.arange(4))
    prediction_jobs.train(job, 5, lambda _: batch)
    plan = torch_engines.plan(engine="trainwright.strategies.torch.engines.base:OneDevice", batch_size=2)
    monkeypatch.setattr(generating, "_local_plan", lambda job, data: (job, data.index(), plan))  # it takes seconds
    options: Any = {"count": 14, "top_k": 9, "output": None if isinstance(fields["inputs"], str) else "logits"}
    found = {}
    for cached in (True, False):
        monkeypatch.setattr(OneDevice, "capabilities", replace(OneDevice.capabilities, decodes=cached))
        widths.clear()
        found[cached] = [
            tw.generate(job, rows["tokens"][:3, :4], temperature=heat, seed=7, **options).tolist() for heat in heats
        ]
        # Two micro-batches. Eleven tokens of context at most: after the prompt, seven are computed one by one.
        once = [4, 4, *[1] * 14, *[12] * 12] if keeps and cached else [12] * 28
        told = [4, 4] if cached and not keeps else []  # the first call shows that nothing is kept
        assert widths == [*told, *once] * len(heats)
    assert found[True] == found[False]
