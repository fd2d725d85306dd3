"""DCGAN: a generator and a discriminator with batch norms, and an optimizer for each (pytorch/examples/dcgan)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset
from toy_data import Trained, images

import trainwright as tw

NOISE = torch.randn(48, 6, 1, 1, generator=torch.Generator().manual_seed(2))
TRAIN = TensorDataset(images(48, size=8).tensors[0].tanh(), NOISE)  # noise in the data, so that all versions share it
adam = partial(Adam, lr=2e-3, betas=(0.5, 0.999))


def generator() -> nn.Module:
    """Noise (n, 6, 1, 1) to images (n, 1, 8, 8)."""
    up = [nn.ConvTranspose2d(6, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*up, nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh())


def discriminator() -> nn.Module:
    """Images to logits (n,)."""
    down = [nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2)]
    return nn.Sequential(*down, nn.Conv2d(8, 1, 4, bias=False), nn.Flatten(0))


class Gan(nn.Module):
    """Both networks."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = generator(), discriminator()


def bce(logits: Tensor, label: float, reduction: str = "mean") -> Tensor:
    target = torch.full_like(logits, label)
    return functional.binary_cross_entropy_with_logits(logits, target, reduction=reduction)


def job(shuffle: bool = True) -> tw.Job:
    def step(model, batch):
        fake, critic = model.generator(batch["noise"]), model.discriminator
        yield "discriminator", bce(critic(batch["image"]), 1.0, "none") + bce(critic(fake.detach()), 0.0, "none")
        yield "generator", bce(critic(fake), 1.0, "none")

    return tw.Job(
        name="dcgan",
        model=Gan,
        optimizer={"discriminator": adam, "generator": adam},
        step=step,
        train=tw.datasets.from_torch(TRAIN, ("image", "noise")),
        batch_size=16,
        epochs=2,
        shuffle=shuffle,
        batch_norm="sync",
    )


def lightning(shuffle: bool = True) -> Any:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.gan = Gan()

        def training_step(self, batch, batch_idx):
            image, noise = batch
            of_critic, of_generator = self.optimizers()
            fake, critic = self.gan.generator(noise), self.gan.discriminator
            loss = bce(critic(image), 1.0) + bce(critic(fake.detach()), 0.0)
            of_critic.zero_grad()
            self.manual_backward(loss)
            of_critic.step()
            self.log("discriminator", loss)
            loss = bce(critic(fake), 1.0)
            of_generator.zero_grad()
            self.manual_backward(loss)
            of_generator.step()
            self.log("generator", loss)

        def configure_optimizers(self):
            return adam(self.gan.discriminator.parameters()), adam(self.gan.generator.parameters())

    trainer = L.Trainer(max_epochs=2, sync_batchnorm=True)
    trainer.fit(Module(), DataLoader(TRAIN, 16, shuffle=shuffle))
    return trainer


def plain(shuffle: bool = True) -> Trained:
    losses = []
    gan = Gan()
    of_critic, of_generator = adam(gan.discriminator.parameters()), adam(gan.generator.parameters())
    for _ in range(2):
        for image, noise in DataLoader(TRAIN, 16, shuffle=shuffle):
            fake = gan.generator(noise)
            first = bce(gan.discriminator(image), 1.0) + bce(gan.discriminator(fake.detach()), 0.0)
            of_critic.zero_grad()
            first.backward()
            of_critic.step()
            second = bce(gan.discriminator(fake), 1.0)
            of_generator.zero_grad()
            second.backward()
            of_generator.step()
            losses.append(first.item() + second.item())
    return losses, []
