"""The estimated peak of a step's memory, next to the bytes that the tensors of an engine's steps hold at once."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.gpu.lone import CPU, Lone
from tests.support.decoder import Size, task

SIZE = Size(width=64, layers=4, heads=4, tokens=64, rows=8, words=2048)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations have read or written and that still exist."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {}
        self._held = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, outputs)):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self._held)
        return outputs

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._held += storage.nbytes()
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self._held -= self._sizes.pop(key)


@pytest.mark.parametrize("choices", [{}, {"precision": "bf16"}, {"precision": "bf16", "recompute": "full"}], ids=str)
def test_the_estimated_peak_is_what_tensors_hold(choices: dict[str, str]) -> None:
    """Of a decoder whose logits are larger than all else that a block keeps."""
    plan = SIZE.plan(**choices)
    with Lone(task(SIZE, plan), CPU) as lone, LiveBytes() as live:
        lone.train(0, 3)
    assert SIZE.foretold_bytes(plan, apart=False) == pytest.approx(live.peak, rel=0.05)
