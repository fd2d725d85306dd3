"""LoRA: small adapters of peft on a frozen language model, which checkpoints leave out (peft's examples)."""

from __future__ import annotations

from typing import Any

import sft
import torch
from sft import TEST, TRAIN, padded
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader
from toy_data import Trained

import trainwright as tw


def adapted() -> nn.Module:
    """Build the base, the same one in each process, with adapters at queries and values."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(7)  # in place of files
        base = sft.llama()
    return get_peft_model(base, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]))


def job(shuffle: bool = True) -> tw.Job:
    def step(model, batch):
        return model(batch["input_ids"], batch["input_ids_mask"], labels=batch["labels"])

    return tw.Job(
        name="lora",
        model=adapted,
        optimizer=lambda parameters: AdamW(parameters, lr=2e-2, weight_decay=0.0),
        step=step,
        weight=lambda batch: (batch["labels"][:, 1:] != -100).sum(),
        train=tw.datasets.from_torch(TRAIN),
        evaluate=tw.datasets.from_torch(TEST),
        pad={"input_ids": tw.Pad(), "labels": tw.Pad(value=-100)},
        batch_size=8,
        epochs=2,
        shuffle=shuffle,
        clip_norm=1.0,
        save_frozen=False,
    )


def hf_trainer(shuffle: bool = True) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="runs/lora",
        per_device_train_batch_size=8,
        num_train_epochs=2,
        learning_rate=2e-2,
        lr_scheduler_type="constant",
        eval_strategy="epoch",
        save_strategy="epoch",
        train_sampling_strategy="random" if shuffle else "sequential",
    )
    trainer = Trainer(model=adapted(), args=arguments, train_dataset=TRAIN, eval_dataset=TEST, data_collator=padded)
    trainer.train()
    return trainer


def plain(shuffle: bool = True) -> Trained:
    losses, evaluations = [], []
    model = adapted()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = AdamW(trained, lr=2e-2, weight_decay=0.0)
    for _ in range(2):
        for batch in DataLoader(TRAIN, 8, shuffle=shuffle, collate_fn=padded):
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
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
