"""Digests see every change, also of where values stand."""

from __future__ import annotations

import pytest
import torch

from trainwright.strategies.torch.checkpoint.tensor_digests import ROW_WORDS, tensor_digest
from trainwright.strategies.torch.training.deferred_init import DeferredInit

SIZES = (1, 2, 3, 7, 8, 2 * ROW_WORDS - 1, 2 * ROW_WORDS, 4 * ROW_WORDS + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_a_digest_depends_on_every_value(dtype: torch.dtype) -> None:
    for size in SIZES:
        values = (torch.arange(size) % 2).to(dtype)
        own = int(tensor_digest(values))
        assert int(tensor_digest(values.clone())) == own
        for place in {0, size // 2, size - 1}:
            changed = values.clone()
            changed[place] = 1 - int(values[place].real)
            assert int(tensor_digest(changed)) != own, (size, place)


def test_a_digest_depends_on_where_values_stand() -> None:
    """A carried state that two ranks write rows of in turn has the same sum on both."""
    even, odd = torch.tensor([10.0, 0.0] * 4), torch.tensor([0.0, 10.0] * 4)
    assert int(tensor_digest(even)) != int(tensor_digest(odd))
    wide = torch.zeros(4, ROW_WORDS * 2)
    rows = [wide.clone() for _ in range(4)]
    for number, one in enumerate(rows):
        one[number] = 1.0
    assert len({int(tensor_digest(one)) for one in rows}) == 4


def test_a_digest_is_of_the_values_alone() -> None:
    values = torch.arange(30.0)
    shifted = torch.cat((torch.zeros(1), values))[1:]
    columns = values.reshape(5, 6)
    assert int(tensor_digest(values)) == int(tensor_digest(shifted)) == int(tensor_digest(columns.T.contiguous().T))
    assert int(tensor_digest(torch.empty(0))) == int(tensor_digest(torch.empty(3, 0)))


def test_sparse_tensors_have_digests() -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    assert int(tensor_digest(dense.to_sparse())) == int(tensor_digest(dense.to_sparse()))
    assert int(tensor_digest(dense.to_sparse())) != int(tensor_digest(dense.T.to_sparse()))


def test_the_digest_of_a_model_is_that_of_what_is_trained() -> None:
    model = torch.nn.Linear(3, 2)
    own = DeferredInit().divide(model)
    with torch.no_grad():
        model.bias[1] += 1
    assert DeferredInit().divide(model) != own
    model.bias.requires_grad_(False)
    own = DeferredInit().divide(model)
    with torch.no_grad():
        model.bias[1] += 1
    assert DeferredInit().divide(model) == own
