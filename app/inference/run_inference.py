"""Evaluate the checkpoint of a run, or generate text with it: in the layout of its training, or in this process."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.core import formatting
from trainwright.core.cluster import Cluster, Node
from trainwright.core.data import Batch, Columns, MetricSums
from trainwright.core.engine import CheckpointChoice, CheckpointRef
from trainwright.core.errors import JobError
from trainwright.core.job import Job
from trainwright.core.metric_states import compute_states, metric_states, with_states
from trainwright.core.plan import Plan
from trainwright.datasets.data_source import Index
from trainwright.datasets.dataset import Dataset, first_batch
from trainwright.datasets.loading.batch_loader import BatchLoader
from trainwright.driver.messages import Decoding, PredictRequest
from trainwright.inference.inference_model import (
    plan_on_cluster,
    single_replica,
    split_into_feeds,
    trained_plan,
    trained_steps,
)
from trainwright.planning.job_file import load_job
from trainwright.planning.planner import choose
from trainwright.planning.profiler import profile_job
from trainwright.storage.checkpoints import checkpoints_of, find_checkpoint, load_newest, with_checkpoint
from trainwright.storage.object_store import open_store
from trainwright.storage.weight_files import base_weights
from trainwright.strategies import single_rank_engine
from trainwright.worker.loaders import Quarantine, skipping_reader
from trainwright.worker.worker import predicted


def evaluate(
    job: Job | str, *, step: CheckpointChoice = None, here: bool = False, verbose: bool = False
) -> dict[str, float]:
    """Return loss and metrics of a checkpoint over the job's evaluation set.

    It runs on workers of the cluster under the last plan of the run, with fewer replicas where there is less room. When
    a worker is lost or hangs, all workers are replaced and continue with the same batches, up to the job's `failures=`
    times in a row. With a plan for one worker, it runs in this process on one device.

    Args:
        step: the checkpoint at this step, or "best" (see `tw.Checkpointing`); by default the newest.
        here: in this process on one CPU in any case.
        verbose: show Ray's own output.

    Raises:
        TrainwrightError: there is no evaluation set, no checkpoint, it does not fit the model, or the cluster has no
            room for the plan; some batches took longer than `hang_deadline_s`, by default 15 minutes.
    """
    job = load_job(job) if isinstance(job, str) else job
    if job.evaluate is None:
        raise JobError(["evaluate= is missing: give the job a data set to evaluate on"])
    plan = None if here else trained_plan(job)
    return _evaluate_here(job, step) if plan is None or plan.workers == 1 else _evaluate_on(plan, job, step, verbose)


def _evaluate_on(plan: Plan, job: Job, step: CheckpointChoice, verbose: bool) -> dict[str, float]:
    """Evaluate on workers of the cluster. Only the evaluation set is read."""
    from trainwright.inference.sharded_inference import ShardedModel

    store, *_ = checkpoints_of(job, step)
    index, judged, plan = job.evaluate.index(), job.replace(train=job.evaluate), plan_on_cluster(plan, job, verbose)

    def ranked(checkpoint: CheckpointRef) -> dict[str, float]:
        base = base_weights(job)
        with ShardedModel(
            judged, plan, store, checkpoint, train=index, evaluate=index, base=base, total_steps=trained_steps(job)
        ) as ranks:
            return compute_states(ranks.evaluate()).means()

    return load_newest(job, step, ranked)


def _evaluate_here(job: Job, step: CheckpointChoice) -> dict[str, float]:
    """Evaluate in this process on one device. The number of threads stays as it is."""
    alone, index, plan = _local_plan(job, job.evaluate)
    sample = partial(first_batch, job.evaluate, index, job.columns)
    spec = alone.model_spec(trained_steps(job), sample, weights=base_weights(job))
    engine = single_rank_engine(spec, plan, guest=True)
    with_checkpoint(job, step, engine.load)
    quarantine = Quarantine(open_store(job.storage), job.name, "evaluate")
    stream = BatchLoader(
        job.evaluate, index, feeding=plan.feed_of(0), columns=job.columns, skipper=skipping_reader(job, quarantine),
        **job.ordering(evaluate=True),
    )  # fmt: skip
    states = metric_states(job.metrics)
    sums = sum((engine.evaluate_step(feed, states) for feed in stream.feeds(0)), MetricSums())
    if quarantine.count:
        skipped = formatting.count(quarantine.count, "sample")
        print(f"skipped {skipped} of the evaluation set; see quarantine/ in the folder of the run", file=sys.stderr)
    return compute_states(with_states(sums, states)).means()


def _local_plan(job: Job, data: Dataset) -> tuple[Job, Index, Plan]:
    """Return the job for one CPU device of this machine, the data set's index, and the plan. Raises as planning."""
    alone, index = job.on_one_device(accelerator="cpu"), data.index()
    here = Cluster(nodes=(Node(name="here", cpus=os.cpu_count() or 1, memory_bytes=0),))
    return alone, index, choose(profile_job(alone, data, index), here, alone).chosen


