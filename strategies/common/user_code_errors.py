"""Errors that all frameworks share: a lost peer, failing user code, losses that are not finite or of a wrong shape."""

from __future__ import annotations

import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from trainwright.core.data import Batch
from trainwright.core.errors import DeviceOutOfMemory, NonFiniteLoss, PeerLost, TrainwrightError, UserCodeError
from trainwright.core.frameworks import missing_framework
from trainwright.strategies.common.socket_transport import LOST_PEER_REMEDY

_MEMORY_REMEDY = "use a smaller batch_size or more accumulation"
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class UserCode(ABC):
    """Context manager that turns exceptions of user code into UserCodeError, and broken collectives into PeerLost.

    Each framework has a subclass.

    Args:
        what: the code that runs, such as `model()`; the subject of the error's sentence.
        where: the rank.
    """

    __slots__ = ("what", "where")

    libraries: ClassVar[tuple[str, ...]]  # folders whose frames are not the user's
    out_of_memory: ClassVar[type[BaseException]]  # exception that the framework raises without memory

    def __init__(self, what: str, where: str) -> None:
        self.what, self.where = what, where

    @classmethod
    @abstractmethod
    def lost_peer(cls, error: BaseException) -> bool:
        """Whether an exception means that a collective broke because another rank was lost."""

    @classmethod
    def traceback(cls, error: BaseException) -> str:
        """Return the traceback without frames of the framework and of this package, or with all if none are left."""
        frames = traceback.extract_tb(error.__traceback__)
        outside = (*cls.libraries, _OURS)
        own = [frame for frame in frames if not os.path.abspath(frame.filename).startswith(outside)]
        lines = traceback.format_list(own or frames) + traceback.format_exception_only(error)
        return "Traceback (most recent call last):\n" + "".join(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise the translated exception; TrainwrightError and exceptions that end the process pass unchanged."""
        if isinstance(error, Exception) and not isinstance(error, TrainwrightError):
            raise self.meaning(error) from None

    def meaning(self, error: BaseException) -> TrainwrightError:
        """Return the error that an exception is translated to."""
        if self.lost_peer(error):
            return peer_lost_error(error, self.where)
        if self.is_out_of_memory(error):
            return DeviceOutOfMemory(
                f"{self.what} ran out of the device's memory: {first_line(error)}",
                where=self.where,
                remedy=_MEMORY_REMEDY,
                detail=self.traceback(error),
            )
        absent = missing_framework(error, self.where)
        return absent or UserCodeError(
            f"{self.what} raised {type(error).__name__}: {first_line(error)}",
            where=self.where,
            remedy=self.remedy(error),
            detail=self.traceback(error),
        )

    @classmethod
    def remedy(cls, error: BaseException) -> str:
        """Return the remedy for an exception, if there is a known one."""
        return ""

    @classmethod
    def is_out_of_memory(cls, error: BaseException) -> bool:
        """Return whether an exception means that a device has no memory left."""
        return isinstance(error, cls.out_of_memory)


def package_folder(module: ModuleType) -> str:
    """Return the folder of a package."""
    return os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep


def peer_lost_error(error: BaseException, where: str) -> PeerLost:
    """Return the PeerLost for an exception of a collective."""
    return PeerLost(f"another rank was lost: {first_line(error)}", where=where, remedy=LOST_PEER_REMEDY)


def non_finite_error(
    what: str, where: str, samples: Iterable[int] = (), *, elsewhere: bool = False, cause: str = ""
) -> NonFiniteLoss:
    """Return the error of a step that was not applied.

    Args:
        what: the problem.
        where: the rank.
        samples: numbers of the samples with the loss.
        elsewhere: another rank knows the samples.
        cause: from `nonfinite_columns_hint`.
    """
    error = NonFiniteLoss(
        what,
        where=where,
        remedy=f"{cause}look at these samples, lower the learning rate, set clip_norm, or skip such steps with "
        'on_nonfinite="skip"; nothing of this step was applied',
    )
    error.samples, error.elsewhere = tuple(samples), elsewhere
    return error


def nonfinite_columns_hint(batch: Batch, rows: npt.NDArray[np.bool_]) -> str:
    """Return a remedy that names the columns of a batch with values that are not finite in these rows."""
    floats = {name: column[rows] for name, column in batch.columns.items() if column.dtype.kind == "f"}
    names = [name for name, column in floats.items() if not np.isfinite(column).all()]
    return f"correct the source of {', '.join(map(repr, names))}, which is not finite there; " if names else ""


def first_line(error: BaseException) -> str:
    """Return an exception in one line."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


def format_samples(samples: list[Any]) -> str:
    """Return the first ten samples as text."""
    return ", ".join(map(str, samples[:10]))


# --- Shapes of losses and metrics ---------------------------------------


Shape = Sequence[int]


def loss_broadcast_problem(what: str, outputs: Shape, targets: Shape, values: Shape) -> str:
    """Return the problem of a loss whose outputs and targets were broadcast against each other.

    Outputs (n, 1) minus targets (n,) is (n, n): each sample's output is compared with every sample's target. NumPy,
    torch and TensorFlow compute that without an error.

    Args:
        what: name of the function, such as `loss=` or `metric 'mae'`.
        outputs, targets: shapes of its arguments.
        values: shape of its result, before any mean.

    Returns:
        The problem with both shapes and the remedy; empty if there is none.
    """
    given, wanted, made = tuple(outputs), tuple(targets), tuple(values)
    if len(given) == len(wanted) or made in (given, wanted) or made != _broadcast(given, wanted):
        return ""
    longer, shape = max(("outputs", given), ("targets", wanted), key=lambda each: len(each[1]))
    return (
        f"{what} broadcasts outputs of shape {given} and targets of shape {wanted} to {made}, so that each sample is "
        f"compared with every other: give both one shape{f', such as {longer}[..., 0]' if shape[-1] == 1 else ''}"
    )


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape that two arrays are broadcast to, by NumPy's rule; None if they cannot be."""
    rank = max(len(first), len(second))
    pairs = zip((1,) * (rank - len(first)) + first, (1,) * (rank - len(second)) + second, strict=True)
    sizes = [{one, other} - {1} or {1} for one, other in pairs]
    return tuple(size for (size,) in sizes) if all(len(each) == 1 for each in sizes) else None
