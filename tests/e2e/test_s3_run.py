"""A whole run on a real object store: train, read, evaluate, and refuse what it must."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trainwright as tw
from tests.support.cli_job import JOB
from tests.support.processes import FORKING, finish
from tests.support.s3_server import S3Bucket
from trainwright.planning.job_file import load_job
from trainwright.reporting.run_views import run_view
from trainwright.storage.object_store import open_store

# Each epoch's checkpoint is committed before the next epoch goes on: one that is due during an upload goes by.
PACED = """
from tests.support.torch_jobs import keep_pace

job = job.replace(preflight=False, schedule=lambda step, total: keep_pace({storage!r}, step, 10, "little") or 1.0)
"""


def test_train_show_and_evaluate_on_s3(s3_bucket: S3Bucket, tmp_path: Path, forked_workers: None) -> None:
    file = tmp_path / "job.py"
    file.write_text(JOB.format(storage=s3_bucket.uri) + PACED.format(storage=s3_bucket.uri))
    code, out, err = finish("fit", file, module=FORKING)
    assert code == 0, err
    assert f"{s3_bucket.uri}/little/report.html" in out
    shown = run_view(s3_bucket.uri, "little").data
    assert shown["state"] == "done" and shown["step"] == 40 and len(shown["checkpoints"]) == 3
    assert shown["metrics"]["accuracy"] > 0.8
    assert b"<svg" in open_store(s3_bucket.uri).get("little/report.html")
    assert tw.evaluate(load_job(str(file)), here=True)["accuracy"] == pytest.approx(shown["metrics"]["accuracy"])
    assert s3_bucket.env["AWS_SECRET_ACCESS_KEY"] not in json.dumps(shown)


def test_wrong_credentials_are_said_before_anything_starts(
    s3_bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "job.py"
    file.write_text(JOB.format(storage=s3_bucket.uri))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    code, _, err = finish("fit", file)
    assert code == 1 and "credentials" in err and "not-the-secret" not in err
    assert "waiting for" not in err, "nothing was placed"
