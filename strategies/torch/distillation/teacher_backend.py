"""Torch models as teachers: weights from files, hidden states by module name, and inline teachers."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy.typing as npt
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from trainwright.core.data import Columns
from trainwright.core.errors import CheckpointError, JobError, nearest
from trainwright.strategies.distillation.layer_match import layer_item, layer_tensor
from trainwright.strategies.distillation.teacher_outputs import TeacherOutputs, ToArray
from trainwright.strategies.torch.training import batch_tensors as batches
from trainwright.strategies.torch.training.evaluation import flat_outputs
from trainwright.strategies.torch.training.train_state import AUTOCAST_DTYPES

FRAMEWORK, LOOKS = "torch", True


def still(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer without state, for a model that is not trained."""
    return torch.optim.SGD(parameters, lr=0.0)


def thawed(model: nn.Module) -> nn.Module:
    """Return the model with trainable parameters, which an engine needs."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
    return model


def outlined(model: nn.Module) -> bool:
    """Return whether the model has no memory (meta device)."""
    return any(parameter.is_meta for parameter in model.parameters())


_UNFIT = (
    *(RuntimeError, OSError, ValueError, TypeError, AttributeError, safetensors.SafetensorError),
    pickle.UnpicklingError,  # torch refuses to call what a .pt file names
)


def take_file(model: nn.Module, path: str) -> nn.Module:
    """Load weights from a file that `export` wrote. Raises CheckpointError where they do not fit."""
    try:
        if path.endswith(".safetensors"):
            safetensors.torch.load_model(model, path)
        else:
            model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except _UNFIT as error:
        raise CheckpointError(
            f"the weights do not fit the model: {error}",
            where=path,
            remedy="give the model= that they were exported from; .safetensors or .pt",
        ) from error
    return model


def digest(model: nn.Module) -> str:
    """SHA-256 of the state dict."""
    sums = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sums.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sums.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sums.hexdigest()


def tap(model: nn.Module, layers: Mapping[str, str]) -> nn.Module:
    """Return the model with the outputs of some modules beside its own; its state keeps its names.

    Args:
        layers: name of the output -> layer, as in `core.loss_api.Match`. Of one that is called several times it is
            the last.

    Raises:
        JobError: there is no such module; when called: it did not run, or gives no such item.
    """
    if layers:
        taps = LayerHooks({layer: (model, layer) for layer in layers.values()})
        model.register_forward_pre_hook(partial(_begin, taps))
        model.register_forward_hook(partial(_tell, taps, layers))
    return model


def shapes(
    model: nn.Module, sample: Columns, inputs: tuple[str, ...], keywords: tuple[str, ...]
) -> dict[str, tuple[int | None, ...]]:
    """Return the shapes of a model's outputs for some rows, by name; rows are None. The model loses its data.

    Args:
        sample: columns of a row or a few, collated.
        inputs, keywords: as a job's `arguments` and `keywords`.
    """
    given = [each.to("meta") for each in batches.to_tensors(sample, inputs, torch.device("cpu")).values()]
    model = model.to("meta").eval()
    with torch.no_grad():
        found = model(**dict(zip(keywords, given, strict=True))) if keywords else model(*given)
    return {name: (None, *value.shape[1:]) for name, value in flat_outputs(found) if isinstance(value, Tensor)}


class _TorchInlineTeacher(nn.Module):
    """An inline teacher: always in evaluation mode, and without gradients.

    Args:
        model: with its weights.
        lesson: what it is given, and what is made of what it gives.
    """

    def __init__(self, model: nn.Module, lesson: TeacherOutputs) -> None:
        super().__init__()
        self.model = tap(model, lesson.tapped).requires_grad_(False)
        self._lesson, self._autocast = lesson, AUTOCAST_DTYPES.get(lesson.precision)
        self._look: ToArray | None = _array
        self.train(False)

    def train(self, mode: bool = True) -> _TorchInlineTeacher:
        """Stay in evaluation mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the teacher's columns for a batch: logits and layers, float32 or wider.

        Raises:
            JobError: what it gives is not what it is said to be; of the first batch alone.
        """
        given = [columns[name] for name in self._lesson.inputs]
        with self._precision(given[0].device.type):
            if self._lesson.keywords:
                found = self.model(**dict(zip(self._lesson.keywords, given, strict=True)))
            else:
                found = self.model(*given)
        told = self._lesson.told(dict(flat_outputs(found)), log_odds, self._look)
        self._look = None
        return {name: value.float() if value.itemsize < 4 else value for name, value in told.items()}

    def _precision(self, device: str) -> AbstractContextManager[Any]:
        return torch.autocast(device, self._autocast) if self._autocast else nullcontext()


def log_odds(probabilities: Tensor, each: bool) -> Tensor:
    """Return logits of probabilities: of one class among all, or of each label by itself."""
    least = torch.finfo(probabilities.dtype).tiny
    logs = probabilities.clamp_min(least).log()
    return logs - (1 - probabilities).clamp_min(least).log() if each else logs


def _array(value: Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = value.detach().double().cpu().numpy()
    return array


def _begin(taps: LayerHooks, module: nn.Module, given: Any) -> None:
    taps.begin()


def _tell(taps: LayerHooks, layers: Mapping[str, str], module: nn.Module, given: Any, outputs: Any) -> dict[str, Any]:
    heard = taps.take()
    return {**dict(flat_outputs(outputs)), **{output: heard[layer] for output, layer in layers.items()}}


inside = _TorchInlineTeacher


# --- What layers inside a model give, heard of by hooks while its forward runs ----------------------------------------


class LayerHooks:
    """Record the output of the last call of each layer in a forward. Recomputation in backward is not recorded.

    Args:
        layers: name -> the model, and the layer in it, as in `Match`.

    Raises:
        JobError: a model has no such layer.
    """

    def __init__(self, layers: Mapping[str, tuple[nn.Module, str]]) -> None:
        self._items: dict[str, str] = {}
        self._found: dict[str, Any] = {}
        self._open = False
        for name, (model, layer) in layers.items():
            path, self._items[name] = layer_item(layer)
            try:
                module = model.get_submodule(path)
            except AttributeError:
                known = [each for each, _ in model.named_modules() if each]
                raise JobError([f"the model has no layer {path!r}: {nearest(path, known)}"]) from None
            module.register_forward_hook(partial(_hear, self, name))

    def begin(self) -> None:
        """Start to record a forward."""
        self._found = {}
        self._open = True

    def take(self) -> dict[str, Tensor]:
        """Return the recorded outputs of a forward, by name. Raises JobError for a layer that did not run."""
        found, self._found, self._open = self._found, {}, False
        return {name: layer_tensor(found, name, item, _is_tensor) for name, item in self._items.items()}

    def hear(self, name: str, output: Any) -> None:
        """Record a call of a layer."""
        if self._open:
            self._found[name] = output


def _hear(taps: LayerHooks, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
    taps.hear(name, output)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
