"""What a step frees stays with the process: the next step gets it without page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.processes import ROOT

COUNT = """
import resource, sys, threading
import numpy as np
from trainwright.core.frameworks import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

def step():
    held = [np.ones(400_000) for _ in range(30)]  # of 3.2 MB
    del held

def count():
    for _ in range(5):
        step()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(20):
        step()
    print((resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before) // 20)

thread = threading.Thread(target=count)  # as the one that takes the steps
thread.start()
thread.join()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page faults of a thread are Linux's")
def test_a_step_takes_the_memory_that_the_one_before_freed() -> None:
    faults = {}
    for how in ("given back", "kept"):
        command = [sys.executable, "-c", COUNT, how]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        faults[how] = int(done.stdout)
    assert faults["given back"] > 1000, "otherwise there is nothing to keep"
    assert faults["kept"] < 10
