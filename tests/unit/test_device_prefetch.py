"""Batches that are copied to the device before their step: the same bits, and each tensor is used once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.gpu.lone import CPU, Lone, Run, Task
from tests.gpu.test_engines import ATTENTIVE, WIDE, assert_same
from tests.support.conformance import torch_case
from tests.support.conformance.problems import PROBLEMS
from trainwright.core.data import Feed, zero_weight
from trainwright.core.engine import Collation
from trainwright.strategies.torch.training import objective
from trainwright.strategies.torch.training.objective import DevicePrefetcher, JobFunctions

DEVICE = torch.device(CPU)


def prefetcher(task: Task, **changes: object) -> DevicePrefetcher:
    """One that copies to host memory: streams are tried on GPUs (`tests/gpu`)."""
    return DevicePrefetcher(JobFunctions.on_host(replace(task.spec, **changes), task.plan, "rank 0"), DEVICE)


def trained(task: Task, feeds: Sequence[Feed]) -> Run:
    with Lone(replace(task, feeds=feeds), CPU) as lone:
        reports = lone.train(0, len(feeds))
        return Run(reports=reports, state=torch_case.state(lone.files()))


@pytest.mark.parametrize("name", ["ragged", "clip", "weights"])
def test_steps_are_the_same(name: str) -> None:
    task = Task.of(PROBLEMS[name])
    copied = [*map(prefetcher(task), task.feeds)]
    assert all(batch.on_device is not None for feed in copied for part in feed.parts for batch in part)
    assert_same(trained(task, copied), trained(task, task.feeds))
    assert all(batch.on_device.take() is None for feed in copied for part in feed.parts for batch in part)


def test_random_numbers_are_the_same() -> None:
    task = Task.of(ATTENTIVE, spec=WIDE)
    assert_same(trained(task, [*map(prefetcher(task), task.feeds)]), trained(task, task.feeds))


def test_what_was_taken_once_is_converted_again() -> None:
    """As where a step is repeated with weight 0: the user's code may have changed the tensors in place."""
    task = Task.of(PROBLEMS["ragged"])
    caller = JobFunctions.on_host(task.spec, task.plan, "rank 0")
    batch = prefetcher(task)(task.feeds[0]).parts[0][0]
    first = caller.tensors(batch)
    again = caller.tensors(zero_weight(replace(task.feeds[0], parts=((batch,),))).parts[0][0])
    for name, tensor in first.items():
        assert again[name] is not tensor and torch.equal(again[name], tensor)


def test_what_the_step_has_to_do_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collate function of the user, a batch that takes much memory, a column that is not a tensor."""
    task = Task.of(PROBLEMS["ragged"])
    feed = task.feeds[0]
    assert prefetcher(task, collation=Collation(function=dict))(feed) is feed
    (batch,) = feed.parts[0][:1]
    text = replace(feed, parts=((replace(batch, columns={**batch.columns, "x": np.array(["a"] * batch.rows)}),),))
    assert prefetcher(task)(text) is text
    monkeypatch.setattr(objective, "_MAX_PREFETCHED_BYTES", 1)
    assert prefetcher(task)(feed) is feed


def test_nothing_is_copied_ahead_on_a_cpu() -> None:
    with Lone(Task.of(PROBLEMS["ragged"]), CPU) as lone:
        assert lone.engine.prefetcher() is None
