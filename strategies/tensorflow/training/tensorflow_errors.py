"""Translation of TensorFlow's exceptions: a lost peer, a strategy opened too late, or an error of user code."""

from __future__ import annotations

import os
import re
import traceback

import keras
import tensorflow as tf

from trainwright.core.errors import JobError, TrainwrightError
from trainwright.strategies.common.user_code_errors import UserCode, package_folder
from trainwright.strategies.tensorflow.tensorflow_compat import before_first_use

_LIBRARIES = (package_folder(tf), package_folder(keras))
_PEER_LOST = re.compile(
    r"Collective ops is aborted|worker .* (is down|failed)|Socket closed|Connection (refused|reset)|failed to connect|"
    r"Connecting to invalid output|Barrier|heartbeat|peer .* failed|Unable to find a context_id",
    re.IGNORECASE,
)
_LOST_TYPES = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError)
_TOO_LATE = re.compile(r"must be configured at program startup|cannot be modified after initialization")
_FIRST_USE: list[traceback.FrameSummary] = []  # frames of the first use of TensorFlow in this process


class TensorFlowUserCode(UserCode):
    """User code in TensorFlow and Keras."""

    libraries = _LIBRARIES
    out_of_memory = tf.errors.ResourceExhaustedError

    @classmethod
    def lost_peer(cls, error: BaseException) -> bool:
        """Whether an error means that another rank was lost: by its type, or by the text of a TensorFlow error."""
        if isinstance(error, _LOST_TYPES):
            return True
        return isinstance(error, tf.errors.OpError) and _PEER_LOST.search(str(error)) is not None

    @classmethod
    def traceback(cls, error: BaseException) -> str:
        """Return the traceback. For code that AutoGraph has rewritten, AutoGraph's own has the user's lines."""
        rewritten = getattr(error, "ag_error_metadata", None)
        return super().traceback(error) if rewritten is None else str(rewritten.get_message())


def remember_first_use() -> None:
    """Record which lines use TensorFlow first in this process, from now on. The first use starts its devices."""
    before_first_use(_remember)


def _remember() -> None:
    if not _FIRST_USE:
        _FIRST_USE.extend(traceback.extract_stack()[:-2])


def strategy_too_late_error(error: BaseException, where: str) -> JobError | None:
    """Return the error of a strategy that is opened after the first use of TensorFlow; None for other errors."""
    if not _TOO_LATE.search(str(error)):
        return None
    own = [frame for frame in _FIRST_USE if not os.path.abspath(frame.filename).startswith(_LIBRARIES)]
    line = f", first in {own[-1].filename}, line {own[-1].lineno}: {own[-1].line}" if own else ""
    return JobError(
        [
            f"TensorFlow was used in this worker before its strategy was built{line}; make tensors, models and data "
            "sets inside model(), loss() and optimizer(), not when a module is imported or a worker is set up"
        ],
        where=where,
    )


def original_error(error: BaseException) -> TrainwrightError | None:
    """Return the TrainwrightError that was raised while a graph was traced. AutoGraph raises another one for it."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, TrainwrightError):
        behind = behind.__cause__ or behind.__context__
    return behind
