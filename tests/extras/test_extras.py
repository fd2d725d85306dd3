"""The built wheel with one framework, or none, in a fresh environment: it trains an epoch, or says what to install."""

from __future__ import annotations

import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALL_S, COMMAND_S = 1500, 300
JOB = """
import numpy as np
import {framework}
import trainwright as tw

rng = np.random.default_rng(0)
rows = {{"x": rng.normal(size=(64, 4)).astype("float32"), "y": rng.normal(size=(64, 1)).astype("float32")}}

{model}

job = tw.Job(
    name="small", model=build, loss=loss, optimizer=optimizer, train=tw.datasets.table(rows),
    inputs="x", targets="y", batch_size=16, epochs=1, workers=1,
)
"""
TORCH = """
def build():
    return torch.nn.Linear(4, 1)

def loss(outputs, targets):
    return ((outputs - targets) ** 2).mean(1)

def optimizer(parameters):
    return torch.optim.SGD(parameters, 0.1)
"""
KERAS = """
def build():
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])

def loss(outputs, targets):
    return keras.ops.mean((outputs - targets) ** 2, axis=1)

def optimizer(parameters):
    return keras.optimizers.SGD(0.1)
"""
JOBS = {
    "torch": JOB.format(framework="torch", model=TORCH),
    "tensorflow": JOB.format(framework="keras", model=KERAS),
}
NAMES = {"torch": "torch", "tensorflow": "keras"}  # what a job of the extra imports

pytestmark = [pytest.mark.extras, pytest.mark.timeout(INSTALL_S + 3 * COMMAND_S)]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A fresh environment with the wheel.

    Attributes:
        folder: of the environment.
        extra: of trainwright; empty for none.
    """

    folder: Path
    extra: str

    def run(self, *command: str, cwd: Path, timeout: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
        """Run python with a command."""
        python = str(self.folder / "bin" / "python")
        return subprocess.run([python, *command], cwd=cwd, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_S)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module", params=["", "torch", "tensorflow"], ids=lambda extra: extra or "none")
def environment(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(folder=tmp_path_factory.mktemp("environment"), extra=request.param)
    venv.create(made.folder, with_pip=True)
    asked = f"{wheel}[{made.extra}]" if made.extra else str(wheel)
    pip = ("-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), asked)
    done = made.run(*pip, cwd=made.folder, timeout=INSTALL_S)
    assert done.returncode == 0, done.stderr
    return made


@pytest.mark.parametrize("framework", JOBS)
def test_each_framework_trains_where_its_extra_is_installed(
    environment: Environment, framework: str, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(JOBS[framework], encoding="utf-8")
    done = environment.run("-m", "trainwright", "fit", "job.py", cwd=tmp_path)
    if framework == environment.extra:
        assert done.returncode == 0, done.stderr
        shown = environment.run("-m", "trainwright", "show", "small", "--json", cwd=tmp_path)
        assert '"state": "done"' in shown.stdout
    else:
        assert done.returncode == 1, done.stdout
        assert f"{NAMES[framework]} is not installed: pip install 'trainwright[{framework}]'" in done.stderr
        assert "Traceback" not in done.stderr


def test_probe_and_doctor_name_the_extra(environment: Environment, tmp_path: Path) -> None:
    done = environment.run("-m", "trainwright", "doctor", "--json", cwd=tmp_path)
    for absent in {"torch", "tensorflow"} - {environment.extra}:
        assert f"trainwright[{absent}]" in done.stdout, done.stdout
    probed = environment.run("-m", "trainwright", "probe", cwd=tmp_path)
    if environment.extra == "torch":
        assert probed.returncode == 0, probed.stderr
    else:
        assert probed.returncode == 1, probed.stdout
        assert "torch is not installed: pip install 'trainwright[torch]'" in probed.stderr
