"""Text from a trained language model, token by token: what it predicts is appended to what it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.checkpoints import CheckpointReader, read_manifest
from trainwright.core.data import Batch, Feed
from trainwright.core.errors import JobError
from trainwright.core.job import Job
from trainwright.use import alone_here, find_checkpoint, lone_engine

Tokens = npt.NDArray[np.int64]
Logits = npt.NDArray[Any]
Predict = Callable[[Tokens], Logits]
"""predict(tokens (rows, context)) -> logits (rows, context, vocabulary) of what follows on each."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from logits.

    Attributes:
        temperature: that they are divided by; 0 takes the likeliest.
        top_k: of how many of the likeliest; by default of all.
        seed: of the draws: the same gives the same text.
    """

    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 0

    def problems(self) -> list[str]:
        """What is wrong with the numbers."""
        found = [] if self.temperature >= 0 else [f"temperature={self.temperature}: use 0 or more"]
        return found if self.top_k is None or self.top_k >= 1 else [*found, f"top_k={self.top_k}: use 1 or more"]

    def draw(self, logits: Logits, random: np.random.Generator) -> Tokens:
        """One token for each row of (rows, vocabulary)."""
        if not self.temperature:
            return np.asarray(logits.argmax(axis=1), dtype=np.int64)
        scaled = logits.astype(np.float64) / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[1]:
            unlikely = np.argpartition(scaled, -self.top_k, axis=1)[:, : -self.top_k]
            np.put_along_axis(scaled, unlikely, -np.inf, axis=1)
        return np.asarray((scaled + random.gumbel(size=scaled.shape)).argmax(axis=1), dtype=np.int64)  # Gumbel-max


def continued(predict: Predict, prompts: Tokens, context: int, count: int, sampling: Sampling) -> Tokens:
    """Prompts (rows, tokens) and `count` more tokens.

    The model is always given `context` tokens, so that shapes never change: what is not there yet is 0, and follows on
    what counts, where a causal model does not look. Of a longer text it is given the end: a token less than it takes,
    as in training what follows on the last one of a row was not in the row, and so was never judged.
    """
    most = max(context - 1, 1)
    random = np.random.default_rng(sampling.seed)
    text = np.concatenate((prompts, np.zeros((len(prompts), count), dtype=np.int64)), axis=1)
    for place in range(prompts.shape[1], text.shape[1]):
        window = np.zeros((len(text), context), dtype=np.int64)
        seen = text[:, max(place - most, 0) : place]
        window[:, : seen.shape[1]] = seen
        text[:, place] = sampling.draw(predict(window)[:, seen.shape[1] - 1], random)
    return text


def generate(
    job: Job, prompts: Any, *, count: int, sampling: Sampling, output: str | None = None, step: int | None = None
) -> Tokens:
    """See `trainwright.api.generate`."""
    given = np.asarray(prompts)
    problems = [*sampling.problems(), *_problems(job, given, count)]
    if problems:
        raise JobError(problems)
    store, checkpoint = find_checkpoint(job, step)
    alone, index, plan = alone_here(job, job.train)
    first = partial(job.train.row, index, job.columns)
    (name,) = job.arguments
    column = first().columns[name]
    if column.ndim != 2 or column.dtype.kind not in "iu":
        raise JobError(
            [f"column {name!r} has {column.ndim - 1} dimensions of {column.dtype}: tokens are integers in a row"]
        )
    spec = replace(alone.model_spec(1, first), outputs=() if output is None else (output,))
    engine = lone_engine(spec, plan)
    engine.load(CheckpointReader(store, job.name, checkpoint, read_manifest(store, job.name, checkpoint)))

    def predict(tokens: Tokens) -> Logits:
        columns = {name: tokens.astype(column.dtype)}
        batch = Batch(columns=columns, weights=np.ones(len(tokens)), samples=np.zeros(len(tokens), dtype=np.int64))
        feed = Feed(step=0, parts=((batch,),), data_ranks=range(1), total=1, rows=len(tokens))
        outputs = engine.predict_step(feed)
        if len(outputs) != 1:
            raise JobError([f"the model has outputs {', '.join(outputs)}: name the logits: output=..."])
        return next(iter(outputs.values()))

    return continued(predict, given.astype(np.int64), column.shape[1], count, sampling)


def _problems(job: Job, prompts: npt.NDArray[Any], count: int) -> list[str]:
    found = [] if count >= 1 else [f"count={count}: use 1 or more"]
    if prompts.ndim != 2 or not prompts.size or prompts.dtype.kind not in "iu":
        found.append("prompts= are tokens: give rows of as many integers, at least one")
    if len(job.arguments) != 1:
        found.append(f"inputs={job.inputs!r}: text is generated from one column of tokens")
    return found
