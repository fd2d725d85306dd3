"""A variational auto-encoder: reconstruction and Kullback-Leibler divergence (pytorch/examples/vae)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset
from toy_data import Trained, images

import trainwright as tw

NOISE = torch.randn(88, 4, generator=torch.Generator().manual_seed(2))  # in the data, so that all versions share it
TRAIN = TensorDataset(images(48).tensors[0].flatten(1).sigmoid(), NOISE[:48])
TEST = TensorDataset(images(40, seed=1).tensors[0].flatten(1).sigmoid(), NOISE[48:])


class Vae(nn.Module):
    """Encoder and decoder of one hidden layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.variance = nn.Linear(144, 24), nn.Linear(24, 4), nn.Linear(24, 4)
        self.decode = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 144), nn.Sigmoid())

    def forward(self, image: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = functional.relu(self.encode(image))
        mean, log_variance = self.mean(hidden), self.variance(hidden)
        return self.decode(mean + noise * (0.5 * log_variance).exp()), mean, log_variance


def elbo(outputs: Any, image: Tensor) -> Tensor:
    """Return one loss per image."""
    decoded, mean, log_variance = outputs
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)
    return functional.binary_cross_entropy(decoded, image, reduction="none").sum(1) + divergence


def job(shuffle: bool = True) -> tw.Job:
    return tw.Job(
        name="vae",
        model=Vae,
        optimizer=lambda parameters: Adam(parameters, lr=1e-3),
        loss=elbo,
        train=tw.datasets.from_torch(TRAIN, ("image", "noise")),
        evaluate=tw.datasets.from_torch(TEST, ("image", "noise")),
        inputs=("image", "noise"),
        targets="image",
        batch_size=16,
        epochs=2,
        shuffle=shuffle,
    )


def lightning(shuffle: bool = True) -> Any:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Vae()

        def training_step(self, batch, batch_idx):
            loss = elbo(self.net(*batch), batch[0]).mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", elbo(self.net(*batch), batch[0]).mean(), sync_dist=True)

        def configure_optimizers(self):
            return Adam(self.parameters(), lr=1e-3)

    trainer = L.Trainer(max_epochs=2)
    trainer.fit(Module(), DataLoader(TRAIN, 16, shuffle=shuffle), DataLoader(TEST, 16))
    return trainer


def plain(shuffle: bool = True) -> Trained:
    losses, evaluations = [], []
    model = Vae()
    optimizer = Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        for image, noise in DataLoader(TRAIN, 16, shuffle=shuffle):
            loss = elbo(model(image, noise), image).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            total = sum(elbo(model(image, noise), image).sum().item() for image, noise in DataLoader(TEST, 16))
        evaluations.append({"loss": total / len(TEST)})
    return losses, evaluations
