"""Translation: a transformer, batches of similar length, gradient clipping, early stopping (PyTorch's tutorial)."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Adam
from torch.utils.data import DataLoader, Dataset
from toy_data import Trained, lengths, tokens

import trainwright as tw

WORDS, ROWS, BEGIN = 12, 44, 0


class Sentences(Dataset):
    """Pairs of a sentence and the same sentence backwards, which begins with a mark."""

    def __init__(self, rows: int, seed: int) -> None:
        self.lengths = lengths(rows, 2, 9, seed)
        self.sentences = [row[:n] for row, n in zip(tokens(rows, 9, WORDS, seed), self.lengths, strict=True)]

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, row: int) -> dict[str, Any]:
        source = self.sentences[row]
        return {"source": source, "target": torch.cat([torch.tensor([BEGIN]), source.flip(0)])}


TRAIN, TEST = Sentences(ROWS, 0), Sentences(16, 1)


class Translator(nn.Module):
    """Encoder and decoder of one layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, 16), nn.Embedding(16, 16)
        self.body = nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, source: Tensor, target: Tensor, real: Tensor) -> Tensor:
        """Return logits (n, words, length - 1) of the next words of `target`; `real` marks the words of `source`."""
        source, target = (
            self.embed(each) + self.positions.weight[: each.shape[1]] for each in (source, target[:, :-1])
        )
        ahead = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        masks = {"src_key_padding_mask": ~real, "memory_key_padding_mask": ~real, "tgt_mask": ahead}
        return self.head(self.body(source, target, **masks)).transpose(1, 2)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return Adam(parameters, lr=3e-2)


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad a batch; `labels` are -100 where there is no word."""
    source, target = (pad_sequence([row[name] for row in rows], True) for name in ("source", "target"))
    labels = pad_sequence([row["target"][1:] for row in rows], True, -100)
    real = pad_sequence([torch.ones_like(row["source"]) for row in rows], True).bool()
    return {"source": source, "target": target, "real": real, "labels": labels}


class Buckets:
    """Batches of similar length in another order in each epoch, for a DataLoader."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size, self.random = batch_size, random.Random(0)

    def __len__(self) -> int:
        return math.ceil(ROWS / self.batch_size)

    def __iter__(self) -> Any:
        rows = sorted(range(ROWS), key=lambda row: (TRAIN.lengths[row], self.random.random()))
        batches = [rows[first : first + self.batch_size] for first in range(0, ROWS, self.batch_size)]
        return iter(self.random.sample(batches, len(batches)))


def job(shuffle: bool = True) -> tw.Job:
    def loss(outputs, given):
        target, real = given
        losses = functional.cross_entropy(outputs, target[:, 1:], reduction="none")
        return tw.Terms(losses, real[:, 1:].to(losses.dtype))

    return tw.Job(
        name="translation",
        model=Translator,
        optimizer=adam,
        loss=loss,
        train=tw.datasets.from_torch(TRAIN).bucketed(TRAIN.lengths, batch_size=8),
        evaluate=tw.datasets.from_torch(TEST),
        inputs=("source", "target", "source_mask"),
        targets=("target", "target_mask"),
        pad={"source": tw.Pad(), "target": tw.Pad()},
        batch_size=8,
        epochs=8,
        shuffle=shuffle,
        clip_norm=1.0,
        early_stop=tw.EarlyStop("loss", patience=1),
    )


def lightning(shuffle: bool = True) -> Any:
    import lightning as L
    from lightning.pytorch.callbacks import EarlyStopping

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Translator()

        def training_step(self, batch, batch_idx):
            outputs = self.net(batch["source"], batch["target"], batch["real"])
            loss = functional.cross_entropy(outputs, batch["labels"])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            outputs = self.net(batch["source"], batch["target"], batch["real"])
            self.log("val_loss", functional.cross_entropy(outputs, batch["labels"]), sync_dist=True)

        def configure_optimizers(self):
            return adam(self.parameters())

    stop = EarlyStopping("val_loss", patience=1)
    trainer = L.Trainer(max_epochs=8, gradient_clip_val=1.0, callbacks=[stop], use_distributed_sampler=False)
    loader = DataLoader(TRAIN, batch_sampler=Buckets(8), collate_fn=padded)
    trainer.fit(Module(), loader, DataLoader(TEST, 8, collate_fn=padded))
    return trainer


def plain(shuffle: bool = True, batches: Any = None) -> Trained:
    losses, evaluations = [], []
    model = Translator()
    optimizer = adam(model.parameters())
    for epoch in range(8):
        sampler = batches[epoch] if batches else Buckets(8)
        for batch in DataLoader(TRAIN, batch_sampler=sampler, collate_fn=padded):
            outputs = model(batch["source"], batch["target"], batch["real"])
            loss = functional.cross_entropy(outputs, batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        total = words = 0.0
        with torch.no_grad():
            for batch in DataLoader(TEST, 8, collate_fn=padded):
                outputs = model(batch["source"], batch["target"], batch["real"])
                total += functional.cross_entropy(outputs, batch["labels"], reduction="sum").item()
                words += (batch["labels"] != -100).sum().item()
        model.train()
        evaluations.append({"loss": total / words})
        if epoch and evaluations[-1]["loss"] >= min(each["loss"] for each in evaluations[:-1]):
            break
    return losses, evaluations
