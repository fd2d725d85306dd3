"""ImageNet: a residual network with batch norm, SGD with momentum, top-1 and top-5 (pytorch/examples/imagenet)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from toy_data import Trained, images

import trainwright as tw

TRAIN, TEST = images(48, channels=3), images(24, channels=3, seed=1)


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x))))))


def resnet() -> nn.Module:
    """Build a residual network of two blocks."""
    stem = [nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*stem, Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)


def top1(outputs: Tensor, label: Tensor) -> Tensor:
    return outputs.argmax(1) == label


def top5(outputs: Tensor, label: Tensor) -> Tensor:
    return (outputs.topk(5).indices == label[:, None]).any(1)


def job(shuffle: bool = True) -> tw.Job:
    return tw.Job(
        name="imagenet",
        model=resnet,
        optimizer=sgd,
        schedule=lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.1),
        schedule_by="epoch",
        loss=nn.CrossEntropyLoss(),
        metrics={"top1": top1, "top5": top5},
        train=tw.datasets.from_torch(TRAIN, ("image", "label")),
        evaluate=tw.datasets.from_torch(TEST, ("image", "label")),
        inputs="image",
        targets="label",
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
            self.net = resnet()

        def training_step(self, batch, batch_idx):
            image, label = batch
            loss = functional.cross_entropy(self.net(image), label)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            image, label = batch
            outputs = self.net(image)
            self.log("val_loss", functional.cross_entropy(outputs, label), sync_dist=True)
            self.log("top1", top1(outputs, label).float().mean(), sync_dist=True)
            self.log("top5", top5(outputs, label).float().mean(), sync_dist=True)

        def configure_optimizers(self):
            optimizer = sgd(self.parameters())
            return [optimizer], [StepLR(optimizer, step_size=1, gamma=0.1)]

    trainer = L.Trainer(max_epochs=2, sync_batchnorm=True)
    trainer.fit(Module(), DataLoader(TRAIN, 16, shuffle=shuffle), DataLoader(TEST, 16))
    return trainer


def plain(shuffle: bool = True) -> Trained:
    losses, evaluations = [], []
    model = resnet()
    optimizer = sgd(model.parameters())
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    for _ in range(2):
        model.train()
        for image, label in DataLoader(TRAIN, 16, shuffle=shuffle):
            loss = functional.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
        model.eval()
        total = first = fifth = 0.0
        with torch.no_grad():
            for image, label in DataLoader(TEST, 16):
                outputs = model(image)
                total += functional.cross_entropy(outputs, label, reduction="sum").item()
                first += top1(outputs, label).sum().item()
                fifth += top5(outputs, label).sum().item()
        rows = len(TEST)
        evaluations.append({"loss": total / rows, "top1": first / rows, "top5": fifth / rows})
    return losses, evaluations