# --- Generate text with a trained language model, token by token ------------------------------------------------------


Tokens = npt.NDArray[np.int64]
Logits = npt.NDArray[Any]
_Predict = Callable[[Tokens, int], Logits]
"""predict(tokens (rows, context), place) -> logits (rows, vocabulary) of the token after that place."""
_Decode = Callable[[Tokens, int], Logits | None]
"""decode(tokens (rows, new), earlier tokens) -> logits after the last; None where the earlier ones are not kept."""
_Ask = Callable[[Columns, int, Decoding], Sequence[Columns]]
"""ask(columns of some rows, place, decoding) -> the model's outputs at that place, in pieces; none without a cache."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is sampled from logits."""

    temperature: float = 1.0  # that they are divided by; 0 takes the likeliest
    top_k: int | None = None  # of how many of the likeliest; by default of all
    seed: int = 0  # of the draws: the same gives the same text

    def problems(self) -> list[str]:
        """Return the problems of the fields."""
        found = [] if self.temperature >= 0 else [f"temperature={self.temperature}: use 0 or more"]
        return found if self.top_k is None or self.top_k >= 1 else [*found, f"top_k={self.top_k}: use 1 or more"]

    def draw(self, logits: Logits, random: np.random.Generator) -> Tokens:
        """Return one token for each row of (rows, vocabulary)."""
        if not self.temperature:
            return np.asarray(logits.argmax(axis=1), dtype=np.int64)
        scaled = logits.astype(np.float64) / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[1]:
            unlikely = np.argpartition(scaled, -self.top_k, axis=1)[:, : -self.top_k]
            np.put_along_axis(scaled, unlikely, -np.inf, axis=1)
        return np.asarray((scaled + random.gumbel(size=scaled.shape)).argmax(axis=1), dtype=np.int64)  # Gumbel-max


def extend_prompts(
    predict: _Predict, prompts: Tokens, context: int, count: int, sampling: Sampling, decode: _Decode | None = None
) -> Tokens:
    """Return prompts (rows, tokens) with `count` more tokens.

    The model is always given `context` tokens, so that shapes never change: what is not there yet is 0, and follows on
    what counts, where a causal model does not look. Of a longer text it is given the end: a token less than it takes,
    as in training what follows on the last one of a row was not in the row, and so was never judged.

    Where the model can keep what it computed of earlier tokens, `decode` is given only the new ones. In a text that is
    longer than that end, each token moves all others to another place, so that nothing can be kept.
    """
    most = max(context - 1, 1)
    random = np.random.default_rng(sampling.seed)
    text = np.concatenate((prompts, np.zeros((len(prompts), count), dtype=np.int64)), axis=1)
    known = 0
    for place in range(prompts.shape[1], text.shape[1]):
        logits = None
        if decode is not None and place <= most:
            logits = decode(text[:, known:place], known)
            if logits is None and known:  # on new workers: those that kept the earlier tokens were lost
                logits = decode(text[:, :place], 0)
        known = place
        if logits is None:
            decode = None
            window = np.zeros((len(text), context), dtype=np.int64)
            seen = text[:, max(place - most, 0) : place]
            window[:, : seen.shape[1]] = seen
            logits = predict(window, seen.shape[1] - 1)
        text[:, place] = sampling.draw(logits, random)
    return text


