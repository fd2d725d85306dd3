"""What an exception means: a lost peer, the user's code, or neither; and letting go of what it holds."""

from __future__ import annotations

import os
import re
import traceback

import torch
from torch import distributed

from trainwright.core.errors import PeerLost, TrainwrightError, UserCodeError

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LOST = re.compile(
    r"gloo/|Gloo connect|connectFullMesh|NCCL|Connection (closed|reset|refused)|Broken pipe|Timed out waiting|"
    r"Socket Timeout|wait timeout"
)


def lost_peer(error: BaseException) -> bool:
    """Whether an exception says that a collective broke because another rank went away.

    torch gives its own types only to some of these; gloo's are RuntimeErrors known by their text alone.
    """
    known = (distributed.DistBackendError, distributed.DistNetworkError, distributed.DistStoreError)
    if isinstance(error, known):
        return True
    return type(error) is RuntimeError and _LOST.search(str(error)) is not None


def peer_lost(error: BaseException, where: str) -> PeerLost:
    """The PeerLost that stands for such an exception."""
    return PeerLost(
        f"another rank went away: {_first_line(error)}",
        where=where,
        remedy="look at the rank that failed first",
    )


class user_code:
    """Turn what user code raises into UserCodeError, and broken collectives within it into PeerLost.

    Args:
        what: the code that runs, such as `model()`; the subject of the error's sentence.
        where: the rank.
    """

    __slots__ = ("what", "where")

    def __init__(self, what: str, where: str) -> None:
        self.what, self.where = what, where

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise what the exception means; ours and those that end the process pass."""
        if not isinstance(error, Exception) or isinstance(error, TrainwrightError):
            return
        raise meaning(error, self.what, self.where) from None


def meaning(error: BaseException, what: str, where: str) -> PeerLost | UserCodeError:
    """What an exception from user code, or from torch on its behalf, says."""
    return peer_lost(error, where) if lost_peer(error) else user_error(error, what, where)


def user_error(error: BaseException, what: str, where: str) -> UserCodeError:
    """The UserCodeError that stands for an exception; its detail is the traceback in the user's own frames."""
    out_of_memory = isinstance(error, torch.OutOfMemoryError)
    return UserCodeError(
        f"{what} raised {type(error).__name__}: {_first_line(error)}",
        where=where,
        remedy="use a smaller batch_size or more accumulation" if out_of_memory else "",
        detail=own_traceback(error),
    )


def own_traceback(error: BaseException) -> str:
    """The traceback without torch's and our frames; with all of them where nothing else would be left."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not os.path.abspath(frame.filename).startswith((_TORCH, _OURS))]
    lines = traceback.format_list(own or frames) + traceback.format_exception_only(error)
    return "Traceback (most recent call last):\n" + "".join(lines)


def let_go(error: BaseException) -> None:
    """Forget the frames of an exception and of those behind it.

    They hold the DDP object, and while that lives a left group keeps its sockets open and the peers hang.
    """
    behind: list[BaseException | None] = [error]
    while behind:
        current = behind.pop()
        if current is not None:
            traceback.clear_frames(current.__traceback__)
            behind += [current.__context__, current.__cause__]
            current.__traceback__ = current.__context__ = current.__cause__ = None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
