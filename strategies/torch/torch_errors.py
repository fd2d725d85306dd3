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

_NO_MEMORY, _ASSERTION = "out of memory", "device-side assert"
# What the libraries report of a device that failed in or before their call, as a RuntimeError.
_FAILED_CALL = re.compile(r"(CU|HIP)\w+_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR|NOT_INITIALIZED)")


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
        failed = None if _ASSERTION in str(error) else device_error(error, self.where)
        if failed is not None:
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
        """Return what to do about an exception; sharded parameters cannot be used outside their module."""
        if _ASSERTION in str(error):
            return (
                "look for an index that is too large, such as a token outside the vocabulary or a label outside the "
                "classes: a run on CPUs, or with CUDA_LAUNCH_BLOCKING=1 in the environment, names the operation"
            )
        if "mixed torch.Tensor and DTensor" in str(error):
            return "call the model itself, and use a parameter in the forward of the module that holds it alone"
        return super().remedy(error)


def device_error(error: BaseException, where: str) -> DeviceError | None:
    """Return the DeviceError for an exception after which the process cannot use its accelerator; None for others.

    Such an error is sticky: every later call on the device raises it. Too little memory is not.
    """
    text = str(error)
    lost = isinstance(error, torch.AcceleratorError) and _NO_MEMORY not in text
    if not lost and not (isinstance(error, RuntimeError) and _FAILED_CALL.search(text)):
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
