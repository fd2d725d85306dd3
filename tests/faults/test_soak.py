"""A minute of `make soak`, its unbroken run included: seven faults on a real object store, of every kind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.processes import ROOT

FAULTS = ("kill", "stop", "again", "driver", "storage", "kill-all")
SEED = 1880  # draws each of them, and the store both refusing and silent


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_a_run_on_s3_under_every_kind_of_fault_loses_and_leaves_nothing() -> None:
    task = ("--minutes", "0.467", "--every", "4", "--seed", str(SEED), "--hosts", "1", "--faults", ",".join(FAULTS))
    command = [sys.executable, "-m", "tests.soak", *task]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=450)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"] and done.returncode == 0, (found["wrong"], done.stderr)
    given = [fault["fault"] for fault in found["faults"]]
    assert len(given) == 7 and set(given) == set(FAULTS)
    ways = {whom for fault in found["faults"] if fault["fault"] == "storage" for whom in fault["whom"]}
    assert len(ways) == 2, "the store refused, and was silent"
    assert found["agrees"]
