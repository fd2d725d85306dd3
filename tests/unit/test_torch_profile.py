"""What a transformer of a billion parameters costs, found without its memory."""

from __future__ import annotations

import resource
import time

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from trainwright.strategies.torch.profile import profile_model

WIDTH, LAYERS, HEADS, TOKENS, WORDS = 2048, 24, 16, 512, 50_257


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        split = self.qkv(self.norms[0](x)).view(rows, tokens, 3, HEADS, width // HEADS)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """An embedding, blocks, and logits tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.logits.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def test_a_billion_parameters_take_seconds_and_no_memory() -> None:
    begun, before_kib = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    profile = profile_model(Transformer, {"tokens": np.zeros((1, TOKENS), np.int64)}, ("tokens",))
    assert time.process_time() - begun < 15
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 10**6
    known = tw.transformer_profile(hidden=WIDTH, layers=LAYERS, heads=HEADS, sequence=TOKENS, vocabulary=WORDS)
    assert profile.parameters == pytest.approx(known.parameters, rel=0.002) and profile.parameters > 1.2e9
    assert profile.flops == pytest.approx(known.flops, rel=0.01)
    assert sum(layer.matmuls for layer in profile.layers) == sum(layer.matmuls for layer in known.layers)
    kept = sum(layer.kept_numbers + layer.scores_numbers for layer in known.layers)
    assert sum(layer.kept_numbers for layer in profile.layers) == pytest.approx(kept, rel=0.35)
    assert len(set(profile.layers)) < 12 < LAYERS * 7 < len(profile.layers), "blocks that are alike are collapsed"
    step = [
        tw.estimate(one, tw.Cluster.parse("8xA100-80GB"), tw.Plan.parse("dp=8"), batch_size=64, precision="bf16").step_s
        for one in (profile, known)
    ]
    assert step[0] == pytest.approx(step[1], rel=0.25)
    assert torch.is_grad_enabled()
