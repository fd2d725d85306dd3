"""A graph attention network that classifies the nodes of one graph (pytorch/examples/gat)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset
from toy_data import Trained

import trainwright as tw

NODES, FEATURES, CLASSES = 40, 6, 3


def graph() -> tuple[Tensor, Tensor, Tensor]:
    """Return features (nodes, features), adjacency (nodes, nodes) and classes (nodes,)."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(CLASSES, (NODES,), generator=generator)
    near = torch.where(classes[:, None] == classes, 0.4, 0.05)
    edges = torch.rand(NODES, NODES, generator=generator) < near
    features = torch.randn(NODES, FEATURES, generator=generator) + functional.one_hot(classes, FEATURES)
    return features, edges | edges.t() | torch.eye(NODES, dtype=torch.bool), classes


X, EDGES, LABELS = graph()
TRAIN, TEST = (TensorDataset(nodes, LABELS[nodes]) for nodes in torch.arange(NODES).split([24, 16]))


class Attention(nn.Module):
    """One layer with one head: each node attends to its neighbours."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.project, self.source, self.target = nn.Linear(width, out), nn.Linear(out, 1), nn.Linear(out, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.project(x)
        scores = functional.leaky_relu(self.source(x) + self.target(x).t(), 0.2)
        return scores.masked_fill(~edges, -1e9).softmax(1) @ x


class Gat(nn.Module):
    """Two layers; the graph is in buffers, and a batch has numbers of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(FEATURES, 8), Attention(8, CLASSES)
        self.register_buffer("x", X)
        self.register_buffer("edges", EDGES)

    def forward(self, nodes: Tensor) -> Tensor:
        return self.second(functional.elu(self.first(self.x, self.edges)), self.edges)[nodes]


def job(shuffle: bool = True) -> tw.Job:
    return tw.Job(
        name="graph-attention",
        model=Gat,
        optimizer=lambda parameters: Adam(parameters, lr=0.02, weight_decay=5e-4),
        loss=nn.CrossEntropyLoss(),
        metrics={"accuracy": lambda outputs, label: outputs.argmax(1) == label},
        train=tw.datasets.from_torch(TRAIN, ("node", "label")),
        evaluate=tw.datasets.from_torch(TEST, ("node", "label")),
        inputs="node",
        targets="label",
        batch_size=24,
        epochs=8,
        shuffle=shuffle,
    )


def lightning(shuffle: bool = True) -> Any:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Gat()

        def training_step(self, batch, batch_idx):
            loss = functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            outputs = self.net(batch[0])
            self.log("val_loss", functional.cross_entropy(outputs, batch[1]), sync_dist=True)
            self.log("accuracy", (outputs.argmax(1) == batch[1]).float().mean(), sync_dist=True)

        def configure_optimizers(self):
            return Adam(self.parameters(), lr=0.02, weight_decay=5e-4)

    trainer = L.Trainer(max_epochs=8)
    trainer.fit(Module(), DataLoader(TRAIN, 24, shuffle=shuffle), DataLoader(TEST, 16))
    return trainer


def plain(shuffle: bool = True) -> Trained:
    losses, evaluations = [], []
    model = Gat()
    optimizer = Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
    for _ in range(8):
        for nodes, label in DataLoader(TRAIN, 24, shuffle=shuffle):
            loss = functional.cross_entropy(model(nodes), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            nodes, label = TEST.tensors
            outputs = model(nodes)
            accuracy = (outputs.argmax(1) == label).double().mean().item()
            evaluations.append({"loss": functional.cross_entropy(outputs, label).item(), "accuracy": accuracy})
    return losses, evaluations
