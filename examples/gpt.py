"""The second job: a language model, a GPT with current components, on the King James text.

    trainwright fit examples/gpt.py --set plan=pp=2,schedule=1f1b,accumulation=8    # or: make lm
    trainwright fit examples/gpt.py --set size=cluster
    python examples/generate.py "In the beginning"

It learns from the first 95% of the text and is evaluated on the rest, in bits per character: the negative
log-likelihood of each token of the rest given the tokens before it, summed in bits, over the characters of the rest.
Every token counts once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import sample_data
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

import trainwright as tw

FOLDER = Path("data/king-james")
EPOCH = 4096


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of a model and of its training.

    Attributes:
        vocabulary: byte-pair tokens.
        context: tokens that the model sees at once.
        width, depth: width of the residual stream, and number of blocks.
        heads, groups: heads of the queries, and heads of keys and values.
        hidden: width inside a feed-forward layer.
        batch_size: sequences of `context` tokens.
        epochs: of EPOCH sequences.
        rate: highest learning rate.
    """

    vocabulary: int = 2048
    context: int
    width: int
    depth: int
    heads: int
    groups: int
    hidden: int
    batch_size: int
    epochs: int
    rate: float


SIZES = {
    "tiny": Size(
        context=32, width=32, depth=2, heads=4, groups=2, hidden=64, batch_size=64, epochs=4, rate=6e-3, vocabulary=512
    ),
    "small": Size(
        context=64, width=128, depth=4, heads=4, groups=2, hidden=344, batch_size=32, epochs=8, rate=6e-3,
        vocabulary=1024,
    ),
    "third": Size(
        context=64, width=72, depth=3, heads=4, groups=2, hidden=192, batch_size=32, epochs=8, rate=6e-3,
        vocabulary=1024,
    ),
    "laptop": Size(
        context=128, width=192, depth=5, heads=6, groups=2, hidden=512, batch_size=32, epochs=6, rate=6e-3
    ),
    "cluster": Size(
        context=1024, width=1024, depth=24, heads=16, groups=4, hidden=2816, batch_size=256, epochs=6, rate=1e-3
    ),
}  # fmt: skip


# --- the model --------------------------------------------------------------------------------------------------------


