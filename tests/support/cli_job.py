"""The job file that tests of the command line train."""

from __future__ import annotations

JOB = """
import numpy as np, torch
from torch import nn
from torch.nn import functional
import trainwright as tw

rng = np.random.default_rng(0)
x = rng.normal(size=(500, 8)).astype("float32")
y = (x[:, 0] > x[:, 1]).astype("int64")

job = tw.Job(
    name="little",
    model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)),
    loss=lambda logits, labels: functional.cross_entropy(logits, labels, reduction="none"),
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    train=tw.datasets.table({{"x": x, "y": y}}),
    evaluate=tw.datasets.table({{"x": x[:100], "y": y[:100]}}),
    inputs="x", targets="y", batch_size=50, epochs=4, workers=2,
    metrics={{"accuracy": lambda logits, labels: logits.argmax(1) == labels}},
    storage={storage!r},
)
"""
