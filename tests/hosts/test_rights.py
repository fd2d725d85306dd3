"""Where a right lacks, the tests of several hosts fail and say which."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.processes import ROOT

pytestmark = pytest.mark.hosts


@pytest.mark.parametrize("right", ["sys_admin", "net_admin"])
def test_a_right_that_lacks_is_told(right: str) -> None:
    demand = "from tests.support.namespaces import demand_rights; demand_rights()"
    without = ["setpriv", f"--bounding-set=-{right}", f"--inh-caps=-{right}", "--", sys.executable, "-c", demand]
    done = subprocess.run(without, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"tests of several hosts need CAP_{right.upper()} (docker run --privileged)" in done.stderr
