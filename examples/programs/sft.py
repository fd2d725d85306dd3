"""Supervised fine-tuning: a language model learns answers, and the loss leaves out the prompts (TRL's SFTTrainer)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset
from toy_data import Trained, lengths, tokens

import trainwright as tw

WORDS = 30


class Dialogues(Dataset):
    """A prompt and an answer, both of different lengths; the labels are -100 in the prompt."""

    def __init__(self, rows: int, seed: int) -> None:
        self.prompts, self.answers = lengths(rows, 2, 6, seed), lengths(rows, 1, 6, seed + 10)
        self.tokens = tokens(rows, 12, WORDS, seed)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        prompt, both = self.prompts[row], self.prompts[row] + self.answers[row]
        ids = self.tokens[row, :both]
        return {"input_ids": ids, "labels": torch.cat([torch.full((prompt,), -100), ids[prompt:]])}


TRAIN, TEST = Dialogues(44, 0), Dialogues(20, 1)


def llama() -> nn.Module:
    """Build a small Llama with random weights; `AutoModelForCausalLM.from_pretrained(...)` loads others."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=16, **size))


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad a batch, for DataLoaders."""
    ids = pad_sequence([row["input_ids"] for row in rows], True)
    mask = pad_sequence([torch.ones_like(row["input_ids"]) for row in rows], True)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": pad_sequence([row["labels"] for row in rows], True, -100),
    }


def job(shuffle: bool = True) -> tw.Job:
    def step(model, batch):
        return model(batch["input_ids"], batch["input_ids_mask"], labels=batch["labels"])

    return tw.Job(
        name="sft",
        model=llama,
        optimizer=lambda parameters: AdamW(parameters, lr=5e-3, weight_decay=0.0),
        step=step,
        weight=lambda batch: (batch["labels"][:, 1:] != -100).sum(),
        train=tw.datasets.from_torch(TRAIN),
        evaluate=tw.datasets.from_torch(TEST),
        pad={"input_ids": tw.Pad(), "labels": tw.Pad(value=-100)},
        batch_size=8,
        epochs=2,
        shuffle=shuffle,
        clip_norm=1.0,
    )


def hf_trainer(shuffle: bool = True) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="runs/sft",
        per_device_train_batch_size=8,
        num_train_epochs=2,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        eval_strategy="epoch",
        save_strategy="epoch",
        train_sampling_strategy="random" if shuffle else "sequential",
    )
    trainer = Trainer(model=llama(), args=arguments, train_dataset=TRAIN, eval_dataset=TEST, data_collator=padded)
    trainer.train()
    return trainer


def plain(shuffle: bool = True) -> Trained:
    losses, evaluations = [], []
    model = llama()
    optimizer = AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(2):
        for batch in DataLoader(TRAIN, 8, shuffle=shuffle, collate_fn=padded):
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        total = words = 0.0
        with torch.no_grad():
            for batch in DataLoader(TEST, 8, collate_fn=padded):
                count = (batch["labels"][:, 1:] != -100).sum().item()
                total += model(**batch).loss.item() * count
                words += count
        evaluations.append({"loss": total / words})
    return losses, evaluations
