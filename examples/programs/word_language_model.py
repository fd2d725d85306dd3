"""A word language model: an LSTM whose hidden state is carried along the text (pytorch/examples)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from toy_data import Trained, tokens

import trainwright as tw

WORDS, STREAMS, LENGTH = 20, 4, 6


def text(pieces: int, seed: int) -> TensorDataset:
    """Return rows of (words, next words, whether the stream begins), STREAMS rows for a batch."""
    streams = tokens(STREAMS, pieces * LENGTH + 1, WORDS, seed)
    rows = torch.cat([streams[:, at : at + LENGTH + 1] for at in range(0, pieces * LENGTH, LENGTH)])
    return TensorDataset(rows[:, :-1], rows[:, 1:], torch.arange(len(rows)) < STREAMS)


TRAIN, TEST = text(10, 0), text(3, 1)


class Model(nn.Module):
    """Embedding, LSTM and a linear layer; the hidden state is kept for the next rows of the same streams."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(WORDS, 8), nn.LSTM(8, 12), nn.Linear(12, WORDS)
        self.register_buffer("hidden", torch.zeros(2, 1, 1, 12))

    def forward(self, words: Tensor, begins: Tensor) -> Tensor:
        """(n, length) and (n,) to logits (n, words, length)."""
        hidden = self.hidden * ~begins[:, None]
        outputs, hidden = self.lstm(self.embed(words.t()), tuple(hidden))
        self.hidden = torch.stack(hidden).detach()
        return self.head(outputs).permute(1, 2, 0)


def job(shuffle: bool = False) -> tw.Job:
    return tw.Job(
        name="word-language-model",
        model=Model,
        optimizer=lambda parameters: SGD(parameters, lr=5.0),
        schedule=lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.25, patience=0),
        schedule_metric="loss",
        loss=functional.cross_entropy,
        train=tw.datasets.from_torch(TRAIN, ("words", "next", "begins")),
        evaluate=tw.datasets.from_torch(TEST, ("words", "next", "begins")),
        inputs=("words", "begins"),
        targets="next",
        batch_size=STREAMS,
        epochs=3,
        shuffle=shuffle,
        clip_norm=0.25,
        local_state="hidden",
    )


def lightning(shuffle: bool = False) -> Any:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Model()

        def training_step(self, batch, batch_idx):
            loss = functional.cross_entropy(self.net(batch[0], batch[2]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", functional.cross_entropy(self.net(batch[0], batch[2]), batch[1]), sync_dist=True)

        def configure_optimizers(self):
            optimizer = SGD(self.parameters(), lr=5.0)
            scheduler = ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    trainer = L.Trainer(max_epochs=3, gradient_clip_val=0.25)
    trainer.fit(Module(), DataLoader(TRAIN, STREAMS), DataLoader(TEST, STREAMS))
    return trainer


def plain(shuffle: bool = False) -> Trained:
    losses, evaluations = [], []
    model = Model()
    optimizer = SGD(model.parameters(), lr=5.0)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
    for _ in range(3):
        for words, following, begins in DataLoader(TRAIN, STREAMS):
            loss = functional.cross_entropy(model(words, begins), following)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            losses.append(loss.item())
        total = 0.0
        with torch.no_grad():
            for words, following, begins in DataLoader(TEST, STREAMS):
                total += functional.cross_entropy(model(words, begins), following).item() * STREAMS
        evaluations.append({"loss": total / len(TEST)})
        scheduler.step(evaluations[-1]["loss"])
    return losses, evaluations
