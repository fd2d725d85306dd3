"""Descriptions of jobs as runs store them: they must not change, or a resumed run is taken for another job."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from trainwright.planning.job_description import describe, description_changes

STORED = Path(__file__).with_name("job_descriptions.json")
DATA = tw.datasets.table({"x": [[1.0]], "y": [0]})
_DIGEST = re.compile(
    r"(?<=\[)[0-9a-f]{8}(?=\])|(?<=functions )[0-9a-f]{8}|(?<=\", \")[^\"]*(?=\"\])|(?<=bytecode of )Python [\d.]+"
)


class Network:
    """A model with a parameter."""

    width = 3


def optimizer(parameters: Any, rate: float = 0.1) -> Any:
    return parameters, rate


def loss(outputs: Any, targets: Any) -> Any:
    return outputs - targets


def callbacks() -> list[Any]:
    return [optimizer]


def factor(step: int, total_steps: int, *, batch_size: int, warmup: int = 3) -> float:
    return min(1.0, step / warmup) * batch_size / total_steps


def described_jobs() -> dict[str, tw.Job]:
    """Jobs of all kinds by name."""
    base: dict[str, Any] = {"model": Network, "optimizer": optimizer, "train": DATA, "batch_size": 4}
    supervised = base | {"loss": loss, "inputs": "x", "targets": "y"}
    student = tw.Job(name="student", **supervised, seed=3)
    return {
        "torch": tw.Job(
            name="torch", **supervised, evaluate=DATA, metrics={"error": loss}, epochs=3, clip_norm=1.0, workers=2,
            spares=1, accumulation=2, inexact=("batch_norm",), checkpoint_steps="auto", max_loss_ratio=4.0,
        ),
        "fit": tw.Job(
            name="fit", model=Network, train=DATA, inputs="x", targets="y", batch_size=4, run="fit",
            callbacks=callbacks, class_weight={0: 2.0, 1: 1.0}, evaluate=DATA, evaluate_epochs=2, devices=2,
        ),
        "pad": tw.Job(
            name="pad", **base | {"train": tw.datasets.table({"x": [[1], [1, 2]], "y": [0, 1]})}, loss=loss,
            inputs=("x", "x_mask"), targets="y", pad={"x": tw.Pad(value=0, multiple=8)}, drop_last=True,
        ),
        "async": tw.Job(
            name="async", **supervised, consistency="ssp(3)", wire="topk(0.01)", local_steps=4,
            outer="nesterov(0.7,0.9)", tensor_plan={"a.*": "column"}, strategy="parameter_server", plan="dp=2",
        ),
        "distilled": tw.Distillation(
            student=student, teachers=(tw.Teacher(name="t", job=student.replace(name="teacher")),)
        ).student,
        "schedule": tw.Job(
            name="schedule", **supervised, schedule=partial(factor, warmup=5), epoch_samples=12, shuffle_window=7,
            min_workers=1, max_workers=4, on_error="skip", on_crash_loop="skip", local_state=(), keeper_s=0.0,
        ),
    }  # fmt: skip


def stored_form(job: tw.Job) -> dict[str, str]:
    """The description without digests, which depend on the version of Python."""
    words = describe(job, train=job.train.index(), evaluate=job.evaluate and job.evaluate.index())
    return {name: _DIGEST.sub("", text) for name, text in words.items()}


@pytest.mark.parametrize("name", described_jobs())
def test_a_stored_description_stays_the_same(name: str) -> None:
    stored, job = json.loads(STORED.read_text())[name], described_jobs()[name]
    now = stored_form(job)
    newer = now.keys() - stored.keys()  # options that did not exist then
    assert json.dumps({field: text for field, text in now.items() if field not in newer}) == json.dumps(stored)
    described = describe(job)
    assert description_changes(described, describe(described_jobs()[name])) == []
    older = {field: text for field, text in described.items() if field not in newer}
    assert description_changes(older, described) == []


def test_other_evaluations_matter_to_a_scheduler_that_gets_their_metric() -> None:
    plain = described_jobs()["torch"]
    by_metric = plain.replace(schedule=lambda optimizer: optimizer, schedule_metric="loss")
    for job, changes in ((plain, []), (by_metric, ["evaluate_epochs: 1 -> 2"])):
        assert description_changes(describe(job), describe(job.replace(evaluate_epochs=2))) == changes


def test_an_option_that_did_not_exist_then_counts_as_its_default() -> None:
    job = described_jobs()["torch"]
    older = {field: text for field, text in describe(job).items() if field != "precision"}
    assert description_changes(older, describe(job)) == []
    assert description_changes(older, describe(job.replace(precision="bf16"))) == ["precision: fp32 -> bf16"]


def test_another_length_of_the_epoch_counts_where_a_batch_of_it_is_short() -> None:
    """From such an epoch on, a step has other samples."""
    whole, same, short, none = (
        describe(tw.Job(name="n", model=Network, optimizer=optimizer, train=DATA, batch_size=4, loss=loss, inputs="x",
                        targets="y", epoch_samples=length))
        for length in (8, 12, 10, None)
    )  # fmt: skip
    assert description_changes(whole, same) == []
    for changed in (short, none):
        assert [line.partition(":")[0] for line in description_changes(whole, changed)] == ["epoch_samples"]
        assert [line.partition(":")[0] for line in description_changes(changed, whole)] == ["epoch_samples"]
