"""A pipeline's step against torch's own schedule: the same two processes take turns with blocks of both loops."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from figures import Figure, compare
from local_ranks import run_ranks
from paired_loops import BLOCK, BlockPairs, Loop, block_pairs, compare_loops, measure_blocks, worker_config_for
from peers.plain_pipeline import PlainPipeline, StageAlone
from problem import BATCH_SIZE, THREADS, build_deep

from trainwright.worker.worker import Worker

MICRO_BATCHES = 4
BOUNDS = {
    "1f1b": (1.0, "(m + p - 1) / m"),
    "zero_bubble": (1 / 3, "(m + (p - 1) / 3) / m"),
    "zbv": (0.0, "1"),
}
"""Micro-batches for whose time a stage has to be idle, and the factor in words.

Huang et al. (2019); Qi et al. (2023), where a forward, the gradients of its inputs and those of its weights take
equally long.
"""
NOTE = (
    f"Eight linear layers of 6.6 million parameters in two stages, AdamW, batch {BATCH_SIZE} of the data of "
    f"`step_time` in {MICRO_BATCHES} micro-batches in the order 1F1B, two processes on one machine with {THREADS} "
    "thread each, gloo. The same two processes hold the same process group, a loop by hand around "
    "torch.distributed.pipelining's PipelineStage and Schedule1F1B, cut at the same layer, and trainwright's worker "
    "(its own loop, data stream, engine and records, without Ray around it, which reads the loss and its weight on "
    f"both stages in each step), and take turns with blocks of {BLOCK} steps behind a barrier; every other pair begins "
    "with the other loop."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    plan = f"pp=2,schedule=1f1b,accumulation={MICRO_BATCHES}"
    against, pairs = "torch's PipelineStage and Schedule1F1B", block_pairs(60, smoke=smoke)
    figures = compare_loops("pipeline_step", folder, _by_hand, against, pairs, 1.0, plan=plan, model=build_deep)
    return [*figures, *(_bound(folder / name, block_pairs(20, smoke=smoke), name) for name in BOUNDS)]


def _bound(folder: Path, pairs: BlockPairs, schedule: str) -> Figure:
    """The step of a schedule beside that of stages which are idle no longer than the schedule has to be."""
    idle, told = BOUNDS[schedule]
    plan = f"pp=2,schedule={schedule},accumulation={MICRO_BATCHES}"
    config = worker_config_for(folder, pairs.total_steps, {"plan": plan, "model": build_deep})
    ranks = run_ranks(config, partial(measure_blocks, make_peer=partial(_alone, idle), pairs=pairs))
    ours = [1e3 * block.median_s for block in ranks[0][0]]
    bound = [1e3 * max(both.median_s for both in pair) for pair in zip(*(alone for _, alone in ranks), strict=True)]
    of = "" if schedule == "1f1b" else f" of {schedule}"
    what = f"median step{of}, against the bound: slowest stage x {told}, m = {MICRO_BATCHES}, p = 2"
    return compare("pipeline_step", what, "ms", ours, bound)


def _by_hand(worker: Worker, rank: int) -> Loop:
    (cut,) = worker._order.plan.cuts
    return PlainPipeline(rank, cut, MICRO_BATCHES).run


def _alone(idle: float, worker: Worker, rank: int) -> Loop:
    return StageAlone(rank, worker._order.plan.cuts, MICRO_BATCHES, idle).run
