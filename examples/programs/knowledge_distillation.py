"""Knowledge distillation: a small network learns from labels and a teacher's logits (PyTorch's tutorial)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam
from torch.utils.data import DataLoader
from toy_data import Trained, images

import trainwright as tw

TRAIN, TEST = images(48), images(24, seed=1)


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(144, width), nn.ReLU(), nn.Linear(width, 10))


def teacher() -> nn.Module:
    """Build the teacher; its weights come from a generator of their own, as they would from a file."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return network(64).requires_grad_(False).eval()


def soft_loss(logits: Tensor, of_teacher: Tensor, label: Tensor) -> Tensor:
    """Return 0.3 of the labels' loss and 0.7 of the divergence at temperature 2, one loss per image."""
    soft = functional.kl_div((logits / 2).log_softmax(1), (of_teacher / 2).softmax(1), reduction="none").sum(1)
    return 0.3 * functional.cross_entropy(logits, label, reduction="none") + 0.7 * 4 * soft


def distillation(shuffle: bool = True) -> tw.Distillation:
    student = tw.Job(
        name="knowledge-distillation",
        model=lambda: network(8),
        optimizer=lambda parameters: Adam(parameters, lr=1e-2),
        loss=nn.CrossEntropyLoss(reduction="none"),
        metrics={"accuracy": lambda outputs, label: outputs.argmax(1) == label},
        train=tw.datasets.from_torch(TRAIN, ("image", "label")),
        evaluate=tw.datasets.from_torch(TEST, ("image", "label")),
        inputs="image",
        targets="label",
        batch_size=16,
        epochs=2,
        shuffle=shuffle,
    )
    big = tw.Teacher(name="big", model=teacher, inputs="image")
    return tw.Distillation(student=student, teachers=(big,), loss=tw.SoftLoss(alpha=0.3, temperature=2.0), way="inline")


def lightning(shuffle: bool = True) -> Any:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.teacher = network(8), teacher()

        def training_step(self, batch, batch_idx):
            image, label = batch
            loss = soft_loss(self.net(image), self.teacher(image), label).mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            image, label = batch
            outputs = self.net(image)
            self.log("val_loss", soft_loss(outputs, self.teacher(image), label).mean(), sync_dist=True)
            self.log("accuracy", (outputs.argmax(1) == label).float().mean(), sync_dist=True)

        def configure_optimizers(self):
            return Adam(self.net.parameters(), lr=1e-2)

    trainer = L.Trainer(max_epochs=2)
    trainer.fit(Module(), DataLoader(TRAIN, 16, shuffle=shuffle), DataLoader(TEST, 16))
    return trainer


def plain(shuffle: bool = True) -> Trained:
    losses, evaluations = [], []
    model, big = network(8), teacher()
    optimizer = Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        for image, label in DataLoader(TRAIN, 16, shuffle=shuffle):
            loss = soft_loss(model(image), big(image), label).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        total = correct = 0.0
        with torch.no_grad():
            for image, label in DataLoader(TEST, 16):
                outputs = model(image)
                total += soft_loss(outputs, big(image), label).sum().item()
                correct += (outputs.argmax(1) == label).sum().item()
        evaluations.append({"loss": total / len(TEST), "accuracy": correct / len(TEST)})
    return losses, evaluations
