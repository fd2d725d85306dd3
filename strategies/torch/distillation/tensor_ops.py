"""The tensor functions of torch for distillation losses: see `strategies.distillation.divergences.TensorOps`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.loss_api import InlineTeacher, outputs_first
from trainwright.strategies.distillation.divergences import TensorOps
from trainwright.strategies.torch.torch_compat import tree_leaves

_TINY = 1e-24  # smallest square of a length
_loaded: dict[tuple[str, str, torch.device], nn.Module] = {}


class _TorchTensorOps:
    channels = 1

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, Tensor)

    def first(self, outputs: Any) -> Tensor:
        tensor: Tensor = next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
        return tensor

    def shape(self, value: Tensor) -> tuple[int | None, ...]:
        return tuple(value.shape)

    def wide(self, value: Tensor) -> Tensor:
        return value if value.dtype == torch.float64 else value.float()

    def typed(self, value: Tensor, like: Tensor) -> Tensor:
        return value.to(like.dtype)

    def near(self, value: Tensor, like: Tensor) -> Tensor:
        return value.detach().to(like.device, like.dtype)

    def held(self, value: Tensor) -> Tensor:
        return value.detach()

    def precisely(self, like: Tensor) -> AbstractContextManager[Any]:
        return nullcontext() if like.is_meta else torch.autocast(like.device.type, enabled=False)

    def called(self, function: Callable[..., Any], outputs: Any, targets: Any, *, metric: bool = False) -> Any:
        return outputs_first(function)(outputs, targets)

    def answers(self, teacher: InlineTeacher, columns: Mapping[str, Tensor], like: Tensor) -> Mapping[str, Tensor]:
        """The module is loaded once a process, onto the device of `like`; one of other weights makes room."""
        key = (teacher.name, teacher.identity(), like.device)
        if key not in _loaded:
            for old in [old for old in _loaded if old[0] == teacher.name]:
                del _loaded[old]
            _loaded[key] = teacher.module().to(like.device)
        with torch.no_grad(), self.precisely(like):
            said: Mapping[str, Tensor] = _loaded[key](columns)
        return said

    def log_softmax(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits, -1)

    def log_sigmoid(self, logits: Tensor) -> Tensor:
        return nn.functional.logsigmoid(logits)

    def exp(self, value: Tensor) -> Tensor:
        return torch.exp(value)

    def log(self, value: Tensor) -> Tensor:
        return torch.log(value)

    def log_add(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.logaddexp(one, other)

    def log_total(self, value: Tensor) -> Tensor:
        return torch.logsumexp(value, 0)

    def softmax(self, value: Tensor) -> Tensor:
        return torch.softmax(value, 0)

    def counted(self, chance: Tensor, value: Tensor) -> Tensor:
        return torch.where(chance == 0, 0.0, chance * value)

    def total(self, value: Tensor, axes: tuple[int, ...]) -> Tensor:
        return value.sum(axes)

    def mean(self, value: Tensor, axes: tuple[int, ...]) -> Tensor:
        return value.mean(axes)

    def unit(self, value: Tensor) -> Tensor:
        return value * (value * value).sum(-1, keepdim=True).clamp(min=_TINY).rsqrt()

    def stacked(self, values: Sequence[Tensor]) -> Tensor:
        return torch.stack([*values])

    def unstacked(self, value: Tensor) -> Sequence[Tensor]:
        return value.unbind()

    def paired(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.stack((one, other), -1)

    def transposed(self, value: Tensor, axes: tuple[int, ...]) -> Tensor:
        return value.permute(axes)

    def flat(self, value: Tensor) -> Tensor:
        return value.flatten(1)

    def shortened(self, value: Tensor, like: Tensor) -> Tensor:
        return value[:, : like.shape[1]]

    def widened(self, value: Tensor, dimensions: int) -> Tensor:
        return value.reshape(*value.shape, *(1 for _ in range(dimensions - value.dim())))


TENSORS: TensorOps = _TorchTensorOps()
