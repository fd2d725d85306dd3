"""What a job would be like on a cluster that is not there."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import trainwright as tw
from trainwright.cli import app
from trainwright.core.errors import PlanError, ResourceError
from trainwright.whatif import COPY_BYTES_PER_S, RECOVER_S, WhatIf, estimate_of, name_of, what_if

GPT = tw.transformer_profile(hidden=4096, layers=32, heads=32, sequence=2048, vocabulary=51_200)
JOB = """
import torch
import trainwright as tw

job = tw.Job(
    name="small", model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)),
    loss=lambda outputs, targets: torch.nn.functional.cross_entropy(outputs, targets, reduction="none"),
    optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1), train=tw.datasets.parquet("data.parquet"),
    inputs="x", targets="y", batch_size=8, epochs=3,
)
"""


def asked(cluster: str = "8x8xA100-80GB", **more: object) -> WhatIf:
    fields = {"batch_size": 512, "precision": "bf16", "steps": 1000} | more
    return what_if(GPT, tw.Cluster.parse(cluster), **fields)  # type: ignore[arg-type]


def test_the_best_plan_is_within_a_fiftieth_of_the_quickest_and_simple() -> None:
    answer = asked()
    steps = [estimate_of(plan).step_s for plan in answer.plans if plan.topology == "collective"]
    assert steps[0] <= 1.02 * min(steps) and steps[1:] == sorted(steps[1:])
    assert answer.total_s == pytest.approx(1000 * steps[0])
    assert answer.dollars_an_hour == pytest.approx(64 * 3.43) and answer.goodput is None


def test_failures_and_prices() -> None:
    answer = asked(price="spot", mtbf_hours=10_000.0)
    assert answer.dollars_an_hour == pytest.approx(64 * 1.37) and answer.goodput is not None
    failure_s = 10_000 * 3600 / 64
    copy_s = max(estimate_of(answer.plans[0]).stage_memory_bytes) / COPY_BYTES_PER_S
    assert answer.goodput.interval_s == pytest.approx(math.sqrt(2 * copy_s * failure_s))
    lost = [copy_s / every + every / (2 * failure_s) + RECOVER_S / failure_s for every in np.geomspace(1, 1e5, 1000)]
    assert 1 - answer.goodput.share == pytest.approx(min(lost), rel=1e-3)
    assert answer.total_s > 1000 * estimate_of(answer.plans[0]).step_s
    assert asked("8x8xRTX4090").dollars_an_hour is None


def test_it_says_what_it_rests_on() -> None:
    text = repr(asked(mtbf_hours=50_000.0))
    for said in ("64 A100-80GB", "nothing of it was asked or measured", "nine of ten", "GiB of 80 GiB", "goodput",
                 "with a checkpoint every", "$219.52 an hour", "compute", "Not chosen", "slower"):  # fmt: skip
        assert said in text, text


def test_a_model_that_fits_nowhere_is_said_with_what_comes_nearest() -> None:
    with pytest.raises(PlanError) as raised:
        asked("2xT4", batch_size=16)
    assert "no plan fits" in str(raised.value) and "out of memory by" in str(raised.value)
    assert "smaller micro-batch" in str(raised.value)
    with pytest.raises(ResourceError, match="no data sheet"):
        asked("2x16xCPU")


def test_names_of_plans() -> None:
    plan = tw.Plan.parse("pp=4,dp=8,zero=1,tp=2,micro_batch=2,recompute=full")
    assert name_of(plan) == "pipeline 4 x shard 8 (ZeRO-1) x tensor 2, micro-batch 2, 1f1b, recompute full"
    assert name_of(tw.Plan.parse("micro_batch=4")) == "one device, micro-batch 4"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    x = pa.FixedSizeListArray.from_arrays(np.arange(160, dtype=np.float32), 4)
    pq.write_table(pa.table({"x": x, "y": np.arange(40) % 3}), "data.parquet")
    Path("job.py").write_text(JOB)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_the_command_needs_no_cluster() -> None:
    done = CliRunner().invoke(
        app, ["plan", "job.py", "--cluster", "2x4xA100-40GB", "--price", "spot", "--mtbf", "5e4h"]
    )
    assert done.exit_code == 0, done.output
    assert "8 A100-40GB" in done.output and "all 15 steps" in done.output and "(spot, list)" in done.output
    answer = tw.plan("job.py", cluster="1xL4")
    assert isinstance(answer, WhatIf) and answer.cluster.accelerators == 1


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "wrong", [["--price", "cheap"], ["--mtbf", "often"], ["--mtbf", "-1"], ["--cluster", "4xA900"]]
)
def test_a_wrong_word_is_refused(wrong: list[str]) -> None:
    done = CliRunner().invoke(app, ["plan", "job.py", "--cluster", "8xL4", *wrong])
    assert done.exit_code != 0
