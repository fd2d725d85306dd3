"""A vision transformer: AdamW, warm-up and cosine, label smoothing, an average of weights (timm, pytorch/vision)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from toy_data import Trained, images

import trainwright as tw

TRAIN, TEST = images(48), images(32, seed=1)


class Vit(nn.Module):
    """Patches of 4 x 4 pixels, two layers, the mean over patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 4, stride=4)
        self.positions = nn.Parameter(torch.zeros(1, 9, 16))
        layers = [nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True) for _ in range(2)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.layers(x).mean(1))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return AdamW(parameters, lr=3e-3, weight_decay=0.05)


def warm_up_and_cosine(optimizer: torch.optim.Optimizer) -> Any:
    parts = [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 6)]
    return SequentialLR(optimizer, parts, milestones=[3])


def job(shuffle: bool = True) -> tw.Job:
    return tw.Job(
        name="vision-transformer",
        model=Vit,
        optimizer=adamw,
        schedule=warm_up_and_cosine,
        loss=nn.CrossEntropyLoss(label_smoothing=0.1),
        metrics={"accuracy": lambda outputs, label: outputs.argmax(1) == label},
        train=tw.datasets.from_torch(TRAIN, ("image", "label")),
        evaluate=tw.datasets.from_torch(TEST, ("image", "label")),
        inputs="image",
        targets="label",
        batch_size=16,
        epochs=3,
        shuffle=shuffle,
        weight_average=tw.WeightAverage(decay=0.9, warmup=False),
    )


def lightning(shuffle: bool = True) -> Any:
    import lightning as L
    from lightning.pytorch.callbacks import WeightAveraging

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Vit()

        def training_step(self, batch, batch_idx):
            loss = functional.cross_entropy(self.net(batch[0]), batch[1], label_smoothing=0.1)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            outputs = self.net(batch[0])
            loss = functional.cross_entropy(outputs, batch[1], label_smoothing=0.1)
            self.log("val_loss", loss, sync_dist=True)
            self.log("accuracy", (outputs.argmax(1) == batch[1]).float().mean(), sync_dist=True)

        def configure_optimizers(self):
            optimizer = adamw(self.parameters())
            return [optimizer], [{"scheduler": warm_up_and_cosine(optimizer), "interval": "step"}]

    average = WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.9))
    trainer = L.Trainer(max_epochs=3, callbacks=[average])
    trainer.fit(Module(), DataLoader(TRAIN, 16, shuffle=shuffle), DataLoader(TEST, 16))
    return trainer


def plain(shuffle: bool = True) -> Trained:
    losses, evaluations = [], []
    model = Vit()
    optimizer = adamw(model.parameters())
    scheduler = warm_up_and_cosine(optimizer)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)  # the average begins with the first weights
    for _ in range(3):
        for image, label in DataLoader(TRAIN, 16, shuffle=shuffle):
            loss = functional.cross_entropy(model(image), label, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
            losses.append(loss.item())
        total = correct = 0.0
        average.eval()
        with torch.no_grad():
            for image, label in DataLoader(TEST, 16):
                outputs = average(image)
                total += functional.cross_entropy(outputs, label, label_smoothing=0.1, reduction="sum").item()
                correct += (outputs.argmax(1) == label).sum().item()
        evaluations.append({"loss": total / len(TEST), "accuracy": correct / len(TEST)})
    return losses, evaluations
