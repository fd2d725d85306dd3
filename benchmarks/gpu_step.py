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
from duel import BLOCK, Loop, blocks
from figures import Figure, compare, versus
from party import Seat, decided, order_of, together
from problem import job
from torch import nn
from torch.nn import functional

import trainwright as tw
from trainwright.core.accelerators import ACCELERATORS, Accelerator, accelerator
from trainwright.strategies.torch.probe import probe
from trainwright.worker import Worker

WORDS, WIDTH, LAYERS, HEADS, TOKENS, BATCH = 32768, 2048, 20, 16, 1024, 8
MEMORY_TARGET = 1.15
NOTE = (
    f"A decoder of {LAYERS} blocks, {WIDTH} wide, torch's fused attention, {WORDS} words: 1.1 billion parameters in "
    f"float32, computed under bf16 autocast, AdamW, {BATCH} rows of {TOKENS} tokens, one process, one GPU, no Ray. The "
    "same process holds the plan's worker (its own loop, data stream, engine and records, which reads the loss of each "
    f"step) and a loop by hand, which reads none until a block ends; they take turns with blocks of {BLOCK} steps. "
    "`share of the peak` is 6 operations for each parameter but the tables' and each token, and 6 for each pair of "
    "tokens of causal attention and number of the width, over time and the data sheet's bf16 rate. Memory is the most "
    "that torch's allocator had given out in steps of the worker alone, beside the plan's estimate; the probe's rates "
    "are beside the data sheet's, both as large matrix products and copies reach them. Of both the ratio is the larger "
    "over the smaller."
)


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.three, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width), twice."""
        parts = self.three(self.norms[0](hidden)).unflatten(-1, (3, HEADS, -1)).movedim(-2, 1).unbind(3)
        made = functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.out(made.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.norms[1](hidden))


class Decoder(nn.Module):
    """Foretells the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(TOKENS, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """(rows, tokens) to (rows, tokens, words)."""
        return self.head(self.norm(self.blocks(self.words(words) + self.places)))


def measure(folder: Path, *, quick: bool) -> list[Figure]:
    """The figures of this benchmark."""
    sheet = _sheet()
    pairs = 3 if quick else 8
    steps = (pairs + 1) * BLOCK
    wanted = job(
        folder, model=Decoder, loss=losses, optimizer=adam, train=tw.datasets.table(_words()), batch_size=BATCH,
        epochs=-(-steps // 4), workers=1, strategy="one_device", precision="bf16",
    )  # fmt: skip
    decision = decided(wanted, tw.Cluster.parse(f"1x{sheet.name}"))
    assert decision.chosen.estimate is not None, "every plan of torch's has one"
    order = order_of(wanted, decision)
    (peak,) = together(order, _peak)
    ((ours, plain),) = together(order, partial(blocks, by_hand=_by_hand, pairs=pairs))
    times = [[1e3 * block.whole_s / BLOCK for block in found] for found in (ours, plain)]
    what = "whole block per step, against a loop by hand"
    peaks = [[100 * _operations() / (each / 1e3) / sheet.rate("bf16") for each in one] for one in times]
    (estimated,) = decision.chosen.estimate.stage_memory_bytes
    return [
        compare("gpu_step", what, "ms", *times, target=1.05, strict=True),
        compare("gpu_step", "share of the peak", "%", *peaks, ratio=False),
        versus("gpu_step", "memory", "GiB", peak / 2**30, estimated / 2**30, target=MEMORY_TARGET),
        *_probed(sheet),
    ]


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One for each word."""
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's AdamW, slow enough for random words."""
    return torch.optim.AdamW(parameters, lr=1e-5)


def _words() -> dict[str, Any]:
    """Four batches of random words, each with the word behind it."""
    words = np.random.default_rng(0).integers(0, WORDS, (4 * BATCH, TOKENS + 1))
    return {"x": words[:, :-1].copy(), "y": words[:, 1:].copy()}


def _sheet() -> Accelerator:
    """The data sheet of the GPU; what a probe finds where there is none."""
    name = torch.cuda.get_device_name(0)
    found = accelerator(name)
    if found is None:
        found = ACCELERATORS[name] = probe(name.replace(" ", "-"))
    return found


def _operations() -> float:
    """Of one step."""
    blocks_of = 12 * WIDTH * WIDTH * LAYERS
    return 6.0 * BATCH * TOKENS * (blocks_of + WORDS * WIDTH + LAYERS * WIDTH * TOKENS)


def _peak(seat: Seat) -> int:
    """The most bytes that torch had given out in a few steps."""
    torch.cuda.reset_peak_memory_stats()
    seat.worker.run(range(4))
    return torch.cuda.max_memory_allocated()


def _by_hand(_worker: Worker, _rank: int) -> Loop:
    return ByHand().run


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """A batch in pinned memory."""

    x: torch.Tensor
    y: torch.Tensor


class ByHand:
    """A training loop as torch's tutorials have it."""

    def __init__(self) -> None:
        self._model = Decoder().cuda()
        self._optimizer = adam(self._model.parameters())
        columns = {name: torch.from_numpy(column).pin_memory() for name, column in _words().items()}
        self._batches = [
            Tensors(**{name: column[start : start + BATCH] for name, column in columns.items()})
            for start in range(0, 4 * BATCH, BATCH)
        ]

    def run(self, steps: int) -> list[float]:
        """Seconds of each of so many steps, in the mean: the host runs ahead of the GPU."""
        begun = time.perf_counter()
        for number in range(steps):
            batch = self._batches[number % len(self._batches)]
            words, following = batch.x.cuda(non_blocking=True), batch.y.cuda(non_blocking=True)
            self._optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = losses(self._model(words), following).mean()
            loss.backward()
            self._optimizer.step()
        torch.cuda.synchronize()
        return [(time.perf_counter() - begun) / steps] * steps


def _probed(sheet: Accelerator) -> list[Figure]:
    """What the probe finds beside the data sheet."""
    found = probe("probed")
    rates: dict[str, Callable[[Accelerator], float]] = {
        "bf16, TFLOP/s": lambda each: each.flops_per_s["bf16"] / 1e12,
        "fp32, TFLOP/s": lambda each: each.flops_per_s["fp32"] / 1e12,
        "its memory, GB/s": lambda each: each.memory_bytes_per_s / 1e9,
    }
    return [versus("gpu_step", f"probe, {name}", "", rate(found), rate(sheet)) for name, rate in rates.items()]
