"""The meaning of torch's exceptions: a lost peer, the user's code, or neither; and their frames cleared."""

from __future__ import annotations

import re
import traceback

import torch
from torch import distributed

from trainwright.core.errors import DeviceError, JobError, TrainwrightError
from trainwright.strategies.common.user_code_errors import UserCode, first_line, package_folder
from trainwright.strategies.torch.torch_compat import COMPILER_PACKAGES

_LOST = re.compile(
    r"gloo/|Gloo connect|connectFullMesh|NCCL|Connection (closed|reset|refused)|Broken pipe|Timed out waiting|"
    r"Socket Timeout|wait timeout"
)

_ASSERTION = "device-side assert"
# Errors of CUDA and HIP after which each later call on the device fails, and of their libraries where a device failed.
_STICKY = re.compile(
    r"(CUDA|HIP) error: .*(illegal (memory access|instruction)|misaligned address|invalid program counter|"
    r"address space|ECC error|launch failure|launch timed out|hardware (stack )?error|(?i:nvlink)|busy or unavailable|"
    r"no (CUDA|ROCm)-capable device|unknown error)|"
    r"(CU|HIP)\w+_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR|NOT_INITIALIZED)"
)


class TorchUserCode(UserCode):
    """User code that runs in torch."""

    libraries = (package_folder(torch),)
    out_of_memory = torch.OutOfMemoryError

    @classmethod
    def lost_peer(cls, error: BaseException) -> bool:
        """Return whether a peer is gone; gloo's errors are RuntimeErrors, known by their text alone."""
        known = (distributed.DistBackendError, distributed.DistNetworkError, distributed.DistStoreError)
        return isinstance(error, known) or (type(error) is RuntimeError and _LOST.search(str(error)) is not None)

    def meaning(self, error: BaseException) -> TrainwrightError:
        """Return the error that an exception stands for; for the compiler's own, say how to do without it."""
        if (failed := _device_error(error, self.where)) is not None:
            return failed
        if not type(error).__module__.startswith(COMPILER_PACKAGES):
            return super().meaning(error)
        missing = "no C++ compiler was found: install one, such as g++, or " if "CxxCompiler" in str(error) else ""
        what = f"{self.what} cannot be compiled: {type(error).__name__}: {first_line(error)}"
        found = JobError([f"{what}: {missing}leave compile= out"], where=self.where)
        found.detail = self.traceback(error)
        return found

    @classmethod
    def remedy(cls, error: BaseException) -> str:
        """Return what to do about an exception, where that is known."""
        if _ASSERTION in str(error):
            return (
                "look for an index that is too large, such as a token outside the vocabulary or a label outside the "
                "classes: a run on CPUs, or with CUDA_LAUNCH_BLOCKING=1 in the environment, names the operation"
            )
        if "mixed torch.Tensor and DTensor" in str(error):
            return "call the model itself, and use a parameter in the forward of the module that holds it alone"
        if "does not require grad" in str(error) and not torch.is_grad_enabled():
            return "evaluations and predictions compute without gradients: wrap that part in torch.enable_grad()"
        return super().remedy(error)


def sticky_error(error: BaseException, where: str) -> TrainwrightError | None:
    """Return what an exception means after which the process cannot use its accelerator; None for others.

    It is raised by later calls too, so that it may come up anywhere. An assertion of a kernel is an error of user code.
    """
    if isinstance(error, RuntimeError) and _ASSERTION in str(error):
        return TorchUserCode("a step", where).meaning(error)
    return _device_error(error, where)


def _device_error(error: BaseException, where: str) -> DeviceError | None:
    if not isinstance(error, RuntimeError) or not _STICKY.search(str(error)):
        return None
    return DeviceError(
        f"the accelerator failed: {first_line(error)}",
        where=where,
        remedy="the rank continues in another process; if it fails again there, look at the node's kernel log (dmesg, "
        "Xid messages) and take the node out of the cluster",
    )


def summarize_error(error: Exception, limit: int = 200) -> str:
    """Return type and message of an exception in one line; the message is cut at `limit` characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:limit]}"


def clear_frames(error: BaseException) -> None:
    """Clear the frames of an exception and of its causes.

    They hold the DDP object, and while that lives a left group keeps its sockets open and the peers hang.
    """
    behind: list[BaseException | None] = [error]
    while behind:
        current = behind.pop()
        if current is not None:
            traceback.clear_frames(current.__traceback__)
            behind += [current.__context__, current.__cause__]
            current.__traceback__ = current.__context__ = current.__cause__ = None
