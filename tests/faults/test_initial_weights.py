"""Runs that start from files of weights, on real workers: a killed worker changes nothing, nor does the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import trainwright as tw
from tests.support.finished_runs import final_state, told
from tests.support.torch_jobs import Kill, rank
from trainwright.core import events
from trainwright.core.errors import RunConflict

ROWS = 48
DATA = {"id": np.arange(ROWS), "x": np.random.default_rng(0).normal(size=(ROWS, 6))}
DATA["y"] = DATA["x"].sum(1)


class Net(nn.Module):
    """A frozen base, which files give, and a head, which is new."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)).double()
        self.head = nn.Linear(8, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.tanh(self.base(x)))[:, 0]
        return outputs


def model() -> nn.Module:
    """The base has no values before they are loaded; the head is drawn."""
    with torch.device("meta"):
        net = Net()
    net.base.requires_grad_(False)
    net.head = nn.Linear(8, 1).double()
    return net


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets) ** 2


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def base(folder: Path, factor: float = 1.0) -> Path:
    folder.mkdir(exist_ok=True)
    random = torch.Generator().manual_seed(2)
    names = {name: value for name, value in Net().state_dict().items() if name.startswith("base.")}
    made = {name: factor * torch.randn(value.shape, generator=random).double() for name, value in names.items()}
    save_file(made, folder / "model.safetensors")
    return folder


def job(folder: Path, *kills: Kill, **fields: Any) -> tw.Job:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        for kill in kills:
            if torch.is_grad_enabled() and rank() == kill.rank and (folder / "armed").exists():
                kill.strike()
        return squared(outputs, targets)

    folder.mkdir(exist_ok=True)
    data = tw.datasets.table(DATA)
    weights = tw.InitialWeights(str(base(folder / "base")), new=("head.*",))
    given: dict[str, Any] = {
        "workers": 2, "save_frozen": False, "initial_weights": weights,
        "callbacks": lambda: [Arming(folder)], **fields,
    }  # fmt: skip
    return tw.Job(
        name="tuned", model=model, optimizer=sgd, loss=loss, train=data, evaluate=data, inputs="x", targets="y",
        batch_size=8, epochs=2, spares=0, checkpoint_steps=2, storage=str(folder / "runs"), **given,
    )  # fmt: skip


class Arming:
    """From the fifth step on, a rank may be killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def after_step(self, context: tw.CallbackContext) -> None:
        if context.step == 5:
            (self.folder / "armed").touch()


@pytest.mark.parametrize("strategy", ["sharded", pytest.param("data_parallel", marks=pytest.mark.soak)])
def test_a_killed_worker_loads_the_files_again(ray_cluster: None, tmp_path: Path, strategy: str) -> None:
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    assert tw.fit(job(unbroken, strategy=strategy)).state == "done"
    kill = Kill(rank=1, step=5, folder=str(killed))
    broken = job(killed, kill, strategy=strategy)
    assert tw.fit(broken).state == "done"
    assert kill.mark.exists() and len(told(killed / "runs", "tuned", events.Formed)) == 2
    assert final_state(killed / "runs", "tuned") == final_state(unbroken / "runs", "tuned")

    loaded: Any = tw.load_model(broken)
    for name, value in torch_weights(killed / "base").items():
        assert torch.equal(loaded.state_dict()[name], value), name
    by_hand = squared(loaded(torch.tensor(DATA["x"])), torch.tensor(DATA["y"])).mean().item()
    last: Any = told(killed / "runs", "tuned", events.Evaluated)[-1]
    assert last.metrics["loss"] == pytest.approx(by_hand, rel=1e-12)
    assert tw.evaluate(broken)["loss"] == pytest.approx(by_hand, rel=1e-12)
    if strategy == "sharded":
        return
    (killed / "base").rename(killed / "moved")
    moved = tw.InitialWeights(str(killed / "moved"), new=("head.*",))
    tw.fit(broken.replace(initial_weights=moved, epochs=3))
    base(killed / "moved", factor=1.001)
    with pytest.raises(RunConflict, match="initial_weights: "):
        tw.fit(broken.replace(initial_weights=moved, epochs=4))


def torch_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))
