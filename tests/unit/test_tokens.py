"""Text to tokens to sequences."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from trainwright.core.errors import DataError
from trainwright.datasets import table
from trainwright.datasets.ops.row_transforms import END, Tokenize

TEXTS = ["a b", "", "ünï", "the end"]


def texts() -> Any:
    return table({"text": np.array(TEXTS, dtype=object), "number": np.arange(len(TEXTS))})


def tokens(dataset: Any) -> list[list[int]]:
    index = dataset.index()
    return [document.tolist() for document in dataset.read(index, np.arange(index.rows))["tokens"]]


def test_bytes_are_the_default_and_every_text_comes_back() -> None:
    found = tokens(texts().tokenize())
    assert [document[-1] for document in found] == [END] * len(TEXTS)
    assert [bytes(document[:-1]).decode() for document in found] == TEXTS


class Encoding:
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids


class OfTokenizers:
    """As the package tokenizers has it."""

    def encode(self, text: str) -> Encoding:
        return Encoding([len(word) for word in text.split()])


class OfTransformers:
    """As the package transformers has it."""

    eos_token_id = 7

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


class EndingWithEos(OfTransformers):
    """As those of T5 and BART, whose template ends with the end token."""

    def encode(self, text: str) -> list[int]:
        return [*super().encode(text), self.eos_token_id]


def words(text: str) -> dict[str, list[int]]:
    return {"input_ids": [len(word) for word in text.split()]}


@pytest.mark.parametrize(
    ("tokenizer", "end"), [(OfTokenizers(), []), (OfTransformers(), [7]), (EndingWithEos(), [7]), (words, [])]
)
def test_tokenisers_of_any_kind(tokenizer: Any, end: list[int]) -> None:
    assert tokens(texts().tokenize(tokenizer)) == [[*words(text)["input_ids"], *end] for text in TEXTS]


def test_an_end_can_be_given_or_left_out() -> None:
    assert tokens(texts().tokenize(words, end=9))[0] == [1, 1, 9]
    assert tokens(texts().tokenize(end=None))[1] == []


def test_tokens_are_packed() -> None:
    packed = texts().tokenize().pack(6)
    index = packed.index()
    rows = packed.read(index, np.arange(index.rows))
    flat = rows["tokens"][rows["mask"] > 0].tolist()
    assert flat == [token for document in tokens(texts().tokenize()) for token in document]
    assert rows["tokens"].shape == rows["position"].shape == (index.rows, 6)


def test_a_tokeniser_travels_with_its_job() -> None:
    step = Tokenize(tokenizer=words)
    rows = {"text": np.array(["one three"], dtype=object)}
    before = step(rows)["tokens"][0].tolist()
    assert pickle.loads(pickle.dumps(step))(rows)["tokens"][0].tolist() == before == [3, 5]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda data: data.tokenize(column="number"), "holds int64, and text was expected"),
        (lambda data: data.tokenize(column="txet"), "name one of number, text"),
        (lambda data: data.tokenize(5), "cannot be called"),
    ],
)
def test_what_goes_wrong_is_said(make: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        tokens(make(texts()))


def test_empty_documents_are_packed_as_nothing() -> None:
    tokens = np.empty(3, dtype=object)
    tokens[:] = [[1, 2], [], [3]]
    data = table({"tokens": tokens}).pack(4)
    assert data.read(data.index(), [0])["tokens"].tolist() == [[1, 2, 3, 0]]
