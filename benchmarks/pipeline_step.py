"""A pipeline's step against torch's own schedule: the same two processes take turns with blocks of both loops."""

from __future__ import annotations

from pathlib import Path

from duel import BLOCK, Loop, duel
from figures import Figure
from peers.plain_pipeline import PlainPipeline
from problem import BATCH_SIZE, THREADS, build_deep

from trainwright.worker import Worker

MICRO_BATCHES = 4
NOTE = (
    f"Eight linear layers of 6.6 million parameters in two stages, AdamW, batch {BATCH_SIZE} of the data of "
    f"`step_time` in {MICRO_BATCHES} micro-batches in the order 1F1B, two processes on one machine with {THREADS} "
    "thread each, gloo. The same two processes hold the same process group, a loop by hand around "
    "torch.distributed.pipelining's PipelineStage and Schedule1F1B, cut at the same layer, and trainwright's worker "
    "(its own loop, data stream, engine and records, without Ray around it, which reads the loss and its weight on "
    f"both stages in each step), and take turns with blocks of {BLOCK} steps behind a barrier; every other pair begins "
    "with the other loop."
)


def measure(folder: Path, *, quick: bool) -> list[Figure]:
    """The figures of this benchmark."""
    plan = f"pp=2,schedule=1f1b,accumulation={MICRO_BATCHES}"
    against = "torch's PipelineStage and Schedule1F1B"
    return duel("pipeline_step", folder, _by_hand, against, pairs=4 if quick else 30, plan=plan, model=build_deep)


def _by_hand(worker: Worker, rank: int) -> Loop:
    (cut,) = worker._order.plan.cuts
    return PlainPipeline(rank, cut, MICRO_BATCHES).run
