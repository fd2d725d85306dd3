"""Classes of the user's in the place of a function: what they hold, such as a model, is made once in a process."""

from __future__ import annotations

import hashlib
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from trainwright.core.errors import DataError, TrainwrightError, UserCodeError

_MADE: dict[str, Any] = {}  # of this process, by key
_LOCK = threading.RLock()  # nothing is made twice


@dataclass(frozen=True, slots=True, eq=False)
class Stateful:
    """`func(*args, **keywords)(columns)`, where the object is made on the first call in a process, and kept.

    Attributes:
        func, args, keywords: the class and what it is made with, named as those of a `functools.partial`.
        key: that of any other with the same class and arguments: they share the object.
    """

    func: type
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]
    key: str = field(compare=False)  # no two processes pickle alike

    @classmethod
    def of(cls, func: type, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Stateful:
        """Check that it can travel. Raises DataError."""
        try:
            packed = cloudpickle.dumps((func, args, dict(keywords)))
        except Exception as error:
            raise DataError(
                f"{func.__qualname__} cannot be sent to another process: {error}",
                where="map_batches",
                remedy="open files and models in its constructor, and give that their names",
            ) from error
        return cls(func, args, keywords, hashlib.sha256(packed).hexdigest())

    @staticmethod
    def fits(function: Any) -> bool:
        """Whether it is a class whose objects can be called; others, such as `dict`, are functions like any."""
        return isinstance(function, type) and any("__call__" in vars(kind) for kind in function.__mro__)

    def __call__(self, columns: Any) -> Any:
        """Call the object."""
        return self.open()(columns)

    def open(self) -> Any:
        """The object; made now where it is not there yet. Raises UserCodeError where its constructor raises."""
        with _LOCK:
            if self.key not in _MADE:
                _MADE[self.key] = self._made()
            return _MADE[self.key]

    def close(self) -> None:
        """Let go of the object, after its own `close()` where it has one."""
        with _LOCK:
            made = _MADE.pop(self.key, None)
        if hasattr(made, "close"):
            made.close()

    def _made(self) -> Any:
        try:
            return self.func(*self.args, **self.keywords)
        except TrainwrightError:
            raise
        except Exception as error:
            trace = error.__traceback__
            raise UserCodeError(
                f"the constructor of the transform {self.func.__qualname__} raised {type(error).__name__}: {error}",
                where="map_batches",
                remedy="mend it, or what it is given; what it opens must be where the transform runs",
                detail="".join(traceback.format_exception(type(error), error, trace.tb_next if trace else None)),
            ) from None
