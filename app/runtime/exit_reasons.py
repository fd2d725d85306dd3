"""Why a process ended, in words: Ray says it at length."""

from __future__ import annotations

_SIGNS = (
    ("NODE_OUT_OF_MEMORY", "Ray ended its process, because the node ran out of memory"),
    ("placement group was removed", "its room on the cluster was given back"),
    ("its node has died", "its node was lost"),
    ("node is dead", "its node was lost"),
    ("temporarily unavailable", "its process or node cannot be reached"),
    ("exit type: SYSTEM_ERROR", "its process was killed, ran out of memory or crashed"),
    ("exit type: USER_ERROR", "its process ended by itself"),
    ("exit type: INTENDED_USER_EXIT", "its process ended by itself"),
)


def cause_of(error: BaseException | None) -> str:
    """What an error of Ray's about an actor means; its first line where that is not known. None: we ended it."""
    if error is None:
        return "killed by the driver"
    text = str(error).strip()
    known = next((words for sign, words in _SIGNS if sign in text), "")
    return known or (text.splitlines()[0] if text else type(error).__name__)
