"""Transforms: apply user functions to rows and batches."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import cloudpickle
import numpy as np
import numpy.typing as npt

from trainwright.core.data import copy_objects, fold_seed
from trainwright.core.errors import DataError, TrainwrightError, UserCodeError, user_code, user_traceback
from trainwright.datasets.data_source import Arrays, Rows, object_array, stack_rows

RowFunction = Callable[[dict[str, Any], np.random.Generator], Mapping[str, Any]]
BatchFunction = Callable[[Arrays], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RowMap:
    """f(row, rng) -> row, for each row."""

    function: RowFunction
    heavy: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class BatchMap:
    """f(columns) -> columns with as many rows. With `cpus` or `gpus` for each call, it is a stage of Ray Data.

    A `StatefulFunction` runs there on actors, each of which reserves `cpus` and `gpus`.
    """

    function: BatchFunction
    cpus: float = 0.0
    gpus: float = 0.0

    @property
    def heavy(self) -> bool:
        """Whether it runs on Ray Data."""
        return self.cpus > 0 or self.gpus > 0

    @property
    def needs(self) -> dict[str, float]:
        """Resources of each call, or of each actor."""
        return {"CPU": self.cpus, "GPU": self.gpus}

    @property
    def stateful(self) -> bool:
        """Whether the function is an object that each process creates once."""
        return isinstance(self.function, StatefulFunction)


Transform = RowMap | BatchMap


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Seeds of random transforms: the run's seed and the epoch."""

    seed: int = 0
    epoch: int = 0


def apply(
    transforms: Sequence[Transform], columns: Arrays, samples: Rows, counters: Counters, first: int = 0
) -> Arrays:
    """Apply transforms in turn.

    Args:
        columns: arrays of as many rows as `samples`.
        samples: (rows,) int64, row numbers in the data set.
        first: number of the first transform within its data set; it is folded into the seed of all but number 0.

    Raises:
        UserCodeError: a function raised.
        DataError: a function returned wrong rows, types or shapes.
    """
    columns = copy_objects(columns) if transforms else columns
    for number, transform in enumerate(transforms, first):
        if isinstance(transform, RowMap):
            columns = _map_rows(transform.function, columns, samples, counters, number)
        else:
            columns = _map_batch(transform.function, columns, samples)
    return columns


def _map_rows(function: RowFunction, columns: Arrays, samples: Rows, counters: Counters, number: int) -> Arrays:
    stage, name = (number,) if number else (), function_name(function)
    results: list[Mapping[str, Any]] = []
    for row, sample in enumerate(samples.tolist()):
        key, where = fold_seed(counters.seed, counters.epoch, sample, *stage), f"sample {sample}"
        generator = np.random.Generator(np.random.Philox(key=key))
        values = {column: array[row] for column, array in columns.items()}
        results.append(call_user_function(function, where, values, generator))
        require_same_columns(results[-1], results[0], f"the transform {name} returned", where)
    if not results:
        return columns
    return {column: stack_rows([row[column] for row in results], f"{column!r} from {name}") for column in results[0]}


def require_same_columns(row: Any, first: Any, prefix: str, where: str = "") -> None:
    """Raise DataError if a row is not a dict with the columns of the first row. `prefix` starts the message."""
    if not isinstance(row, Mapping) or row.keys() != first.keys():
        result = f"columns {sorted(row)}" if isinstance(row, Mapping) else f"a {type(row).__name__}"
        raise DataError(f"{prefix} {result}", where=where, remedy="make a dict with the same columns for every row")


def _map_batch(function: BatchFunction, columns: Arrays, samples: Rows) -> Arrays:
    where = f"samples {', '.join(map(str, samples[:5].tolist()))}{', ...' if len(samples) > 5 else ''}"
    result = call_user_function(function, where, dict(columns))
    if not isinstance(result, Mapping):
        raise DataError(
            f"the transform {function_name(function)} returned a {type(result).__name__}",
            remedy="return a dict of arrays",
        )
    arrays = {name: _array(function, name, column, where) for name, column in result.items()}
    for name, array in arrays.items():
        rows = len(array) if array.ndim else 0
        if rows != len(samples):
            raise DataError(
                f"the transform {function_name(function)} returned {rows} rows of {name!r} for {len(samples)} rows",
                where=where,
                remedy="return as many rows as were given, in the same order",
            )
    return {name: array.astype(object) if array.dtype.kind in "US" else array for name, array in arrays.items()}


