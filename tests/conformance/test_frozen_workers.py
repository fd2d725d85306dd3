"""Workers that freeze in the middle of a unit and wake when it is over: the others go on, and it counts once."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.conformance import problems
from tests.support.conformance.harness import Pool, Rank
from tests.support.conformance.problems import PROBLEMS
from tests.support.conformance.server_processes import Served
from trainwright.core.topology import WorkUnit

STEPS = 30


@pytest.mark.parametrize("consistency", ["sync", "ssp(2)", "async", "async(pushes=2)", "sync(backup=1)"])
def test_a_frozen_worker_holds_nobody_up_and_goes_on_when_it_wakes(pool: Pool, consistency: str) -> None:
    problem = replace(PROBLEMS["empty_shares"], batch_size=8, rows=60, steps=STEPS)
    with Served(pool, "reference", problem, 2, 3, consistency=consistency) as own:
        start, (frozen, *others) = own.parameters(), own.workers
        own.serve(STEPS)
        frozen.send("work", problem, own.plan, own.first, "freeze", 0)
        wait_until_stopped(frozen)
        for one in others:
            one.send("work", problem, own.plan, own.first)
        try:
            assert sum(len(one.outcome().value) for one in others) >= 3 * STEPS
            reports, nothing = (one.outcome().value for one in own.servers)
        finally:
            os.kill(pid_of(frozen), signal.SIGCONT)
        assert frozen.outcome().value == [WorkUnit(step=0, share=0)]
        assert len(reports) == STEPS and not nothing
        assert sum(report.weight for report in reports) == sum(map(len, problems.batches(problem)))
        stale = own.servers[0].call("staleness")
        assert sum(stale.counts.values()) == 3 * STEPS and stale.dropped >= 1 and stale.again >= 1
        if consistency == "sync":
            losses, _, parameters = own.by_hand(start, STEPS)
            np.testing.assert_allclose([report.loss for report in reports], losses, rtol=0, atol=1e-12)
            for name, value in parameters.items():
                np.testing.assert_allclose(own.parameters()[name], value, rtol=0, atol=1e-12)


def pid_of(one: Rank) -> int:
    pid = one._process.pid
    assert pid is not None
    return pid


def wait_until_stopped(one: Rank) -> None:
    """Until the kernel says so."""
    stat, until = Path(f"/proc/{pid_of(one)}/stat"), time.monotonic() + 30.0
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < until
        time.sleep(0.01)
