"""A polynomial is fitted, with a rate that falls when the evaluation is on a plateau (pytorch/examples/regression)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from toy_data import Trained

import trainwright as tw


def points(rows: int, seed: int) -> TensorDataset:
    """Return pairs of the powers of a number and a polynomial of it, with noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 1, generator=generator) * 2 - 1
    powers = torch.cat([x**power for power in range(1, 5)], dim=1)
    noise = 0.1 * torch.randn(rows, 1, generator=generator)
    return TensorDataset(powers, powers @ torch.tensor([[2.0], [-1.0], [0.5], [3.0]]) + 1.0 + noise)


TRAIN, TEST = points(48, 0), points(32, 1)


def job(shuffle: bool = True) -> tw.Job:
    return tw.Job(
        name="regression",
        model=lambda: nn.Linear(4, 1),
        optimizer=lambda parameters: SGD(parameters, lr=0.9),
        schedule=lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
        schedule_metric="loss",
        loss=nn.SmoothL1Loss(),
        train=tw.datasets.from_torch(TRAIN, ("x", "y")),
        evaluate=tw.datasets.from_torch(TEST, ("x", "y")),
        inputs="x",
        targets="y",
        batch_size=16,
        epochs=6,
        shuffle=shuffle,
    )


def lightning(shuffle: bool = True) -> Any:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            loss = functional.smooth_l1_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", functional.smooth_l1_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self):
            optimizer = SGD(self.parameters(), lr=0.9)
            scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    trainer = L.Trainer(max_epochs=6)
    trainer.fit(Module(), DataLoader(TRAIN, 16, shuffle=shuffle), DataLoader(TEST, 16))
    return trainer


def plain(shuffle: bool = True) -> Trained:
    losses, evaluations = [], []
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.9)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for _ in range(6):
        for x, y in DataLoader(TRAIN, 16, shuffle=shuffle):
            loss = functional.smooth_l1_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            x, y = TEST.tensors
            evaluations.append({"loss": functional.smooth_l1_loss(model(x), y).item()})
        scheduler.step(evaluations[-1]["loss"])
    return losses, evaluations