def _array(function: BatchFunction, name: str, column: Any, where: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(column)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{name!r} from {function_name(function)} makes no array: {error}",
            where=where,
            remedy="give every row one shape, or an array of dtype object with one array for each row",
        ) from error


def call_user_function(
    function: Callable[..., Any], where: str, *arguments: Any, finish: Callable[[Any], Any] = lambda answer: answer
) -> Any:
    """Return finish(function(*arguments)). An exception becomes a UserCodeError; a TrainwrightError gets `where`."""
    try:
        return finish(function(*arguments))
    except TrainwrightError as error:
        error.where = error.where or where
        raise
    except Exception as error:
        raise UserCodeError(
            f"the transform {function_name(function)} raised {type(error).__name__}: {error}",
            where=where,
            remedy="correct the function, or the row it was given: dataset.read(index, [row]) shows it",
            detail=user_traceback(error),
        ) from None


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of a class that is used as one, for messages."""
    if isinstance(function, StatefulFunction):
        return function.func.__qualname__
    return str(getattr(function, "__qualname__", type(function).__qualname__))


_CALLS = {
    "map": ("row, rng", "return a dict of values by column; rng is a NumPy generator for random changes of this row"),
    "map_batches": ("columns", "return a dict of arrays with as many rows"),
    "filter": ("row", "return whether the row is kept"),
    "filter_batches": ("columns", "return one boolean for each row"),
    "flat_map": ("row", "return or yield rows"),
}
"""The arguments of the function that each method of a data set takes, and its result."""


def check_arguments(function: Any, method: str) -> None:
    """Raise DataError if a user's function cannot be called with the arguments of `method`.

    A function without a signature, such as some NumPy functions, is accepted.
    """
    arguments, result = _CALLS[method]
    if not callable(function):
        problem = f"{function!r} is not a function"
    else:
        try:
            inspect.signature(function).bind(*arguments.split(", "))
            return
        except ValueError:
            return
        except TypeError as error:
            problem = f"{function_name(function)} cannot be called with ({arguments}): {error}"
    raise DataError(problem, where=method, remedy=f"give {method} a function of ({arguments}): {result}")


# --- User classes instead of functions --------------------------------------------------------------------------------


_INSTANCES: dict[str, Any] = {}  # of this process, by key
_LOCK = threading.RLock()  # held while an object is created, so that none is created twice


@dataclass(frozen=True, slots=True, eq=False)
class StatefulFunction:
    """`func(*args, **keywords)(columns)`; the first call in a process creates the object, which later calls use.

    Attributes:
        func, args, keywords: the class and its arguments, as in `functools.partial`.
        key: equal for the same class and arguments, which share an object.
    """

    func: type
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]
    key: str = field(compare=False)  # processes may pickle the same value differently

    @classmethod
    def of(cls, func: type, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> StatefulFunction:
        """Return the function of a class. Raises DataError if the class or its arguments cannot be pickled."""
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
        """Return whether `function` is a class whose objects can be called; `dict`, for example, is not."""
        return isinstance(function, type) and any("__call__" in vars(kind) for kind in function.__mro__)

    def __call__(self, columns: Any) -> Any:
        """Call the object."""
        return self.open()(columns)

    def open(self) -> Any:
        """Return this process's object, which the first call creates. Raises UserCodeError if the constructor does."""
        what = f"the constructor of the transform {self.func.__qualname__}"
        remedy = "correct it, or what it is given; what it opens must be where the transform runs"
        with _LOCK:
            if self.key not in _INSTANCES:
                with user_code(what, remedy, "map_batches"):
                    _INSTANCES[self.key] = self.func(*self.args, **self.keywords)
            return _INSTANCES[self.key]

    def close(self) -> None:
        """Drop the object, and call its `close()`, if any."""
        with _LOCK:
            instance = _INSTANCES.pop(self.key, None)
        if hasattr(instance, "close"):
            instance.close()