def generate(
    job: Job,
    prompts: Any,
    *,
    count: int,
    sampling: Sampling,
    output: str | None = None,
    step: CheckpointChoice = None,
    here: bool = False,
    verbose: bool = False,
) -> Tokens:
    """See `trainwright.api.generate`."""
    given = np.asarray(prompts)
    problems = [*sampling.problems(), *_problems(job, given, count)]
    if problems:
        raise JobError(problems)
    index = job.train.index()
    column = _column(job, first_batch(job.train, index, job.columns))
    _cast(given, column.dtype)
    outputs = () if output is None else (output,)
    plan = None if here else trained_plan(job)
    replica = single_replica(plan) if plan else None  # others would have nothing to do
    with contextlib.ExitStack() as stack:
        if replica is None or replica.workers == 1:
            ask = _ask_here(job, step, outputs)
        else:
            from trainwright.inference.sharded_inference import ShardedModel

            store, checkpoint = find_checkpoint(job, step)
            fitting, alone = plan_on_cluster(replica, job, verbose), job.replace(evaluate=None)
            base = base_weights(job)
            ranks = ShardedModel(alone, fitting, store, checkpoint, train=index, outputs=outputs, base=base)
            ask = stack.enter_context(ranks).predict

        def predict(tokens: Tokens, place: int) -> Logits:
            return _logits(ask({job.arguments[0]: _cast(tokens, column.dtype)}, place, ""))

        def decode(tokens: Tokens, known: int) -> Logits | None:
            columns = {job.arguments[0]: _cast(tokens, column.dtype)}
            pieces = ask(columns, tokens.shape[1] - 1, "next" if known else "first")
            return _logits(pieces) if pieces else None

        return extend_prompts(predict, given.astype(np.int64), column.shape[1], count, sampling, decode)


def _ask_here(job: Job, step: CheckpointChoice, outputs: tuple[str, ...]) -> _Ask:
    """Return the model in this process, on one device."""
    alone, index, plan = _local_plan(job, job.train)
    spec = alone.model_spec(1, partial(first_batch, job.train, index, job.columns), weights=base_weights(job))
    engine = single_rank_engine(replace(spec, outputs=outputs), plan)
    with_checkpoint(job, step, engine.load)

    cache: dict[int, Any] = {}

    def ask(columns: Columns, place: int, decoding: Decoding) -> Sequence[Columns]:
        (feeds,) = split_into_feeds(plan, columns)
        return predicted(engine, PredictRequest(feeds=feeds, place=place, decoding=decoding), cache)

    return ask


def _column(job: Job, first: Batch) -> npt.NDArray[Any]:
    """Return the model's input column, of one row. Raises JobError where it holds no tokens."""
    (name,) = job.arguments
    column = first.columns[name]
    if column.ndim != 2 or column.dtype.kind not in "iu":
        raise JobError(
            [f"column {name!r} has {column.ndim - 1} dimensions of {column.dtype}: tokens are integers in a row"]
        )
    return column


def _cast(tokens: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return tokens in the type of the model's input. Raises JobError where one does not fit."""
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    for token in (int(tokens.min()), int(tokens.max())):
        if not least <= token <= most:
            raise JobError([f"token {token} does not fit the {dtype} that the model was trained on: {least} to {most}"])
    return tokens.astype(dtype)


def _logits(pieces: Sequence[Columns]) -> Logits:
    """Return the model's only output (rows, vocabulary) from pieces at one place: (rows, 1, vocabulary)."""
    names = list(pieces[0])
    if len(names) != 1:
        raise JobError([f"the model has outputs {', '.join(names)}: name the logits: output=..."])
    logits = np.concatenate([piece[names[0]] for piece in pieces])
    if logits.ndim != 3 or logits.shape[1] != 1:
        raise JobError(
            [f"the model's {names[0]} is not logits of shape (rows, tokens, vocabulary): name the logits: output=..."]
        )
    return logits[:, 0]


def _problems(job: Job, prompts: npt.NDArray[Any], count: int) -> list[str]:
    found = [] if count >= 1 else [f"count={count}: use 1 or more"]
    if prompts.ndim != 2 or not prompts.size or prompts.dtype.kind not in "iu":
        found.append("prompts= are tokens: give rows of as many integers, at least one")
    if len(job.arguments) != 1:
        found.append(f"inputs={job.inputs!r}: text is generated from one column of tokens")
    return found
