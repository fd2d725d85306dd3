"""Arguments of the calls to workers: what many workers get alike is pickled once, and large ones go by reference.

A group of n ranks names n peers. If each rank were sent all of them, the driver would pickle and send n * n.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import cloudpickle
import ray

from trainwright.core.group import Group

INLINE_BYTES = 4096  # up to here it is quicker to send the bytes along than to have them fetched from the object store


class Arguments:
    """What the driver sends. For one thread."""

    def __init__(self) -> None:
        self._last: tuple[Any, Any] = (None, pickle.dumps(None))

    def of(self, argument: Any) -> tuple[Any, Any]:
        """Split an argument into what is one worker's own, and what others get too; `joined` is the inverse."""
        if isinstance(argument, Group):
            return replace(argument, peers=()), self.common(argument.peers)
        return None, self.common(argument)

    def common(self, value: Any) -> Any:
        """Return the pickled value, or a reference to it in Ray's object store.

        The same object as the last time is not pickled again, so that calls of many workers with one argument cost one.
        The store keeps it for as long as calls with it are under way; it is gone when this process ends.
        """
        if self._last[0] is not value:
            data = pickle.dumps(value)
            self._last = value, data if len(data) <= INLINE_BYTES else ray.put(data)
        return self._last[1]


def joined(own: Any, common: bytes) -> Any:
    """The argument again, in the worker, where Ray has put the value in the place of a reference.

    Args:
        common: empty where all is the worker's own.
    """
    if not common:
        return own
    value = cloudpickle.loads(common)
    return value if own is None else replace(own, peers=value)
