"""The command line as a user types it: fit, plan, evaluate, runs, show, logs."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.cli_job import JOB
from tests.support.processes import finish
from trainwright.cli.main import main
from trainwright.reporting.run_views import run_view


@dataclass(frozen=True)
class Typed:
    """Runs the command in this process, on its cluster: exit code, stdout, stderr."""

    patch: pytest.MonkeyPatch
    captured: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self.patch.setattr("sys.argv", ["trainwright", *map(str, arguments)])
        self.captured.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *self.captured.readouterr()


@pytest.fixture
def typed(ray_cluster: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    return Typed(monkeypatch, capsys)


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


def test_fit_tells_programs_what_show_tells(trained: tuple[Path, str, str], typed: Typed) -> None:
    file, _, _ = trained
    code, out, err = typed("fit", file, "--set", "name=brief", "--set", "epochs=1", "--json")
    assert code == 0, err
    shown = run_view(str(file.parent / "runs"), "brief").data
    assert json.loads(out)["metrics"] == shown["metrics"] and json.loads(out)["state"] == "done"


def test_evaluate_agrees_with_the_run(trained: tuple[Path, str, str], typed: Typed) -> None:
    """On the two workers that it was trained on."""
    file, _, _ = trained
    code, out, err = typed("evaluate", file, "--json")
    assert code == 0 and "little at step 40 on 2 workers" in err, err
    metrics = run_view(str(file.parent / "runs"), "little").data["metrics"]
    for name, value in json.loads(out).items():
        assert value == pytest.approx(metrics[name], rel=1e-6)


def test_read_commands_need_no_ray_and_no_framework(trained: tuple[Path, str, str]) -> None:
    storage = trained[0].parent / "runs"
    for arguments in (("runs",), ("show", "little"), ("logs", "little")):
        code, out, err = finish(*arguments, "--storage", storage, "--json")
        assert code == 0 and not err, err
        assert "little" in out or arguments[0] == "logs"
        code, out, err = finish(*arguments, "--storage", storage)
        assert code == 0 and out.strip(), err


def test_plan_as_json(trained: tuple[Path, str, str], typed: Typed) -> None:
    code, out, err = typed("plan", trained[0], "--set", "name=other", "--json")
    assert code == 0, err
    decision = json.loads(out)
    assert decision["chosen"]["strategy"] == "data_parallel"
    reasons = {item["strategy"]: item["reason"] for item in decision["infeasible"]}
    assert reasons["one_device"] == "workers=2 is pinned"
    assert "no layer of this model" in reasons["tensor_parallel"]


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        ("epoch=3 batchsize=1", 2, ("'epochs'", "'batch_size'")),
        ("inputs=xx targets=label", 2, ("inputs='xx'", "targets='label'")),
        ("accelerator=gpu workers=4", 1, ("needs 4 GPU, the cluster has 0",)),
    ],
)
def test_all_wrong_overrides_and_demands_are_said_at_once(
    overrides: str, code: int, words: tuple[str, ...], trained: tuple[Path, str, str], typed: Typed
) -> None:
    given = [part for override in overrides.split() for part in ("--set", override)]
    ended, _, err = typed("fit", trained[0], "--set", "name=n", *given)
    assert ended == code and all(word in err for word in words), err


HELPED = """
import numpy as np, torch
from torch import nn
from torch.nn import functional
import trainwright as tw
import cleaning

FACTOR = 1

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(1, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(functional.relu(self.first(x)))

def scale(errors):
    return errors * FACTOR

job = tw.Job(
    name="helped", model=lambda: Net(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    loss=lambda outputs, targets: scale((outputs - targets) ** 2).mean(1), inputs="x", targets="x", batch_size=4,
    train=tw.datasets.table({{"x": np.arange(8, dtype="float32")[:, None]}}).map_batches(cleaning.clean),
    workers=1, storage={storage!r},
)
"""
CLEANING = """
def clean(columns):
    return normal(columns)

def normal(columns):
    return columns
"""


def test_a_run_whose_code_changed_is_refused_and_what_changed_is_named(
    tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    file, module = tmp_path / "helped.py", tmp_path / "cleaning.py"
    text = HELPED.format(storage=str(tmp_path / "runs"))

    def fit(old: str = "", new: str = "", *options: str) -> tuple[int, str, str]:
        file.write_text(text.replace(old, new))
        module.write_text(CLEANING.replace(old, new))
        monkeypatch.delitem(sys.modules, "cleaning", raising=False)
        importlib.invalidate_caches()
        return typed("fit", file, *options)

    code, _, err = fit()
    assert code == 0, err
    for old, new, said in [
        ("functional.relu", "functional.tanh", "model: Net.forward() in helped.py changed"),
        ("return errors * FACTOR", "return errors * 0", "loss: helper scale() in helped.py changed"),
        ("FACTOR = 1", "FACTOR = 100", "loss: global FACTOR in helped.py changed from 1 to 100"),
        ("return columns", "return {'x': columns['x'] * 2}", "train: helper normal() in cleaning.py changed"),
    ]:
        code, _, err = fit(old, new)
        assert code == 1 and f"started with another job:\n    {said}\n" in err and "--resume" in err, err
    code, _, err = fit("def scale", "\n# a comment\n\ndef scale")
    assert code == 1 and "is finished" in err and "another job" not in err
    code, _, err = fit("FACTOR = 1", "FACTOR = 100", "--resume", "--set", "epochs=2")
    assert code == 0, err
