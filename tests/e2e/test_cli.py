"""The command line as a user types it: fit, plan, evaluate, runs, show, logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import address, finish

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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A job file whose run is done; what fit printed."""
    folder = tmp_path_factory.mktemp("cli")
    file = folder / "job.py"
    file.write_text(JOB.format(storage=str(folder / "runs")))
    code, out, err = finish("fit", file)
    assert code == 0, err
    return file, out, err


def test_fit_says_where_everything_is(trained: tuple[Path, str, str]) -> None:
    file, out, err = trained
    runs = file.parent / "runs"
    assert str(runs / "little" / "report.html") in out and "load_model" in out
    assert "data_parallel: 2 workers" in err
    assert "ray" not in err.lower() and "Traceback" not in err and "Warning" not in err, err
    html = (runs / "little" / "report.html").read_text()
    assert "<svg" in html and "http://" not in html.replace("http://www.w3.org", "")
    assert list((runs / "little" / "tensorboard").iterdir())


def test_evaluate_agrees_with_the_run(trained: tuple[Path, str, str], ray_cluster: None) -> None:
    """On the two workers that it was trained on."""
    file, _, _ = trained
    code, out, err = finish("evaluate", file, "--json", cluster=address())
    assert code == 0 and "little at step 40 on 2 workers" in err, err
    shown = json.loads(finish("show", "little", "--storage", file.parent / "runs", "--json")[1])
    for name, value in json.loads(out).items():
        assert value == pytest.approx(shown["metrics"][name], rel=1e-6)


def test_read_commands_need_no_ray_and_no_framework(trained: tuple[Path, str, str]) -> None:
    storage = trained[0].parent / "runs"
    for arguments in (("runs",), ("show", "little"), ("logs", "little")):
        code, out, err = finish(*arguments, "--storage", storage, "--json")
        assert code == 0 and not err, err
        assert "little" in out or arguments[0] == "logs"
        code, out, err = finish(*arguments, "--storage", storage)
        assert code == 0 and out.strip(), err


def test_plan_as_json(trained: tuple[Path, str, str], ray_cluster: None) -> None:
    code, out, err = finish("plan", trained[0], "--set", "name=other", "--json", cluster=address())
    assert code == 0, err
    decision = json.loads(out)
    assert decision["chosen"]["strategy"] == "data_parallel"
    reasons = {item["strategy"]: item["reason"] for item in decision["infeasible"]}
    assert reasons["one_device"] == "workers=2 is pinned"
    assert "no layer of this model" in reasons["tensor_parallel"]


def test_all_wrong_overrides_are_said_at_once(trained: tuple[Path, str, str]) -> None:
    code, _, err = finish("fit", trained[0], "--set", "epoch=3", "--set", "batchsize=1")
    assert code == 2 and "'epochs'" in err and "'batch_size'" in err
    code, _, err = finish("fit", trained[0], "--set", "inputs=xx", "--set", "targets=label", "--set", "name=n")
    assert code == 2 and "inputs='xx'" in err and "targets='label'" in err


def test_a_demand_that_the_cluster_cannot_meet(trained: tuple[Path, str, str], ray_cluster: None) -> None:
    too_much = ("--set", "accelerator=gpu", "--set", "workers=4", "--set", "name=n")
    code, _, err = finish("fit", trained[0], *too_much, cluster=address())
    assert code == 1 and "needs 4 GPU, the cluster has 0" in err
