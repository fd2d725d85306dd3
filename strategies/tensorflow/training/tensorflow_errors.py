"""Translation of TensorFlow's exceptions: a lost peer, or an error of user code."""

from __future__ import annotations

import re

import keras
import tensorflow as tf

from trainwright.strategies.common.user_code_errors import UserCode, package_folder

_LIBRARIES = (package_folder(tf), package_folder(keras))
_PEER_LOST = re.compile(
    r"Collective ops is aborted|worker .* (is down|failed)|Socket closed|Connection (refused|reset)|failed to connect|"
    r"Connecting to invalid output|Barrier|heartbeat|peer .* failed|Unable to find a context_id",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(r"\bOOM\b|out of memory|allocat", re.IGNORECASE)
_LOST_TYPES = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError)


class TensorFlowUserCode(UserCode):
    """User code in TensorFlow and Keras."""

    libraries = _LIBRARIES
    out_of_memory = tf.errors.ResourceExhaustedError

    @classmethod
    def is_out_of_memory(cls, error: BaseException) -> bool:
        """Return whether an error means that a device has no memory left: also messages can be too large."""
        return super().is_out_of_memory(error) and _NO_MEMORY.search(str(error)) is not None

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
