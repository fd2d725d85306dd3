"""Segmentation: a class for each pixel, class weights, the mean intersection over union (torchvision's references)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import JaccardIndex
from toy_data import Trained, images

import trainwright as tw

CLASSES = 3
WEIGHTS = torch.tensor([0.5, 1.0, 2.0])


def masked(rows: int, seed: int) -> TensorDataset:
    """Return pairs of an image and the class of each of its pixels; 255 where there is none."""
    image = images(rows, seed=seed).tensors[0]
    smooth = functional.avg_pool2d(image, 3, 1, 1).squeeze(1)
    mask = (smooth > 0.1).long() + (smooth > 0.5)
    return TensorDataset(image, mask.masked_fill(image.squeeze(1) > 2.0, 255))


TRAIN, TEST = masked(40, 0), masked(16, 1)


def network() -> nn.Module:
    """Build three convolutions."""
    body = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*body, nn.Conv2d(8, CLASSES, 1))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return SGD(parameters, lr=0.5, momentum=0.9)


def mean_iou() -> JaccardIndex:
    """Make the mean over classes of intersection / union."""
    return JaccardIndex(task="multiclass", num_classes=CLASSES, ignore_index=255)


def job(shuffle: bool = True) -> tw.Job:
    return tw.Job(
        name="segmentation",
        model=network,
        optimizer=sgd,
        schedule=lambda step, total: (1 - step / total) ** 0.9,
        loss=nn.CrossEntropyLoss(WEIGHTS, ignore_index=255),
        metrics={"iou": mean_iou},
        train=tw.datasets.from_torch(TRAIN, ("image", "mask")),
        evaluate=tw.datasets.from_torch(TEST, ("image", "mask")),
        inputs="image",
        targets="mask",
        batch_size=16,
        epochs=2,
        shuffle=shuffle,
    )


def lightning(shuffle: bool = True) -> Any:
    import lightning as L
    from torch.optim.lr_scheduler import PolynomialLR

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()
            self.loss = nn.CrossEntropyLoss(WEIGHTS, ignore_index=255)
            self.iou = mean_iou()

        def training_step(self, batch, batch_idx):
            loss = self.loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            outputs = self.net(batch[0])
            self.iou.update(outputs, batch[1])
            self.log("val_loss", self.loss(outputs, batch[1]), sync_dist=True)
            self.log("iou", self.iou)

        def configure_optimizers(self):
            optimizer = sgd(self.parameters())
            scheduler = PolynomialLR(optimizer, self.trainer.estimated_stepping_batches, power=0.9)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    trainer = L.Trainer(max_epochs=2)
    trainer.fit(Module(), DataLoader(TRAIN, 16, shuffle=shuffle), DataLoader(TEST, 16))
    return trainer


def plain(shuffle: bool = True) -> Trained:
    losses, evaluations = [], []
    model, loader = network(), DataLoader(TRAIN, 16, shuffle=shuffle)
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, 2 * len(loader), power=0.9)
    criterion = nn.CrossEntropyLoss(WEIGHTS, ignore_index=255)
    for _ in range(2):
        for image, mask in loader:
            loss = criterion(model(image), mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        iou = mean_iou()
        with torch.no_grad():
            image, mask = TEST.tensors
            outputs = model(image)
            iou.update(outputs, mask)
        evaluations.append({"loss": criterion(outputs, mask).item(), "iou": iou.compute().item()})
    return losses, evaluations
