"""Forward-forward: each layer learns by a loss of its own (pytorch/examples/mnist_forward_forward)."""

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

adam = partial(Adam, lr=0.02)


def pairs(rows: int) -> TensorDataset:
    """Return pairs of an image with its label in the first ten pixels, and with another label there."""
    image, label = images(rows).tensors
    wrong = (label + 1 + torch.randint(9, (rows,), generator=torch.Generator().manual_seed(1))) % 10
    return TensorDataset(*(torch.cat([functional.one_hot(y, 10), image.flatten(1)[:, 10:]], 1) for y in (label, wrong)))


TRAIN = pairs(48)


class Net(nn.Module):
    """Two layers, each of which normalizes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(144, 32), nn.Linear(32, 32)


def goodness(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's outputs, cut off from its gradient, and their mean square (n,)."""
    outputs = functional.relu(layer(x / (x.norm(dim=1, keepdim=True) + 1e-4)))
    return outputs.detach(), (outputs**2).mean(1)


def contrast(positive: Tensor, negative: Tensor) -> Tensor:
    """Return one loss per pair, whose threshold is 2."""
    return functional.softplus(2.0 - positive) + functional.softplus(negative - 2.0)


def job(shuffle: bool = True) -> tw.Job:
    def step(model, batch):
        positive, negative = batch["positive"], batch["negative"]
        for name in ("first", "second"):
            layer = getattr(model, name)
            (positive, good), (negative, bad) = goodness(layer, positive), goodness(layer, negative)
            yield name, contrast(good, bad)

    return tw.Job(
        name="forward-forward",
        model=Net,
        optimizer={"first": adam, "second": adam},
        step=step,
        train=tw.datasets.from_torch(TRAIN, ("positive", "negative")),
        batch_size=16,
        epochs=3,
        shuffle=shuffle,
    )


def lightning(shuffle: bool = True) -> Any:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.net = Net()

        def training_step(self, batch, batch_idx):
            positive, negative = batch
            for name, optimizer in zip(("first", "second"), self.optimizers(), strict=True):
                layer = getattr(self.net, name)
                (positive, good), (negative, bad) = goodness(layer, positive), goodness(layer, negative)
                loss = contrast(good, bad).mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.log(name, loss)

        def configure_optimizers(self):
            return adam(self.net.first.parameters()), adam(self.net.second.parameters())

    trainer = L.Trainer(max_epochs=3)
    trainer.fit(Module(), DataLoader(TRAIN, 16, shuffle=shuffle))
    return trainer


def plain(shuffle: bool = True) -> Trained:
    losses = []
    net = Net()
    layers = [(layer, adam(layer.parameters())) for layer in (net.first, net.second)]
    for _ in range(3):
        for positive, negative in DataLoader(TRAIN, 16, shuffle=shuffle):
            total = 0.0
            for layer, optimizer in layers:
                (positive, good), (negative, bad) = goodness(layer, positive), goodness(layer, negative)
                loss = contrast(good, bad).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item()
            losses.append(total)
    return losses, []
