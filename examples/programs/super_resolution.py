"""Super resolution: an efficient sub-pixel network, evaluated by PSNR (pytorch/examples/super_resolution)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset
from toy_data import Trained, images

import trainwright as tw


def pairs(rows: int, seed: int) -> TensorDataset:
    """Return pairs of a small image and the image of twice its size."""
    large = images(rows, seed=seed).tensors[0]
    return TensorDataset(functional.avg_pool2d(large, 2), large)


TRAIN, TEST = pairs(40, 0), pairs(16, 1)


def network() -> nn.Module:
    """Build three convolutions and a pixel shuffle."""
    body = [nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*body, nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2))


def psnr(outputs: Tensor, large: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each image, in dB."""
    return -10 * ((outputs - large) ** 2).mean((1, 2, 3)).log10()


def job(shuffle: bool = True) -> tw.Job:
    return tw.Job(
        name="super-resolution",
        model=network,
        optimizer=lambda parameters: Adam(parameters, lr=1e-3),
        loss=nn.MSELoss(),
        metrics={"psnr": psnr},
        train=tw.datasets.from_torch(TRAIN, ("small", "large")),
        evaluate=tw.datasets.from_torch(TEST, ("small", "large")),
        inputs="small",
        targets="large",
        batch_size=16,
        epochs=2,
        shuffle=shuffle,
    )


def lightning(shuffle: bool = True) -> Any:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, batch_idx):
            loss = functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            outputs = self.net(batch[0])
            self.log("val_loss", functional.mse_loss(outputs, batch[1]), sync_dist=True)
            self.log("psnr", psnr(outputs, batch[1]).mean(), sync_dist=True)

        def configure_optimizers(self):
            return Adam(self.parameters(), lr=1e-3)

    trainer = L.Trainer(max_epochs=2)
    trainer.fit(Module(), DataLoader(TRAIN, 16, shuffle=shuffle), DataLoader(TEST, 16))
    return trainer


def plain(shuffle: bool = True) -> Trained:
    losses, evaluations = [], []
    model = network()
    optimizer = Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        for small, large in DataLoader(TRAIN, 16, shuffle=shuffle):
            loss = functional.mse_loss(model(small), large)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        total = ratio = 0.0
        with torch.no_grad():
            for small, large in DataLoader(TEST, 16):
                outputs = model(small)
                total += functional.mse_loss(outputs, large).item() * len(small)
                ratio += psnr(outputs, large).sum().item()
        evaluations.append({"loss": total / len(TEST), "psnr": ratio / len(TEST)})
    return losses, evaluations
