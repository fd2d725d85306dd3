"""Where the threads of this process stand, for the report of a hang."""

from __future__ import annotations

import sys
import threading
import traceback

_MOST_CHARACTERS = 16_000


def stacks(first: int | None = None) -> str:
    """The Python stacks of all threads but the caller's, the most recent call last.

    Args:
        first: ident of the thread to begin with.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    parts = [
        f"thread {names.get(ident, ident)}{' (steps)' if ident == first else ''}:\n"
        + "".join(traceback.format_stack(frames[ident]))
        for ident in sorted(frames, key=lambda ident: (ident != first, ident))
    ]
    return "\n".join(parts)[:_MOST_CHARACTERS]
