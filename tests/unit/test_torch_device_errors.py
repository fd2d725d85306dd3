"""Errors of an accelerator are told from those of user code, of peers and of an aborted group."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch

from trainwright.core.errors import DeviceError, PeerLost, TrainwrightError, UserCodeError
from trainwright.core.topology import Generation, Group, Peer
from trainwright.strategies.torch.distributed.process_group import ProcessGroupHandle
from trainwright.strategies.torch.engines.base import OneDevice
from trainwright.strategies.torch.torch_errors import TorchUserCode

ILLEGAL = "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress' in ..."
ASSERTION = "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported at some other API call"


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (torch.AcceleratorError(ILLEGAL), DeviceError, "the accelerator failed: CUDA error: an illegal memory"),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), DeviceError, "ECC"),
        (torch.AcceleratorError("HIP error: unspecified launch failure"), DeviceError, "HIP error"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"), DeviceError, "CUBLAS"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), DeviceError, "CUDNN"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling cublasSgemm"), UserCodeError, "INVALID"),
        (torch.AcceleratorError("CUDA error: out of memory"), UserCodeError, "out of memory"),
        (torch.AcceleratorError("CUDA error: invalid configuration argument"), UserCodeError, "configuration"),
        (torch.AcceleratorError("CUDA error: no kernel image is available for execution"), UserCodeError, "kernel"),
        (torch.AcceleratorError(ASSERTION), UserCodeError, "a label outside the classes"),
        (RuntimeError("shape '[3]' is invalid for input of size 4"), UserCodeError, "shape"),
    ],
    ids=lambda value: str(value).partition("\n")[0] if isinstance(value, Exception) else "",
)
def test_an_error_of_the_device_is_told_from_one_of_the_users_code(
    error: Exception, kind: type[TrainwrightError], said: str
) -> None:
    with pytest.raises(TrainwrightError) as caught, TorchUserCode("step", "rank 1"):
        raise error
    assert type(caught.value) is kind and caught.value.where == "rank 1" and said in caught.value.summary


@pytest.mark.parametrize(("text", "kind"), [(ILLEGAL, DeviceError), (ASSERTION, UserCodeError)])
def test_outside_of_user_code_an_assertion_of_a_kernel_is_still_the_users(
    text: str, kind: type[TrainwrightError]
) -> None:
    def reduced() -> NoReturn:
        raise torch.AcceleratorError(text)

    with pytest.raises(kind):
        OneDevice()._guarded(reduced)


def _raiser(error: Exception) -> Callable[[], NoReturn]:
    def work() -> NoReturn:
        with TorchUserCode("step", "rank 0"):
            raise error

    return work


@pytest.mark.parametrize(
    ("error", "kind"), [(torch.AcceleratorError(ILLEGAL), DeviceError), (RuntimeError("a loss of NaN"), PeerLost)]
)
def test_after_an_abort_a_broken_device_is_no_lost_peer(
    error: Exception, kind: type[TrainwrightError], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = OneDevice()
    monkeypatch.setattr(engine, "_aborted", lambda: True)
    with pytest.raises(kind):
        engine._guarded(_raiser(error))


@pytest.mark.parametrize("aborted", [True, False])
@pytest.mark.parametrize(
    "error", [EOFError(), json.JSONDecodeError("no value", "", 0), IndexError("of a type")], ids=repr
)
def test_what_an_aborted_collective_wrote_may_be_unreadable(
    error: Exception, aborted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse() -> NoReturn:
        raise error

    engine = OneDevice()
    monkeypatch.setattr(engine, "_aborted", lambda: aborted)
    with pytest.raises(PeerLost if aborted else type(error)):
        engine._guarded(parse)


@pytest.mark.parametrize(("text", "kind"), [(ILLEGAL, DeviceError), (ASSERTION, UserCodeError)])
def test_a_rank_whose_device_is_broken_joins_no_group(
    text: str, kind: type[TrainwrightError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(device: torch.device) -> NoReturn:
        raise torch.AcceleratorError(text)

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    member = ProcessGroupHandle()
    peer = Peer(rank=0, address=member.reserve())
    group = Group(generation=Generation(token=1, number=1), rank=0, peers=(peer,), deadline_s=20.0)
    with pytest.raises(kind, match=text[:20]) as caught:
        member.join(group, torch.device("cuda"))
    assert caught.value.where == "rank 0" and not torch.distributed.is_initialized()
