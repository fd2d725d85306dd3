"""The versions of the programs for Lightning and the Trainer of Hugging Face train what the plain loops train."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.program_runs import in_float64, job_of, plain, program
from tests.support.program_table import PROGRAMS, Program
from trainwright.core.data import fold_seed

# Largest relative difference of losses, where it has a reason.
APART = {
    "vision_transformer": 2e-3,  # Lightning's average of the weights begins one step later
    "causal_language_model": 2e-3,  # the Trainer's evaluation is the mean of the means of batches
    "sft": 2e-3,
    "lora": 2e-3,
    "translation": math.inf,  # its sampler draws an order of its own
}
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the libraries warn of one device, few workers of a DataLoader, and such
    pytest.mark.parametrize("case", PROGRAMS, ids=[case.name for case in PROGRAMS]),
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs on the CPU, whose files go into a folder of the test."""
    import lightning
    from transformers import utils

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(utils, "is_datasets_available", lambda: False)  # it finds the folder of this repository
    make = lightning.Trainer.__init__
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    monkeypatch.setattr(lightning.Trainer, "__init__", lambda self, **given: make(self, **{**quiet, **given}))


def told(trainer: Any) -> Mapping[str, float]:
    """The last metrics of a trainer: those of its last evaluation, or where it has none, of its last step."""
    if hasattr(trainer, "state") and hasattr(trainer.state, "log_history"):
        last = [entry for entry in trainer.state.log_history if "eval_loss" in entry][-1]
        return {name.removeprefix("eval_"): last[name] for name in ("eval_loss", "eval_accuracy") if name in last}
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return found if "val_loss" not in found else {**found, "loss": found["val_loss"]}


def test_a_version_for_another_library_is_the_plain_loop(case: Program) -> None:
    with in_float64():
        losses, evaluations = plain(case.name)
        torch.manual_seed(fold_seed(job_of(case.name).training.seed, -1))
        found = told(getattr(program(case.name), case.other)(shuffle=False))
    if not evaluations:
        assert sum(found.values()) == pytest.approx(losses[-1], rel=1e-6)
    elif case.name in APART:
        assert math.isfinite(found["loss"]) and found["loss"] == pytest.approx(
            evaluations[-1]["loss"], rel=APART[case.name]
        )
    else:
        assert {name: found[name] for name in evaluations[-1]} == pytest.approx(evaluations[-1], rel=1e-6)
