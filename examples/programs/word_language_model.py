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
    """Return rows of (words, next words, number of the stream, whether the stream begins), STREAMS rows for a batch."""
    streams = tokens(STREAMS, pieces * LENGTH + 1, WORDS, seed)
    cut = [streams[:, at : at + LENGTH + 1] for at in range(0, pieces * LENGTH, LENGTH)]
    rows, stream = torch.cat(cut), torch.arange(STREAMS).repeat(pieces)
    return TensorDataset(rows[:, :-1], rows[:, 1:], stream, torch.arange(len(rows)) < STREAMS)


TRAIN, TEST = text(10, 0), text(3, 1)


class Model(nn.Module):
    """Embedding, LSTM and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(WORDS, 8), nn.LSTM(8, 12), nn.Linear(12, WORDS)

    def forward(self, words: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(n, length) to logits (n, words, length), and the next hidden state."""
        outputs, hidden = self.lstm(self.embed(words.t()), hidden)
        return self.head(outputs).permute(1, 2, 0), tuple(each.detach() for each in hidden)


def no_state(streams: int = STREAMS) -> tuple[Tensor, Tensor]:
    return torch.zeros(1, streams, 12), torch.zeros(1, streams, 12)


def job(shuffle: bool = False) -> tw.Job:
    class Carried(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("hidden", torch.stack(no_state()))

        def forward(self, words, stream, begins):
            logits, hidden = super().forward(words, tuple(self.hidden[:, :, stream] * ~begins[:, None]))
            self.hidden[:, :, stream] = torch.stack(hidden)
            return logits

    return tw.Job(
        name="word-language-model",
        model=Carried,
        optimizer=lambda parameters: SGD(parameters, lr=5.0),
        schedule=lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.25, patience=0),
        schedule_metric="loss",
        loss=functional.cross_entropy,
        train=tw.datasets.from_torch(TRAIN, ("words", "next", "stream", "begins")),
        evaluate=tw.datasets.from_torch(TEST, ("words", "next", "stream", "begins")),
        inputs=("words", "stream", "begins"),
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

        def on_train_epoch_start(self):
            self.hidden = tuple(each.to(self.device) for each in no_state())

        on_validation_epoch_start = on_train_epoch_start

        def training_step(self, batch, batch_idx):
            logits, self.hidden = self.net(batch[0], self.hidden)
            loss = functional.cross_entropy(logits, batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            logits, self.hidden = self.net(batch[0], self.hidden)
            self.log("val_loss", functional.cross_entropy(logits, batch[1]), sync_dist=True)

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
        hidden = no_state()
        for words, following, _, _ in DataLoader(TRAIN, STREAMS):
            logits, hidden = model(words, hidden)
            loss = functional.cross_entropy(logits, following)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            losses.append(loss.item())
        hidden, total = no_state(), 0.0
        with torch.no_grad():
            for words, following, _, _ in DataLoader(TEST, STREAMS):
                logits, hidden = model(words, hidden)
                total += functional.cross_entropy(logits, following).item() * STREAMS
        evaluations.append({"loss": total / len(TEST)})
        scheduler.step(evaluations[-1]["loss"])
    return losses, evaluations
