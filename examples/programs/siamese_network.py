"""A siamese network: do two images show the same digit? (pytorch/examples/siamese_network)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adadelta
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from toy_data import Trained, images

import trainwright as tw


def pairs(rows: int, seed: int) -> TensorDataset:
    """Return rows of two images and whether they are of one class: 1.0 or 0.0."""
    (first, one), (second, other) = (images(rows, classes=2, seed=2 * seed + add).tensors for add in (0, 1))
    return TensorDataset(first, second, (one == other).to(first.dtype))


TRAIN, TEST = pairs(48, 0), pairs(24, 1)


class Siamese(nn.Module):
    """One network for both images, and a classifier of the pair."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(100, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.head(torch.abs(self.body(first) - self.body(second))).squeeze(1)


def accuracy(outputs: Tensor, same: Tensor) -> Tensor:
    return (outputs > 0.5) == (same > 0.5)


def job(shuffle: bool = True) -> tw.Job:
    return tw.Job(
        name="siamese-network",
        model=Siamese,
        optimizer=lambda parameters: Adadelta(parameters, lr=1.0),
        schedule=lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.7),
        schedule_by="epoch",
        loss=nn.BCELoss(),
        metrics={"accuracy": accuracy},
        train=tw.datasets.from_torch(TRAIN, ("first", "second", "same")),
        evaluate=tw.datasets.from_torch(TEST, ("first", "second", "same")),
        inputs=("first", "second"),
        targets="same",
        batch_size=16,
        epochs=2,
        shuffle=shuffle,
    )


def lightning(shuffle: bool = True) -> Any:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Siamese()

        def training_step(self, batch, batch_idx):
            first, second, same = batch
            loss = functional.binary_cross_entropy(self.net(first, second), same)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            first, second, same = batch
            outputs = self.net(first, second)
            self.log("val_loss", functional.binary_cross_entropy(outputs, same), sync_dist=True)
            self.log("accuracy", accuracy(outputs, same).float().mean(), sync_dist=True)

        def configure_optimizers(self):
            optimizer = Adadelta(self.parameters(), lr=1.0)
            return [optimizer], [StepLR(optimizer, step_size=1, gamma=0.7)]

    trainer = L.Trainer(max_epochs=2)
    trainer.fit(Module(), DataLoader(TRAIN, 16, shuffle=shuffle), DataLoader(TEST, 16))
    return trainer


def plain(shuffle: bool = True) -> Trained:
    losses, evaluations = [], []
    model = Siamese()
    optimizer = Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(2):
        for first, second, same in DataLoader(TRAIN, 16, shuffle=shuffle):
            loss = functional.binary_cross_entropy(model(first, second), same)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
        total = correct = 0.0
        with torch.no_grad():
            for first, second, same in DataLoader(TEST, 16):
                outputs = model(first, second)
                total += functional.binary_cross_entropy(outputs, same, reduction="sum").item()
                correct += accuracy(outputs, same).sum().item()
        evaluations.append({"loss": total / len(TEST), "accuracy": correct / len(TEST)})
    return losses, evaluations
