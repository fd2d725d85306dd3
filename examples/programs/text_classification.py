"""Fine-tuning of a classifier: BERT, whose outputs have the loss (Hugging Face's run_glue and run_classification)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset
from toy_data import Trained, lengths, tokens

import trainwright as tw

WORDS = 30


class Texts(Dataset):
    """Texts of different lengths; the label is whether the first word is in the upper half of the vocabulary."""

    def __init__(self, rows: int, seed: int) -> None:
        self.texts = [row[:n] for row, n in zip(tokens(rows, 10, WORDS, seed), lengths(rows, 4, 10, seed), strict=True)]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"input_ids": self.texts[row], "labels": int(self.texts[row][0] > WORDS // 2)}


TRAIN, TEST = Texts(44, 0), Texts(20, 1)


def classifier() -> nn.Module:
    """Build a small BERT with random weights; `from_pretrained(...)` loads others."""
    from transformers import BertConfig, BertForSequenceClassification

    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, max_position_embeddings=16, **size, **dropout))


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad a batch, for DataLoaders."""
    texts = [row["input_ids"] for row in rows]
    mask = pad_sequence([torch.ones_like(text) for text in texts], True)
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": pad_sequence(texts, True), "attention_mask": mask, "labels": labels}


def job(shuffle: bool = True) -> tw.Job:
    from transformers import get_linear_schedule_with_warmup

    def step(model, batch):
        outputs = model(batch["input_ids"], batch["input_ids_mask"], labels=batch["labels"])
        return {"loss": outputs.loss, "accuracy": outputs.logits.argmax(1) == batch["labels"]}

    return tw.Job(
        name="text-classification",
        model=classifier,
        optimizer=lambda parameters: AdamW(parameters, lr=5e-3, weight_decay=0.0),
        schedule=partial(get_linear_schedule_with_warmup, num_warmup_steps=2),
        step=step,
        train=tw.datasets.from_torch(TRAIN),
        evaluate=tw.datasets.from_torch(TEST),
        pad={"input_ids": tw.Pad()},
        batch_size=8,
        epochs=2,
        shuffle=shuffle,
        clip_norm=1.0,
    )


def hf_trainer(shuffle: bool = True) -> Any:
    from transformers import Trainer, TrainingArguments

    def accuracy(found):
        return {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()}

    arguments = TrainingArguments(
        output_dir="runs/text-classification",
        per_device_train_batch_size=8,
        num_train_epochs=2,
        learning_rate=5e-3,
        warmup_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        train_sampling_strategy="random" if shuffle else "sequential",
    )
    trainer = Trainer(classifier(), arguments, padded, train_dataset=TRAIN, eval_dataset=TEST, compute_metrics=accuracy)
    trainer.train()
    return trainer


def plain(shuffle: bool = True) -> Trained:
    from transformers import get_linear_schedule_with_warmup

    losses, evaluations = [], []
    model, loader = classifier(), DataLoader(TRAIN, 8, shuffle=shuffle, collate_fn=padded)
    optimizer = AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 2 * len(loader))
    for _ in range(2):
        for batch in loader:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        total = correct = 0.0
        model.eval()
        with torch.no_grad():
            for batch in DataLoader(TEST, 8, collate_fn=padded):
                outputs = model(**batch)
                total += outputs.loss.item() * len(batch["labels"])
                correct += (outputs.logits.argmax(1) == batch["labels"]).sum().item()
        model.train()
        evaluations.append({"loss": total / len(TEST), "accuracy": correct / len(TEST)})
    return losses, evaluations