# --- Text to tokens ---------------------------------------------------------------------------------------------------


END = 256
"""The last token of the byte-level vocabulary, after the 256 bytes: the end of a document."""


@dataclass(frozen=True, kw_only=True)
class Tokenize:
    """f(columns) -> columns in which each text is replaced by its tokens: arrays (tokens,) of int32, one a row."""

    # None for the bytes of UTF-8; a name for `transformers.AutoTokenizer`; a tokeniser of `transformers` or
    # `tokenizers`; or any function from text to a list of token numbers
    tokenizer: Any = None
    column: str = "text"  # of the text
    to: str = "tokens"  # the column of the tokens
    # token that ends each document; None adds none; `auto` is the tokeniser's own `eos_token_id`, if it has one and
    # does not add it itself
    end: int | Literal["auto"] | None = "auto"

    def __call__(self, columns: Arrays) -> Arrays:
        """Tokenise many rows. Raises DataError for a column that is missing or holds no text."""
        texts = columns.get(self.column, np.zeros(0))
        if texts.dtype.kind not in "OSU" or not all(isinstance(text, str | bytes) for text in texts):
            problem = f"holds {texts.dtype}" if self.column in columns else "is not there"
            raise DataError(
                f"column {self.column!r} {problem}, and text was expected",
                remedy=f"name one of {', '.join(sorted(columns))}",
            )
        tokens = object_array([self._encode(text.decode() if isinstance(text, bytes) else text) for text in texts])
        others = {name: column for name, column in columns.items() if name != self.column}
        return {**others, self.to: tokens}

    def _encode(self, text: str) -> npt.NDArray[np.int32]:
        if self.tokenizer is None:
            tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        else:
            tokens = np.asarray(self._function(text), dtype=np.int32)
        if self._end is None or (self.end == "auto" and len(tokens) and tokens[-1] == self._end):
            return tokens  # the tokenisers of T5 and BART add it themselves
        return np.append(tokens, np.int32(self._end))

    @cached_property
    def _end(self) -> int | None:
        if self.end != "auto":
            return self.end
        return END if self.tokenizer is None else getattr(self._tokenizer, "eos_token_id", None)

    @cached_property
    def _tokenizer(self) -> Any:
        """The tokeniser; a process loads a named one once."""
        return _load_tokenizer(self.tokenizer) if isinstance(self.tokenizer, str) else self.tokenizer

    @cached_property
    def _function(self) -> Callable[[str], Sequence[int]]:
        tokenizer = self._tokenizer
        if hasattr(tokenizer, "encode"):
            return lambda text: _token_ids(tokenizer.encode(text))
        if callable(tokenizer):
            return lambda text: _token_ids(tokenizer(text))
        raise DataError(
            f"tokenizer={tokenizer!r} cannot be called",
            remedy="give a tokeniser, a function, a name, or None for bytes",
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


def _token_ids(encoded: Any) -> Sequence[int]:
    """Return token numbers from a tokeniser's output: a list, an Encoding with `ids`, a mapping with `input_ids`."""
    ids = getattr(encoded, "ids", None)
    if ids is None and hasattr(encoded, "keys"):
        ids = encoded["input_ids"]
    numbers: Sequence[int] = encoded if ids is None else ids
    return numbers


def _load_tokenizer(name: str) -> Any:
    try:
        transformers = importlib.import_module("transformers")  # optional: only named tokenisers need it
    except ImportError as error:
        raise DataError(
            f"the tokeniser {name!r} needs the package transformers",
            remedy="install it with pip install transformers, or give a tokeniser object",
        ) from error
    return transformers.AutoTokenizer.from_pretrained(name)