Cache = dict[nn.Module, tuple[Tensor, Tensor]]
"""Keys and values (rows, heads, tokens, size) of the tokens so far, by attention layer."""


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023) with rotary positions (Su et al. 2021)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.width // size.heads
        self.query = nn.Linear(size.width, size.heads * self.head, bias=False)
        self.key = nn.Linear(size.width, size.groups * self.head, bias=False)
        self.value = nn.Linear(size.width, size.groups * self.head, bias=False)
        self.out = nn.Linear(size.heads * self.head, size.width, bias=False)
        turns = torch.outer(torch.arange(size.context), 10_000.0 ** -torch.linspace(0, 1, self.head // 2))
        self.register_buffer("cos", turns.cos(), persistent=False)
        self.register_buffer("sin", turns.sin(), persistent=False)

    def forward(self, hidden: Tensor, cache: Cache | None = None) -> Tensor:
        """(rows, tokens, width) to the same; after the first tokens, a cache takes one token of each row at a time."""
        queries, keys, values = (
            part(hidden).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        known = cache[self][0].shape[2] if cache and self in cache else 0
        queries, keys = self._turned(queries, known), self._turned(keys, known)
        if cache is not None:
            if known:
                keys, values = (torch.cat(pair, dim=2) for pair in zip(cache[self], (keys, values), strict=True))
            cache[self] = keys, values
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=not known, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _turned(self, heads: Tensor, first: int) -> Tensor:
        """(rows, heads, tokens, size) to the same, with rotary positions from `first` on applied."""
        cos, sin = (table[first : first + heads.shape[2]] for table in (self.cos, self.sin))
        left, right = heads.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, tokens, width) to the same."""
        return self.down(functional.silu(self.gate(hidden)) * self.up(hidden))


class Block(nn.Module):
    """Attention and feed-forward, each on the normalised stream (RMSNorm, Zhang and Sennrich 2019)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.before_attention, self.attention = nn.RMSNorm(size.width), Attention(size)
        self.before_forward, self.feed_forward = nn.RMSNorm(size.width), FeedForward(size)

    def forward(self, hidden: Tensor, cache: Cache | None = None) -> Tensor:
        """(rows, tokens, width) to the same."""
        hidden = hidden + self.attention(self.before_attention(hidden), cache)
        return hidden + self.feed_forward(self.before_forward(hidden))


class GPT(nn.Module):
    """Tokens (rows, tokens) to logits (rows, tokens, vocabulary)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.scale = math.sqrt(size.width)
        for name, matrix in self.named_parameters():
            if matrix.dim() == 2:  # layers that add to the residual stream start smaller in a deeper network
                into = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(matrix, std=(matrix.shape[1] * (2 * size.depth if into else 1)) ** -0.5)
        nn.init.zeros_(self.head.weight)  # at first all tokens are equally likely

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the logits of the token that follows each token; `tw.generate` gives the cache."""
        hidden = self.embedding(tokens) * self.scale
        for block in self.blocks:
            hidden = block(hidden, cache)
        return self.head(self.norm(hidden))


# --- the text ---------------------------------------------------------------------------------------------------------


def tokenizer(text: str, vocabulary: int) -> Tokenizer:
    """Learn byte-pair tokens (Sennrich et al. 2016) from a file, and store them next to it until the file changes."""
    kept = Path(text).with_name(f"tokens-{vocabulary}.json")
    if not kept.is_file() or kept.stat().st_mtime < Path(text).stat().st_mtime:
        learnt = Tokenizer(models.BPE())
        learnt.pre_tokenizer, learnt.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        learnt.train([text], trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False))
        learnt.save(f"{kept}.part")
        Path(f"{kept}.part").replace(kept)
    return Tokenizer.from_file(str(kept))


def windows(tokens: np.ndarray, context: int, new: int) -> dict[str, np.ndarray]:
    """Return sequences that together predict each token of a text once, except its first `context - new`.

    Args:
        tokens: of the text, in order; more than `context`.
        context: tokens of a sequence.
        new: tokens that a sequence predicts, at its end; the last sequence predicts fewer. The fewer they are, the more
            context each has.

    Returns:
        `tokens` (sequences, context) int32, and `new` (sequences,) int64.
    """
    ends = np.append(np.arange(context, len(tokens), new), len(tokens))
    rows = tokens[ends[:, None] - context + np.arange(context)]
    return {"tokens": rows.astype(np.int32), "new": np.diff(ends, prepend=context - new)}


# --- the loss ---------------------------------------------------------------------------------------------------------


def cross_entropy(logits: Tensor, given: tuple[Tensor, Tensor]) -> tw.Terms:
    """Return the loss in nats of each token to predict."""
    tokens, new = given
    return tw.Terms(surprise(logits, tokens), predicted(tokens, new))


def bits_per_character(logits: Tensor, given: tuple[Tensor, Tensor], *, characters: Tensor) -> tw.Terms:
    """Return bits per character of the tokens to predict; `characters` (vocabulary,) has the length of each token."""
    tokens, new = given
    lengths = characters.to(tokens.device)[tokens[:, 1:].long()]
    return tw.Terms(surprise(logits, tokens) / (math.log(2) * lengths), predicted(tokens, new) * lengths)


def surprise(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return -log p of each token except the first, in nats: (rows, tokens - 1)."""
    follow = tokens.long().roll(-1, dims=1)  # nothing follows the last token: its value is left out
    values = functional.cross_entropy(logits.flatten(0, 1), follow.flatten(), reduction="none")
    return values.view_as(follow)[:, :-1]


def predicted(tokens: Tensor, new: Tensor) -> Tensor:
    """Return 1.0 for each token except the first that is new in its sequence, else 0.0."""
    places = torch.arange(1, tokens.shape[1], device=tokens.device)
    return (places >= tokens.shape[1] - new[:, None]).float()


# --- the job ----------------------------------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024), scaled as AdamW (Liu et al. 2025), for the matrices of blocks; AdamW for all else.

    Args:
        parameters: of the model, or of the part of it that this rank trains.
        vocabulary: number of tokens, by which the embedding is recognized.
        rate: highest learning rate of the schedule.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, vocabulary: int, rate: float) -> None:
        every = list(parameters)
        inner = [each for each in every if each.dim() == 2 and len(each) != vocabulary]
        others = [each for each in every if all(each is not one for one in inner)]
        self.parts: list[torch.optim.Optimizer] = []
        if inner:
            self.parts.append(torch.optim.Muon(inner, lr=2 * rate, adjust_lr_fn="match_rms_adamw"))
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part in self.parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:
        """Take one step with both optimizers."""
        for part in self.parts:
            part.step()


def job(size: Literal["tiny", "third", "small", "laptop", "cluster"] = "laptop") -> tw.Job:
    """Return the job of one of the sizes: `--set size=cluster`."""
    chosen = SIZES[size]
    text = sample_data.king_james(FOLDER)
    learnt = tokenizer(text.train, chosen.vocabulary)
    first, rest = (np.array(learnt.encode(Path(part).read_text(encoding="ascii")).ids) for part in text)
    known, new = 3 * chosen.context // 4, chosen.context // 4  # context and scored tokens of an evaluated row
    characters = torch.tensor([len(learnt.decode([token])) for token in range(chosen.vocabulary)])
    return tw.Job(
        name=f"gpt-{size}",
        model=partial(GPT, chosen),
        loss=cross_entropy,
        optimizer=partial(Muon, vocabulary=chosen.vocabulary, rate=chosen.rate),
        schedule=partial(tw.schedules.linear, warmup=0.03),
        clip_norm=1.0,
        train=tw.datasets.table(windows(first, chosen.context, chosen.context - 1)),
        evaluate=tw.datasets.table(windows(np.concatenate((first[-known:], rest)), chosen.context, new)),
        inputs="tokens",
        targets=("tokens", "new"),
        batch_size=chosen.batch_size,
        epoch_samples=EPOCH,
        epochs=chosen.epochs,
        evaluate_epochs=chosen.epochs,
        metrics={"bits_per_character": partial(bits_per_character, characters=characters)},
        storage="runs",
    )
