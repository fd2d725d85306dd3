"""Recovery where collectives raise nothing and end at an abort alone, with any values, as those of NCCL on a GPU do."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from tests.support import aborting_backend
from tests.support.rank_processes import Exchange, formed, run_ranks
from tests.support.torch_engines import GENERATION, double, one_device, saved, spec
from tests.unit.test_torch_process_groups import share
from trainwright.core.errors import DeviceError, PeerLost
from trainwright.core.topology import Group, Peer, StateTransfer
from trainwright.strategies.torch.checkpoint import host_state
from trainwright.strategies.torch.checkpoint.safetensors_files import load_weights
from trainwright.strategies.torch.distributed import process_group

WORLD, BEFORE, STEPS = 3, 2, 5
FREED_S = 0.3  # after which the driver interrupts; long enough to be in the middle of it
JOB = spec(model=double, clip_norm=0.1)


def test_several_groups_are_aborted_beside_each_other_and_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort of NCCL may wait for that of another communicator, which another rank aborts first."""
    meeting, never = threading.Barrier(2), threading.Event()
    groups = [SimpleNamespace(abort=partial(meeting.wait, 10.0)) for _ in range(2)]
    monkeypatch.setattr(process_group, "process_groups", lambda: groups)
    assert process_group._abort_groups()
    groups[1].abort = never.wait
    groups[0].abort = lambda: None
    monkeypatch.setattr(process_group, "_ABORT_WAIT_S", 0.2)
    assert not process_group._abort_groups()
    never.set()


def test_an_abort_that_raises_is_told_and_did_not_free_anybody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("NCCL abort failed")

    groups = [SimpleNamespace(abort=fail), SimpleNamespace(abort=lambda: None)]
    monkeypatch.setattr(process_group, "process_groups", lambda: groups)
    assert not process_group._abort_groups()
    assert "NCCL abort failed" in caplog.text


@pytest.mark.parametrize("aborts", [True, False])
def test_a_group_that_broke_by_itself_is_aborted_before_it_is_destroyed(
    aborts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a communicator of NCCL has an error and is not aborted, `destroy_process_group` raises the error again."""

    def shut_down(group: aborting_backend.AbortingGroup) -> None:
        if not group._aborted.is_set():
            raise distributed.DistBackendError("NCCL error: remote process exited")

    monkeypatch.setattr(process_group, "_BACKENDS", {})
    aborting_backend.install()
    monkeypatch.setattr(aborting_backend.AbortingGroup, "shutdown", shut_down)
    member = process_group.ProcessGroupHandle()
    alone = (Peer(rank=0, address=member.reserve()),)
    member.join(Group(generation=GENERATION, rank=0, peers=alone, deadline_s=20.0), torch.device("cpu"))
    if not aborts:
        with monkeypatch.context() as patch, pytest.raises(DeviceError, match="did not end"):
            patch.setattr(aborting_backend.AbortingGroup, "abort", lambda group: None)
            member.leave()
        distributed.group.WORLD.abort()
    member.leave()
    assert not distributed.is_initialized()


@pytest.mark.parametrize("nonblocking", [True, False])
def test_a_rank_that_connects_over_nccl_waits_for_its_peers_no_longer_than_the_deadline(
    nonblocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort does not reach it. Communicators of torch 2.9 that do not block hang at random."""
    environment = {"TORCH_NCCL_ENABLE_MONITORING": "1"}  # the user's
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(process_group, "nonblocking_nccl", nonblocking)
    process_group._set_nccl_defaults(59.5)
    process_group._set_nccl_defaults(20.0)
    assert environment == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60",
        **({"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"} if nonblocking else {}),
    }


def steps(engine: Any, rank: int, world: int, numbers: range) -> list[float]:
    return [engine.train_step(share(step, rank, world, np.float64)).loss for step in numbers]


def take(engine: Any) -> None:
    engine.transfer([StateTransfer(piece="state", source=0, target=1)])


MOMENTS: dict[str, Callable[[Any, int], object]] = {
    "transfer": lambda engine, rank: take(engine),
    "warm": lambda engine, rank: engine.warm(share(0, rank, WORLD, np.float64)),
    "step": lambda engine, rank: steps(engine, rank, WORLD, range(BEFORE, BEFORE + 1)),
    "verify": lambda engine, rank: engine.verify(),
}


def _freed(rank: int, world: int, exchange: Exchange, moment: str, dies: bool) -> Any:
    aborting_backend.install()
    engine = formed(rank, exchange, JOB)
    take(engine)
    engine.warm(share(0, rank, world, np.float64))
    steps(engine, rank, world, range(BEFORE))
    held = saved(engine).files
    exchange("in the middle")
    lost = rank == (0 if moment == "transfer" else WORLD - 1)
    if lost and moment == "transfer":  # the description of its state goes, the tensors do not
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_state, "_broadcast_tensors", lambda *_: None)
            take(engine)
    if lost and dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if not lost:
        interrupt = threading.Timer(FREED_S, engine.interrupt, (5.0,))
        interrupt.start()
        with pytest.raises(PeerLost):
            MOMENTS[moment](engine, rank)
        interrupt.join()
    engine.leave()
    left = [one for one in exchange(rank) if one is not None]
    tag = engine._tag()
    whole = tag.sound and tag.step == BEFORE
    assert whole == (lost or moment != "transfer"), "what was half copied counts as whole"
    assert not whole or saved(engine).files == held, "something was applied"
    if moment == "transfer" and dies:
        return "no whole state is left"
    place = left.index(rank)
    formed(rank, exchange, JOB, engine=engine, ranks=left)
    take(engine)
    engine.warm(share(0, place, len(left), np.float64))
    losses = steps(engine, place, len(left), range(BEFORE, STEPS))
    engine.verify()
    weights = {name: value.numpy() for name, value in load_weights(saved(engine)).items()}
    engine.leave()
    return losses, weights


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "stays away"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_abort_frees_survivors_with_their_state_and_the_run_goes_on(moment: str, dies: bool) -> None:
    answers = run_ranks(partial(_freed, moment=moment, dies=dies), WORLD)
    if moment == "transfer" and dies:
        assert answers == [None, *["no whole state is left"] * (WORLD - 1)]
        return
    results = [one for one in answers if one is not None]
    assert len(results) == WORLD - dies
    alone = one_device(JOB)
    expected = steps(alone, 0, 1, range(STEPS))[BEFORE:]
    weights = load_weights(saved(alone))
    for losses, found in results:
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
        for name, value in weights.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-12)
