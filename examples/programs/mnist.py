"""MNIST: a convolutional network, Adadelta, a rate that falls with each epoch (pytorch/examples/mnist)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adadelta
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from toy_data import Trained, images

import trainwright as tw

TRAIN, TEST = images(72), images(40, seed=1)


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.fc1, self.fc2 = nn.Linear(128, 16), nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = functional.relu(self.conv2(functional.relu(self.conv1(image))))
        x = torch.flatten(functional.max_pool2d(x, 2), 1)
        return functional.log_softmax(self.fc2(functional.relu(self.fc1(x))), dim=1)


def job(shuffle: bool = True) -> tw.Job:
    return tw.Job(
        name="mnist",
        model=Net,
        optimizer=lambda parameters: Adadelta(parameters, lr=1.0),
        schedule=lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.7),
        schedule_by="epoch",
        loss=functional.nll_loss,
        metrics={"accuracy": lambda outputs, label: outputs.argmax(1) == label},
        train=tw.datasets.from_torch(TRAIN, ("image", "label")),
        evaluate=tw.datasets.from_torch(TEST, ("image", "label")),
        inputs="image",
        targets="label",
        batch_size=16,
        epochs=2,
        shuffle=shuffle,
    )


def lightning(shuffle: bool = True) -> Any:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, batch_idx):
            image, label = batch
            loss = functional.nll_loss(self.net(image), label)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            image, label = batch
            outputs = self.net(image)
            self.log("val_loss", functional.nll_loss(outputs, label), sync_dist=True)
            self.log("accuracy", (outputs.argmax(1) == label).float().mean(), sync_dist=True)

        def configure_optimizers(self):
            optimizer = Adadelta(self.parameters(), lr=1.0)
            return [optimizer], [StepLR(optimizer, step_size=1, gamma=0.7)]

    trainer = L.Trainer(max_epochs=2)
    trainer.fit(Module(), DataLoader(TRAIN, 16, shuffle=shuffle), DataLoader(TEST, 16))
    return trainer


def plain(shuffle: bool = True) -> Trained:
    losses, evaluations = [], []
    model = Net()
    optimizer = Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(2):
        for image, label in DataLoader(TRAIN, 16, shuffle=shuffle):
            loss = functional.nll_loss(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
        total = correct = 0.0
        with torch.no_grad():
            for image, label in DataLoader(TEST, 16):
                outputs = model(image)
                total += functional.nll_loss(outputs, label, reduction="sum").item()
                correct += (outputs.argmax(1) == label).sum().item()
        evaluations.append({"loss": total / len(TEST), "accuracy": correct / len(TEST)})
    return losses, evaluations
