"""Text to tokens: any tokeniser, and bytes where none is given."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import DataError
from trainwright.datasets.formats.arrow_columns import Arrays

END = 256
"""The last token of the byte-level vocabulary, after the 256 bytes: the end of a document."""


@dataclass(frozen=True, kw_only=True)
class Tokenise:
    """f(columns) -> columns with the tokens of each text instead of it: arrays (tokens,) of int32, one a row.

    Attributes:
        tokenizer: None for the bytes of UTF-8; a name for `transformers.AutoTokenizer`; a tokeniser of `transformers`
            or `tokenizers`; or any function from text to a list of token numbers.
        column: of the text.
        to: the column of the tokens.
        end: token that ends each document; None adds none; `auto` is the tokeniser's own `eos_token_id`, if it has one.
    """

    tokenizer: Any = None
    column: str = "text"
    to: str = "tokens"
    end: int | Literal["auto"] | None = "auto"

    def __call__(self, columns: Arrays) -> Arrays:
        """Tokenise many rows. Raises DataError for a column that is not there or holds no text."""
        texts = columns.get(self.column, np.zeros(0))
        if texts.dtype.kind not in "OSU" or not all(isinstance(text, str | bytes) for text in texts):
            held = f"holds {texts.dtype}" if self.column in columns else "is not there"
            raise DataError(
                f"column {self.column!r} {held}, and text was expected",
                remedy=f"name one of {', '.join(sorted(columns))}",
            )
        tokens = np.empty(len(texts), dtype=object)
        for row, text in enumerate(texts):
            tokens[row] = self._encode(text.decode() if isinstance(text, bytes) else text)
        rest = {name: column for name, column in columns.items() if name != self.column}
        return {**rest, self.to: tokens}

    def _encode(self, text: str) -> npt.NDArray[np.int32]:
        if self.tokenizer is None:
            tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        else:
            tokens = np.asarray(self._function(text), dtype=np.int32)
        return tokens if self._end is None else np.append(tokens, np.int32(self._end))

    @cached_property
    def _end(self) -> int | None:
        if self.end != "auto":
            return self.end
        return END if self.tokenizer is None else getattr(self._loaded, "eos_token_id", None)

    @cached_property
    def _loaded(self) -> Any:
        """The tokeniser; a named one is loaded once in each process."""
        return _named(self.tokenizer) if isinstance(self.tokenizer, str) else self.tokenizer

    @cached_property
    def _function(self) -> Callable[[str], Sequence[int]]:
        tokenizer = self._loaded
        if hasattr(tokenizer, "encode"):
            return lambda text: _numbers(tokenizer.encode(text))
        if callable(tokenizer):
            return lambda text: _numbers(tokenizer(text))
        raise DataError(
            f"tokenizer={tokenizer!r} cannot be called",
            remedy="give a tokeniser, a function, a name, or None for bytes",
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


def _numbers(answer: Any) -> Sequence[int]:
    """Token numbers from what tokenisers answer: a list, an Encoding with `ids`, a mapping with `input_ids`."""
    ids = getattr(answer, "ids", None)
    if ids is None and hasattr(answer, "keys"):
        ids = answer["input_ids"]
    found: Sequence[int] = answer if ids is None else ids
    return found


def _named(name: str) -> Any:
    try:
        transformers = importlib.import_module("transformers")  # whoever names a tokeniser has it; we do not ask for it
    except ImportError as error:
        raise DataError(
            f"the tokeniser {name!r} needs the package transformers",
            remedy="install it with pip install transformers, or give a tokeniser object",
        ) from error
    return transformers.AutoTokenizer.from_pretrained(name)
