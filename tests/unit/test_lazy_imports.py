"""Importing is cheap: no framework, no Ray, nothing started, until something needs it. Public names are pinned."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

import trainwright as tw

HEAVY = ("ray", "torch", "tensorflow", "keras", "pyarrow", "pandas", "matplotlib")
PUBLIC = {
    "DistilledRun",
    "EarlyStop",
    "Distillation",
    "students",
    "Match",
    "Search",
    "search",
    "SelfDistillation",
    "SoftLoss",
    "Teacher",
    "distill",
    "doctor",
    "Calibration",
    "CallbackContext",
    "CustomLoop",
    "Estimate",
    "Measurement",
    "calibrate",
    "estimate",
    "load_distillation",
    "load_job",
    "rank",
    "profile_of",
    "transformer_profile",
    "Cluster",
    "InitialWeights",
    "Job",
    "Checkpointing",
    "Data",
    "Planning",
    "Recovery",
    "Scaling",
    "TensorFlow",
    "Training",
    "WeightAverage",
    "Pad",
    "Plan",
    "Run",
    "Terms",
    "TrainwrightError",
    "TwoStage",
    "StoredRun",
    "chaos",
    "compare",
    "open_run",
    "datasets",
    "evaluate",
    "export",
    "fit",
    "from_hf_trainer",
    "from_lightning",
    "gather",
    "generate",
    "load_model",
    "log",
    "plan",
    "predict",
    "schedules",
    "trackers",
    "start",
    "tune",
}


def test_no_module_hides_a_public_function() -> None:
    """Importing `trainwright.NAME` sets an attribute of that name."""
    modules = {name for name in tw.__all__ if find_spec(f"trainwright.{name}") is not None}
    assert modules == {"datasets"}


def loaded_by(statement: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has loaded after a statement."""
    program = f"import sys\n{statement}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_imports_and_what_a_job_file_names_load_nothing_heavy() -> None:
    modules = "trainwright.core.job, trainwright.core.engine, trainwright.strategies, trainwright.datasets"
    named = "tw.Job, tw.Terms, tw.Plan, tw.Cluster, tw.schedules, tw.trackers.MLflow, tw.trackers.WandB"
    assert loaded_by(f"import trainwright as tw\n{named}\nimport {modules}") == set()


def test_command_line_loads_no_framework_until_it_trains() -> None:
    assert loaded_by("import trainwright.cli.main").isdisjoint({"ray", "torch", "tensorflow", "keras"})


def test_workers_load_no_pandas() -> None:
    """It would be a tenth of their start."""
    assert "pandas" not in loaded_by("import trainwright.runtime.worker_actor, trainwright.worker.worker")


def test_engines_of_torch_need_torch_and_numpy_alone() -> None:
    """As on a machine with a GPU and little else, where `tests/gpu` run."""
    code = """
import importlib, sys
asked = set()
class Missing:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {"ray", "pydantic", "cloudpickle", "rich", "pandas", "safetensors", "tensorflow", "keras"}:
            asked.add(top)
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import trainwright.strategies.torch
assert "torch" not in sys.modules, "the package imports it"
for name in ("base", "data_parallel", "fsdp", "pipeline", "tensor_parallel"):
    importlib.import_module(f"trainwright.strategies.torch.engines.{name}")
import trainwright.strategies.torch.profiling
assert not asked & {"ray", "tensorflow", "keras"}, f"imported where they are installed: {asked}"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_public_names_are_these() -> None:
    assert set(tw.__all__) == PUBLIC
    assert set(dir(tw)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_resolve(name: str) -> None:
    assert getattr(tw, name) is getattr(tw, name) is not None


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        _ = tw.fitt
