"""Time sequences: two LSTM cells predict sine waves, trained by LBFGS (pytorch/examples/time_sequence_prediction)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import LBFGS
from torch.utils.data import DataLoader, TensorDataset
from toy_data import Trained

import trainwright as tw


def waves(rows: int, seed: int) -> TensorDataset:
    """Return pairs of a wave and the same wave one step later."""
    shift = torch.rand(rows, 1, generator=torch.Generator().manual_seed(seed)) * 20
    wave = torch.sin((torch.arange(13) + shift) / 3.0)
    return TensorDataset(wave[:, :-1], wave[:, 1:])


TRAIN, TEST = waves(12, 0), waves(4, 1)
lbfgs = partial(LBFGS, lr=0.8, max_iter=4, line_search_fn="strong_wolfe")


class Sequence(nn.Module):
    """Two LSTM cells and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 6), nn.LSTMCell(6, 6), nn.Linear(6, 1)

    def forward(self, wave: Tensor) -> Tensor:
        first = second = None
        outputs = []
        for value in wave.split(1, dim=1):
            first = self.lstm1(value, first)
            second = self.lstm2(first[0], second)
            outputs.append(self.linear(second[0]))
        return torch.cat(outputs, dim=1)


def job(shuffle: bool = True) -> tw.Job:
    return tw.Job(
        name="time-sequence",
        model=Sequence,
        optimizer=lbfgs,
        loss=nn.MSELoss(),
        train=tw.datasets.from_torch(TRAIN, ("wave", "next")),
        evaluate=tw.datasets.from_torch(TEST, ("wave", "next")),
        inputs="wave",
        targets="next",
        batch_size=12,
        epochs=4,
        shuffle=shuffle,
    )


def lightning(shuffle: bool = True) -> Any:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Sequence()

        def training_step(self, batch, batch_idx):
            loss = functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self):
            return lbfgs(self.parameters())

    trainer = L.Trainer(max_epochs=4)
    trainer.fit(Module(), DataLoader(TRAIN, 12, shuffle=shuffle), DataLoader(TEST, 12))
    return trainer


def plain(shuffle: bool = True) -> Trained:
    losses, evaluations = [], []
    model = Sequence()
    optimizer = lbfgs(model.parameters())
    for _ in range(4):
        for wave, following in DataLoader(TRAIN, 12, shuffle=shuffle):

            def closure(wave=wave, following=following):
                optimizer.zero_grad()
                loss = functional.mse_loss(model(wave), following)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        with torch.no_grad():
            wave, following = TEST.tensors
            evaluations.append({"loss": functional.mse_loss(model(wave), following).item()})
    return losses, evaluations
