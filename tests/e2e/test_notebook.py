"""The example notebooks run from top to bottom, and again."""

from __future__ import annotations

import ast
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.processes import ROOT, wait_for

# A kernel whose own cluster is as `tests.support.ray_clusters` has them.
KERNEL = """
import trainwright
from ipykernel.kernelapp import launch_new_instance
from tests.support import ray_clusters

ray_clusters.thrifty()
launch_new_instance()
"""
SHOWN = ("display_data", "execute_result")  # neither errors nor warnings
PLAIN_KERNEL = "from ipykernel.kernelapp import launch_new_instance; launch_new_instance()"


class Client(NotebookClient):
    """Runs a kernel of this Python."""

    kernel = KERNEL

    def create_kernel_manager(self) -> Any:
        manager = super().create_kernel_manager()
        manager.kernel_spec.argv = [sys.executable, "-c", self.kernel, "-f", "{connection_file}"]
        return manager


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels find the tests' own modules."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    yield


def outputs_of(name: str, folder: Path, *, times: int = 1) -> dict[str, list[Any]]:
    """Run all cells of a notebook in one kernel; return the last outputs of each, by its id."""
    notebook = nbformat.read(ROOT / "examples" / name, as_version=4)
    client = Client(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    with client.setup_kernel():
        for _ in range(times):
            for number, cell in enumerate(notebook.cells):
                client.execute_cell(cell, number)
    found = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    noise = [output for each in found.values() for output in each if output.output_type not in SHOWN]
    assert not noise, noise
    return found


def kinds(outputs: Sequence[Any]) -> list[list[str]]:
    """The types of content of each output."""
    return [[*output["data"]] for output in outputs]


def text(outputs: Sequence[Any]) -> str:
    """What the value of a cell prints."""
    return str(outputs[-1]["data"]["text/plain"])


def test_first_steps(tmp_path: Path, forked_workers: None) -> None:
    outputs = outputs_of("quickstart.ipynb", tmp_path)
    assert kinds(outputs["plan"]) == kinds(outputs["start"]) == [["text/plain", "text/html"]]
    (started,) = outputs["start"]
    assert "stopped at step" in started["data"]["text/html"], "the output of the cell has the end of the run"
    assert text(outputs["stop"]) == "'stopped'"
    resumed, run = outputs["resume"]
    assert "resuming step" in resumed["data"]["text/html"] and "<polyline" in resumed["data"]["text/html"]
    assert text([run]).startswith("Run('spirals', done")
    assert ast.literal_eval(text(outputs["open"]))["accuracy"] > 0.9
    assert re.search(r"^479 +480 ", text(outputs["history"]), re.MULTILINE), "a row for each step"
    assert kinds(outputs["plot"]) == [["text/plain", "image/png"]]
    assert "evaluation: accuracy" in outputs["compare"][-1]["data"]["text/html"]
    assert text(outputs["model"]).startswith("tensor([[")
    assert (tmp_path / "runs" / "spirals" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_model_and_data_of_ones_own(tmp_path: Path, forked_workers: None, times: int) -> None:
    outputs = outputs_of("own_model_and_data.ipynb", tmp_path, times=times)
    assert kinds(outputs["job"]) == [["text/plain", "text/html"]] * 2
    assert "mean_rent" in text(outputs["history"]) and "400" in text(outputs["history"])
    assert ast.literal_eval(text(outputs["evaluate"]))["error"] < 0.1, "100 a month"
    assert len(outputs["predict"]) == 2, "an output that changes, and the rows"
    assert text(outputs["predict"]).split()[:3] == ["sample", "rent", "output"]
    assert (tmp_path / "flats.safetensors").stat().st_size > 4_000


def test_a_large_cluster_is_planned_without_one(tmp_path: Path) -> None:
    outputs = outputs_of("plan_a_cluster.ipynb", tmp_path)
    assert kinds(outputs["plan"]) == [["text/plain", "text/html"]]
    assert "64 H100-80GB" in text(outputs["plan"]) and "goodput" in text(outputs["plan"])
    assert "A100-80GB" in text(outputs["kinds"]) and "bubble" in text(outputs["own"])
    assert not (tmp_path / "runs" / "gpt").exists(), "nothing was started"


SLOW = """
from pathlib import Path
from threading import Event

import numpy as np
import torch

import trainwright as tw

def paced(step, total):  # until it is interrupted
    if 5 < step < 300 and not Path({interrupted!r}).exists():
        Path({steps!r}).touch()
        Event().wait(0.1)
    return 1.0

rows = tw.datasets.table({{"x": np.ones((400, 4), np.float32), "y": np.zeros(400, np.int64)}})
job = tw.Job(
    name="slow", model=lambda: torch.nn.Linear(4, 2), loss=torch.nn.CrossEntropyLoss(), train=rows, inputs="x",
    targets="y", optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1), batch_size=2, epochs=2, workers=2,
    schedule=paced, preflight=False,
)
"""


def test_an_interrupted_cell_takes_a_checkpoint_and_leaves_the_kernel(tmp_path: Path, forked_workers: None) -> None:
    steps, interrupted = tmp_path / "steps", tmp_path / "interrupted"
    sources = (
        SLOW.format(steps=str(steps), interrupted=str(interrupted)),
        "run = tw.fit(job)",
        "(run.state, len(run.history))",
        "run = tw.fit(job)",
        "(run.state, len(run.history))",
    )
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = Client(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}})

    def interrupt() -> None:
        wait_for(steps.exists)
        os.kill(client.km.provisioner.pid, signal.SIGINT)

    with client.setup_kernel(), ThreadPoolExecutor(1) as threads:
        client.execute_cell(cells[0], 0)
        told = threads.submit(interrupt)
        client.execute_cell(cells[1], 1)
        told.result()
        interrupted.touch()
        for number in (2, 3, 4):
            client.execute_cell(cells[number], number)
    state, step = ast.literal_eval(text(cells[2].outputs))
    assert state == "stopped" and 5 < step < 400
    assert f"resuming step {step}" in cells[3].outputs[0]["data"]["text/html"]
    assert ast.literal_eval(text(cells[4].outputs)) == ("done", 400)


def test_nothing_warns_of_missing_widgets(tmp_path: Path) -> None:
    """Ray and tqdm do in a kernel without ipywidgets."""
    cell = nbformat.v4.new_code_cell("import trainwright\nimport ray")
    notebook = nbformat.v4.new_notebook(cells=[cell])
    client = Client(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.kernel = PLAIN_KERNEL
    client.execute()
    assert cell.outputs == []
