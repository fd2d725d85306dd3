"""The example notebook runs from top to bottom."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_the_quickstart_notebook(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
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
    assert not [output for cell in outputs.values() for output in cell if output.output_type == "stream"], "noise"
    assert (tmp_path / "runs" / "spirals" / "report.html").stat().st_size > 10_000
