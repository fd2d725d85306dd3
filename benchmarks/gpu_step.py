"""A transformer's step on one GPU against a loop written by hand, what of the GPU's peak it reaches, and its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import Figure, compare, versus
from local_ranks import LocalRank, choose_plan, one_node_cluster, run_ranks, worker_config_of
from paired_loops import BLOCK, BlockPairs, Loop, block_pairs, measure_blocks
from problem import job
from torch import nn
from torch.nn import functional

import trainwright as tw
from trainwright.core.cluster import ACCELERATORS, Accelerator, find_accelerator
from trainwright.driver.messages import RunRequest
from trainwright.strategies.torch.profiling import probe
from trainwright.worker.worker import Worker
from trainwright.worker.worker_config import WorkerConfig

BATCH, PAIRS = 8, 4
EPOCHS = 250  # of four batches; more than are measured
MEMORY_TARGET = 1.15
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the decoder."""

    words: int
    width: int
    layers: int
    heads: int
    tokens: int

    @property
    def operations(self) -> float:
        """Of one step."""
        parameters = 12 * self.width * self.width * self.layers + self.words * self.width
        return 6.0 * BATCH * self.tokens * (parameters + self.layers * self.width * self.tokens)


FULL = Size(words=32768, width=2048, layers=20, heads=16, tokens=1024)
SMOKE = Size(words=256, width=64, layers=2, heads=2, tokens=32)
NOTE = (
    f"A decoder of {FULL.layers} blocks, {FULL.width} wide, torch's fused attention, {FULL.words} words: 1.1 billion "
    f"parameters in float32, computed under bf16 autocast, AdamW, {BATCH} rows of {FULL.tokens} tokens, one process, "
    "one GPU, no Ray. The same process holds the plan's worker (its own loop, data stream, engine and records, which "
    "reads the loss of each step) and a loop by hand, which reads none until a block ends; they take turns with blocks "
    f'of {BLOCK} steps. `both compiled`: `compile="inductor"`, and `Module.compile()` by hand. '
    "`share of the peak` is 6 operations for each parameter but the tables' and each token, and 6 for each pair of "
    "tokens of causal attention and number of the width, over time and the data sheet's bf16 rate. Memory is the most "
    "that torch's allocator had given out in steps of the worker alone, beside the plan's estimate; the probe's rates "
    "are beside the data sheet's, both as large matrix products and copies reach them. Of both the ratio is the larger "
    "over the smaller."
)


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.three, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width), twice."""
        parts = self.three(self.norms[0](hidden)).unflatten(-1, (3, self._heads, -1)).movedim(-2, 1).unbind(3)
        made = functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.out(made.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.norms[1](hidden))


class Decoder(nn.Module):
    """Predicts the next word."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.words, self.places = nn.Embedding(size.words, width), nn.Parameter(torch.zeros(size.tokens, width))
        self.blocks = nn.Sequential(*(Block(width, size.heads) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, size.words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """(rows, tokens) to (rows, tokens, words)."""
        return self.head(self.norm(self.blocks(self.words(words) + self.places)))


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    """The figures of this benchmark; those of a smoke run may be of the CPU."""
    if not (ON_GPU or smoke):
        raise SystemExit("gpu_step measures a GPU, and torch finds none here; --smoke runs a small model on the CPU")
    size, found = SMOKE if smoke else FULL, sheet()
    what = "whole block per step, against a loop by hand"
    config, estimated_bytes = _make_config(folder, size, found, compiled=False)
    times = _block_ms(config, size, block_pairs(PAIRS, smoke=smoke), compiled=False)
    peaks = [[100 * size.operations / (each / 1e3) / found.rate("bf16") for each in one] for one in times]
    figures = [
        compare("gpu_step", what, "ms", *times, target=1.02, strict=True),
        compare("gpu_step", "share of the peak", "%", *peaks, ratio=False),
        *_memory(config, estimated_bytes),
    ]
    if ON_GPU:
        config, _ = _make_config(folder, size, found, compiled=True)
        times = _block_ms(config, size, block_pairs(PAIRS, smoke=smoke), compiled=True)
        figures.insert(1, compare("gpu_step", f"{what}, both compiled", "ms", *times, target=1.02, strict=True))
    return figures + _probed(found)


def _make_config(folder: Path, size: Size, accelerator: Accelerator, *, compiled: bool) -> tuple[WorkerConfig, float]:
    """Return the configuration of the worker, as the driver would make it, and the bytes that the plan needs."""
    wanted = job(
        folder, model=partial(Decoder, size), loss=losses, optimizer=adam, train=tw.datasets.table(words(size)),
        batch_size=BATCH, epochs=EPOCHS, workers=1, strategy="one_device", precision="bf16",
        compile="inductor" if compiled else "auto",
    )  # fmt: skip
    decision = choose_plan(wanted, tw.Cluster.parse(f"1x{accelerator.name}") if ON_GPU else one_node_cluster(1))
    assert decision.chosen.estimate is not None, "every plan of torch's has one"
    (estimated_bytes,) = decision.chosen.estimate.stage_memory_bytes
    return worker_config_of(wanted, decision), estimated_bytes


def _block_ms(config: WorkerConfig, size: Size, pairs: BlockPairs, *, compiled: bool) -> list[list[float]]:
    """Milliseconds per step of each block, of ours and of the loop by hand."""
    by_hand = partial(_by_hand, size, compiled)
    ((ours, plain),) = run_ranks(config, partial(measure_blocks, make_peer=by_hand, pairs=pairs))
    return [[1e3 * block.whole_s / pairs.block_steps for block in found] for found in (ours, plain)]


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One for each word."""
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's AdamW, slow enough for random words."""
    return torch.optim.AdamW(parameters, lr=1e-5)


def words(size: Size) -> dict[str, Any]:
    """Four batches of random words, each with the word after it."""
    words = np.random.default_rng(0).integers(0, size.words, (4 * BATCH, size.tokens + 1))
    return {"x": words[:, :-1].copy(), "y": words[:, 1:].copy()}


def sheet() -> Accelerator:
    """The data sheet of the GPU; what a probe finds where there is no data sheet or no GPU."""
    if not ON_GPU:
        return probe("CPU", DEVICE)
    name = torch.cuda.get_device_name(0)
    found = find_accelerator(name)
    if found is None:
        found = ACCELERATORS[name] = probe(name.replace(" ", "-"))
    return found


def _memory(config: WorkerConfig, estimated_bytes: float) -> list[Figure]:
    """The peak of torch's allocator beside the plan's estimate; nothing on the CPU, whose allocator counts no peak."""
    if not ON_GPU:
        return []
    (peak,) = run_ranks(config, _peak)
    return [versus("gpu_step", "memory", "GiB", peak / 2**30, estimated_bytes / 2**30, target=MEMORY_TARGET)]


def _peak(local_rank: LocalRank) -> int:
    """The most bytes that torch had given out in a few steps."""
    torch.cuda.reset_peak_memory_stats()
    local_rank.worker.run(RunRequest(steps=range(4)))
    return torch.cuda.max_memory_allocated()


def _by_hand(size: Size, compiled: bool, _worker: Worker, _rank: int) -> Loop:
    return ByHand(size, compiled=compiled).run


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """A batch, in pinned memory where there is a GPU."""

    x: torch.Tensor
    y: torch.Tensor


class ByHand:
    """A training loop as torch's tutorials have it."""

    def __init__(self, size: Size, *, compiled: bool = False) -> None:
        self.model: nn.Module = Decoder(size).to(DEVICE)
        if compiled:
            self.model.compile()
        self.optimizer = adam(self.model.parameters())
        columns = {name: torch.from_numpy(column) for name, column in words(size).items()}
        if ON_GPU:
            columns = {name: column.pin_memory() for name, column in columns.items()}
        self._batches = [
            Tensors(**{name: column[start : start + BATCH] for name, column in columns.items()})
            for start in range(0, 4 * BATCH, BATCH)
        ]

    def run(self, steps: int) -> list[float]:
        """Seconds of each of so many steps, in the mean: the host runs ahead of the GPU."""
        begun = time.perf_counter()
        for number in range(steps):
            batch = self._batches[number % len(self._batches)]
            words, following = batch.x.to(DEVICE, non_blocking=True), batch.y.to(DEVICE, non_blocking=True)
            self.optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = losses(self.model(words), following).mean()
            loss.backward()
            self.optimizer.step()
        if ON_GPU:
            torch.cuda.synchronize()
        return [(time.perf_counter() - begun) / steps] * steps


def _probed(sheet: Accelerator) -> list[Figure]:
    """What the probe finds beside the data sheet."""
    found = probe("probed", DEVICE)
    rates: dict[str, Callable[[Accelerator], float]] = {
        "bf16, TFLOP/s": lambda each: each.flops_per_s["bf16"] / 1e12,
        "fp32, TFLOP/s": lambda each: each.flops_per_s["fp32"] / 1e12,
        "its memory, GB/s": lambda each: each.memory_bytes_per_s / 1e9,
    }
    return [versus("gpu_step", f"probe, {name}", "", rate(found), rate(sheet)) for name, rate in rates.items()]
