"""A small language model with grouped attention, tied weights and a frozen bias."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.conformance import problems

WIDTH, HEADS, TOKENS = 8, 4, 7


class Attention(nn.Module):
    """Over heads that it counts itself."""

    def __init__(self, groups: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.fused = HEADS, groups, WIDTH // HEADS, fused
        if fused:
            self.all = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.query = nn.Linear(WIDTH, WIDTH)
            self.key, self.value = (nn.Linear(WIDTH, groups * self.size, bias=False) for _ in range(2))
        self.drop = nn.Dropout(0.0)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, tokens, _ = hidden.shape
        made = (
            self.all(hidden).split(WIDTH, -1)
            if self.fused
            else (self.query(hidden), self.key(hidden), self.value(hidden))
        )
        counts = (self.heads, self.groups, self.groups)
        query, key, value = (
            each.view(rows, tokens, count, self.size).transpose(1, 2) for each, count in zip(made, counts, strict=True)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(self.drop(mixed.transpose(1, 2).reshape(rows, tokens, self.heads * self.size)))


class Block(nn.Module):
    def __init__(self, groups: int, fused: bool) -> None:
        super().__init__()
        self.norm, self.attention, self.other = nn.LayerNorm(WIDTH), Attention(groups, fused), nn.LayerNorm(WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm(hidden))
        given = self.other(hidden)
        return hidden + self.down(self.drop(nn.functional.silu(self.gate(given)) * self.up(given)))


class Language(nn.Module):
    """Tied embedding and head, a frozen bias, a spare parameter, and a buffer that counts."""

    def __init__(self, groups: int = 2, fused: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.places = nn.Parameter(torch.zeros(problems.FEATURES, WIDTH))
        self.blocks = nn.ModuleList(Block(groups, fused) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)
        self.head.weight = self.table.weight
        self.spare = nn.Linear(2, 2)
        self.blocks[0].down.bias.requires_grad_(False)
        self.double()
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.table((inputs.abs() * 3).long() % TOKENS) + self.places
        for block in self.blocks:
            hidden = block(hidden)
        outputs: Tensor = self.head(self.norm(hidden))
        return outputs[:, -1]
