"""A causal language model on packed texts (Hugging Face's run_clm, whose group_texts packs)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset
from toy_data import Trained, lengths, tokens

import trainwright as tw

WORDS, CONTEXT = 30, 12


def documents(rows: int, seed: int) -> list[np.ndarray]:
    """Return documents of different lengths; all together a multiple of CONTEXT."""
    sizes = lengths(rows, 5, 20, seed)
    sizes[-1] += -sum(sizes) % CONTEXT
    return [row[:size].numpy() for row, size in zip(tokens(rows, 40, WORDS, seed), sizes, strict=True)]


TRAIN, TEST = documents(38, 0), documents(10, 1)


class Packed(Dataset):
    """Documents end to end, cut into sequences, as `group_texts` does."""

    def __init__(self, texts: list[np.ndarray]) -> None:
        self.rows = torch.from_numpy(np.concatenate(texts)).view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[row], "labels": self.rows[row]}


def llama() -> nn.Module:
    """Build a small Llama with random weights; `AutoModelForCausalLM.from_pretrained(...)` loads others."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=CONTEXT, **size))


def job(shuffle: bool = True) -> tw.Job:
    from transformers import get_cosine_schedule_with_warmup

    return tw.Job(
        name="causal-language-model",
        model=llama,
        optimizer=lambda parameters: AdamW(parameters, lr=5e-3, weight_decay=0.1),
        schedule=partial(get_cosine_schedule_with_warmup, num_warmup_steps=2),
        step=lambda model, batch: model(batch["tokens"], labels=batch["tokens"]),
        train=tw.datasets.table({"tokens": TRAIN}).pack(CONTEXT),
        evaluate=tw.datasets.table({"tokens": TEST}).pack(CONTEXT),
        batch_size=8,
        epochs=2,
        shuffle=shuffle,
        clip_norm=1.0,
    )


def hf_trainer(shuffle: bool = True) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="runs/causal-language-model",
        per_device_train_batch_size=8,
        num_train_epochs=2,
        learning_rate=5e-3,
        weight_decay=0.1,
        warmup_steps=2,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        train_sampling_strategy="random" if shuffle else "sequential",
    )
    trainer = Trainer(model=llama(), args=arguments, train_dataset=Packed(TRAIN), eval_dataset=Packed(TEST))
    trainer.train()
    return trainer


def plain(shuffle: bool = True) -> Trained:
    from transformers import get_cosine_schedule_with_warmup

    losses, evaluations = [], []
    model, loader = llama(), DataLoader(Packed(TRAIN), 8, shuffle=shuffle)
    optimizer = AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 2 * len(loader))
    for _ in range(2):
        for batch in loader:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        with torch.no_grad():
            found = [(model(**batch).loss.item(), len(batch["labels"])) for batch in DataLoader(Packed(TEST), 8)]
        evaluations.append({"loss": sum(loss * rows for loss, rows in found) / len(Packed(TEST))})
    return losses, evaluations
