"""The example notebook runs from top to bottom."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.processes import ROOT

# A kernel whose own cluster is as `tests.support.ray_clusters` has them.
KERNEL = """
from ipykernel.kernelapp import launch_new_instance
from tests.support import ray_clusters

ray_clusters.thrifty()
launch_new_instance()
"""


class Client(NotebookClient):
    """Runs that kernel."""

    def create_kernel_manager(self) -> Any:
        manager = super().create_kernel_manager()
        manager.kernel_spec.argv = [sys.executable, "-c", KERNEL, "-f", "{connection_file}"]
        return manager


def test_the_quickstart_notebook(tmp_path: Path, forked_workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    Client(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = {
        cell.source: [output for output in cell.outputs if "TqdmWarning" not in output.get("text", "")]  # not ours
        for cell in notebook.cells
        if cell.cell_type == "code"
    }
    metrics = outputs["run.metrics"][0]["data"]["text/plain"]
    assert "accuracy" in metrics
    assert [[*output.get("data", output.values())] for output in outputs["tw.plan(job)"]] == [
        ["text/plain", "text/html"]
    ]
    assert [[*output["data"]] for output in outputs["run.plot()"]] == [["text/plain", "image/png"]]
    assert not [output for cell in outputs.values() for output in cell if output.output_type == "stream"], "noise"
    assert (tmp_path / "runs" / "spirals" / "report.html").stat().st_size > 10_000
