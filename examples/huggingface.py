"""A model of Hugging Face's transformers, with no change to it, on one device, sharded or in a pipeline.

    trainwright fit examples/huggingface.py --strategy sharded --workers 2
    trainwright fit examples/huggingface.py --set plan=pp=2,schedule=1f1b,accumulation=4

A small Llama with random initial weights, on the bytes of the King James text. To continue from pretrained weights, use
`AutoModelForCausalLM.from_pretrained(...)` in `build_model`.
"""

from __future__ import annotations

from typing import Any

import sample_data
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainwright as tw

CONTEXT = 128
text = sample_data.king_james("data/king-james")


def build_model() -> nn.Module:
    """Build a Llama of 0.8 M parameters; its tokens are bytes, and the end of a verse."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=257, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def cross_entropy(outputs: Any, given: tuple[Tensor, Tensor]) -> tw.Terms:
    """Return the loss in nats of each byte except the first of a sequence."""
    tokens, real = given
    logits, follow = outputs["logits"][:, :-1], tokens[:, 1:].long()
    losses = functional.cross_entropy(logits.flatten(0, 1), follow.flatten(), reduction="none")
    return tw.Terms(losses.view_as(follow), real[:, 1:].float())


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW at the highest rate of the schedule."""
    return torch.optim.AdamW(parameters, lr=3e-3)


def verses(path: str) -> Any:
    """Return the bytes of all verses, concatenated and cut into sequences."""
    return tw.datasets.text(path).tokenize().pack(CONTEXT)


job = tw.Job(
    name="huggingface",
    model=build_model,
    loss=cross_entropy,
    optimizer=adamw,
    schedule=tw.schedules.cosine,
    train=verses(text.train),
    evaluate=verses(text.test),
    inputs={"input_ids": "tokens"},
    targets=("tokens", "mask"),
    batch_size=64,
    clip_norm=1.0,
    storage="runs",
)
