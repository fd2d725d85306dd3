"""The order of a pipeline stage's operations in each schedule, for the timeline of a step and for the engine.

Stages count from 0. A stage of an interleaved or a folded pipeline holds several chunks of layers, and the model passes
through it once for each: `core.plan.section_of` says which section of the model a chunk is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

from trainwright.core.plan import STREAMED_SCHEDULES, section_of, stage_of_section

OperationKind = Literal["forward", "backward", "inputs", "weights"]
SPLIT_BACKWARD = frozenset({"zero_bubble", "zbv"})  # schedules whose backward is in two halves


class Operation(NamedTuple):
    """An operation of a stage on one micro-batch."""

    # `forward`; `backward`, or in split schedules `inputs`, the gradients that the stage before waits for, and
    # `weights`, the gradients of the parameters
    kind: OperationKind
    micro_batch: int  # from 0
    chunk: int = 0  # of the stage


def stage_operations(
    schedule: str,
    *,
    stage: int,
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    begun: bool = False,
    followed: bool = False,
) -> list[Operation]:
    """Return all operations of a stage in one step.

    Args:
        schedule: `gpipe` (Huang et al., 2019), `1f1b` (PipeDream-Flush; Narayanan et al., 2021a), `interleaved`
            (Narayanan et al., 2021b), `zero_bubble` (ZB-H1; Qi et al., 2023), `zbv` (ZB-V; Qi et al., 2024) or
            `pipedream` (PipeDream-2BW; Narayanan et al., 2021a); empty for a model on one stage, or one without
            micro-batches.
        chunks: of each stage: some of an interleaved pipeline, two of `zbv`.
        begun: `pipedream` only: the step before has already computed the first forwards of this one.
        followed: `pipedream` only: this step computes the first forwards of the next one, whose micro-batches are
            numbered from `micro_batches`.

    Raises:
        ValueError: interleaved micro-batches are not a multiple of the stages.
    """
    if schedule in STREAMED_SCHEDULES:
        return _two_buffered(stage, stages, micro_batches, begun=begun, followed=followed)
    found: list[Operation] = list(_ORDERS[schedule](stage, stages, micro_batches, chunks))
    return found


def required_operation(
    operation: Operation, *, schedule: str, stage: int, stages: int, chunks: int = 1
) -> tuple[int, Operation] | None:
    """Return the stage and operation whose output an operation needs; None for the first of all.

    `weights` need only their own stage. The last section of the model starts backward from its own forward.
    """
    kind, micro_batch, chunk = operation
    if kind == "weights":
        return stage, Operation("inputs", micro_batch, chunk)
    section = section_of(schedule, stage=stage, stages=stages, chunk=chunk)
    if kind == "forward" and section == 0:
        return None
    last = section == chunks * stages - 1
    source = section - 1 if kind == "forward" else section if last else section + 1
    place, there = stage_of_section(schedule, section=source, stages=stages)
    return place, Operation("forward" if last else kind, micro_batch, there)


def _gpipe(stage: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Operation]:
    """All forwards, then all backwards, the last micro-batch first."""
    yield from (Operation("forward", number) for number in range(micro_batches))
    yield from (Operation("backward", number) for number in reversed(range(micro_batches)))


def _no_schedule(stage: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Operation]:
    """Each micro-batch forward and then backward."""
    for number in range(micro_batches):
        yield Operation("forward", number)
        yield Operation("backward", number)


def _one_forward_one_backward(stage: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Operation]:
    """As many forwards as stages follow, then backward and forward in turn, then the remaining backwards."""
    ahead = min(stages - 1 - stage, micro_batches)
    for number in range(micro_batches + ahead):
        if number < micro_batches:
            yield Operation("forward", number)
        if number >= ahead:
            yield Operation("backward", number - ahead)


def _two_buffered(stage: int, stages: int, micro_batches: int, *, begun: bool, followed: bool) -> list[Operation]:
    """The part of an endless 1F1B that begins after the last backward of the step before."""
    endless = list(_one_forward_one_backward(stage, stages, 2 * micro_batches, 1))
    end = endless.index(Operation("backward", micro_batches - 1)) + 1
    found = endless[stages - 1 - stage if begun else 0 : end]
    return found if followed else [each for each in found if each.micro_batch < micro_batches]


def _interleaved(stage: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Operation]:
    """1F1B over chunks: as many micro-batches as stages through one chunk, then through the next, as in Megatron-LM."""
    if micro_batches % stages:
        raise ValueError(f"{micro_batches} micro-batches are not a multiple of {stages} stages")
    total, round_ = micro_batches * chunks, stages * chunks
    ahead = min(2 * (stages - 1 - stage) + (chunks - 1) * stages, total)
    for number in range(total + ahead):
        if number < total:
            turn, place = divmod(number, round_)
            yield Operation("forward", turn * stages + place % stages, place // stages)
        if number >= ahead:
            turn, place = divmod(number - ahead, round_)
            yield Operation("backward", turn * stages + place % stages, chunks - 1 - place // stages)


def _zero_bubble(stage: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Operation]:
    """1F1B with delayed gradients of weights, on each stage by as many micro-batches as stages precede it."""
    late = min(stage, micro_batches)
    for kind, number, _ in _one_forward_one_backward(stage, stages, micro_batches, chunks):
        yield Operation("inputs" if kind == "backward" else kind, number)
        if kind == "backward" and number >= late:
            yield Operation("weights", number - late)
    yield from (Operation("weights", number) for number in range(micro_batches - late, micro_batches))


def _v_schedule(stage: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Operation]:
    """ZB-V, after torch's own: forwards and split backwards of both chunks in turn, remaining weights at the end.

    The order is that for at least 2 * stages - 1 micro-batches; with fewer, missing ones are left out.
    """
    after, count = stages - stage, max(micro_batches, 2 * stages - 1)
    down, up = Operation("forward", 0, 0), Operation("forward", 0, 1)
    back, again = ((Operation("inputs", 0, chunk), Operation("weights", 0, chunk)) for chunk in (0, 1))
    steps = (
        *[down] * (2 * after - 1),
        *[up, down] * stage,
        *[up, *again] * after,
        *[down, *back, up, *again] * (count - stages - after + 1),
        *[*back, up, *again] * (after - 1),
        *[back[0], again[0]] * stage,
        *back * after,
        *[again[1]] * stage,
        *[back[1]] * stage,
    )
    done = Counter[Operation]()
    for each in steps:
        if done[each] < micro_batches:
            yield each._replace(micro_batch=done[each])
        done[each] += 1


_ORDERS: Mapping[str, Callable[[int, int, int, int], Iterator[Operation]]] = {
    "": _no_schedule,
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero_bubble": _zero_bubble,
    "zbv": _v_schedule,
}
