"""The nearest things that would fit, where nothing does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from trainwright.core.cluster import Cluster
from trainwright.core.plan import Plan
from trainwright.strategies.search.plan_request import Question
from trainwright.strategies.search.ranking import answer

_MOST = 256  # times the nodes
_DEVICES = 16_384  # looked at


def together(plan: Plan) -> bool:
    """Whether all ranks step together."""
    return plan.topology != "independent"


def remedies(question: Question, suited: Callable[[Plan], bool] = together) -> str:
    """The least change of each kind after which some plan that is suited fits, in words; empty where there is none."""
    found = [*_offloaded(question, suited), *_smaller_batch(question, suited), *_more_nodes(question, suited)]
    return ", or ".join(found)


def _offloaded(question: Question, suited: Callable[[Plan], bool]) -> Iterator[str]:
    if question.cluster.accelerators and not question.offload:
        best = next(filter(suited, answer(replace(question, offload=True)).plans), None)
        if best is not None:
            yield f"keep the model's state in host memory: plan={best.text!r}"


def _smaller_batch(question: Question, suited: Callable[[Plan], bool]) -> Iterator[str]:
    size = question.batch_size // 2
    while size:
        if _fits(replace(question, batch_size=size), suited):
            yield f"use batch_size={size}"
            return
        size //= 2


def _more_nodes(question: Question, suited: Callable[[Plan], bool]) -> Iterator[str]:
    cluster, times = question.cluster, 2
    devices = cluster.accelerators or cluster.slots
    while times <= _MOST and devices * times <= _DEVICES and not question.workers:
        larger = Cluster(nodes=cluster.nodes * times)
        if _fits(replace(question, cluster=larger), suited):
            more = devices * (times - 1)
            kind = " and ".join(filter(None, cluster.kinds)) or cluster.accelerator or "CPU slots"
            yield f"use {more} {kind} more"
            return
        times *= 2


def _fits(question: Question, suited: Callable[[Plan], bool]) -> bool:
    return any(suited(plan) for plan in answer(question).plans)
