"""SimCLR: two views of an image attract each other, all other images of the batch are pushed away."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset
from toy_data import Trained, images

import trainwright as tw


def views(rows: int) -> TensorDataset:
    """Return pairs of two views of an image; noise in the data, so that all versions share it."""
    image, generator = images(rows).tensors[0], torch.Generator().manual_seed(3)
    return TensorDataset(*(image + 0.3 * torch.randn(image.shape, generator=generator) for _ in range(2)))


TRAIN = views(48)


def encoder() -> nn.Module:
    """Build a convolution and a projection head."""
    body = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(100, 16), nn.ReLU(), nn.Linear(16, 8))


def nt_xent(first: Tensor, second: Tensor) -> Tensor:
    """Return one loss for each pair of views: all other views of the batch are the wrong answers."""
    views = functional.normalize(torch.cat([first, second]), dim=1)
    scores = (views @ views.t() / 0.5).fill_diagonal_(-1e9)
    losses = functional.cross_entropy(scores, torch.arange(len(views)).roll(len(first)), reduction="none")
    return losses.view(2, -1).mean(0)


def job(shuffle: bool = True) -> tw.Job:
    def step(model, batch):
        return nt_xent(tw.gather(model(batch["first"])), tw.gather(model(batch["second"])))

    return tw.Job(
        name="simclr",
        model=encoder,
        optimizer=lambda parameters: Adam(parameters, lr=1e-2),
        step=step,
        train=tw.datasets.from_torch(TRAIN, ("first", "second")),
        batch_size=16,
        epochs=2,
        shuffle=shuffle,
    )


def lightning(shuffle: bool = True) -> Any:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = encoder()

        def training_step(self, batch, batch_idx):
            first, second = (self.all_gather(self.net(each), sync_grads=True).flatten(0, -2) for each in batch)
            loss = nt_xent(first, second).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return Adam(self.parameters(), lr=1e-2)

    trainer = L.Trainer(max_epochs=2)
    trainer.fit(Module(), DataLoader(TRAIN, 16, shuffle=shuffle))
    return trainer


def plain(shuffle: bool = True) -> Trained:
    losses = []
    model = encoder()
    optimizer = Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        for first, second in DataLoader(TRAIN, 16, shuffle=shuffle):
            loss = nt_xent(model(first), model(second)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, []
