"""Distillation in torch: models of teachers with hidden states, several students as one model, tensor functions."""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy.typing as npt
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from trainwright.core.data import Batch, Columns, Terms
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import CheckpointError, JobError, nearest
from trainwright.core.loss_api import TEACHER_WEIGHTS_OUTPUT, InlineTeacher, outputs_first
from trainwright.strategies.distillation.distillation_loss import TensorOps
from trainwright.strategies.distillation.layer_match import LayerProjection, Shape, layer_item, layer_tensor
from trainwright.strategies.distillation.multi_student import Builder, Names, RequestedOutputs
from trainwright.strategies.distillation.teacher_outputs import TeacherOutputs, ToArray
from trainwright.strategies.torch.torch_compat import tree_leaves
from trainwright.strategies.torch.training import batch_tensors as batches
from trainwright.strategies.torch.training.batch_losses import has_class_weights, per_sample, to_device
from trainwright.strategies.torch.training.evaluation import LOSS, flat_outputs
from trainwright.strategies.torch.training.new_model import AUTOCAST_DTYPES
from trainwright.strategies.torch.training.objective import JobFunctions

_log = logging.getLogger(__name__)
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
        layers: name of the output -> layer, as in `core.soft_loss.Match`. Of one that is called several times it is
            the last.

    Raises:
        JobError: there is no such module; when called: it did not run, or gives no such item.
    """
    if layers:
        hooks = _LayerHooks({layer: (model, layer) for layer in layers.values()})
        model.register_forward_pre_hook(hooks.begin)
        model.register_forward_hook(partial(hooks.add_to, layers))
    return model


def shapes(model: nn.Module, sample: Columns, inputs: Names, keywords: Names, device: str = "meta") -> dict[str, Shape]:
    """Return the shapes of a model's outputs for some rows, by name; rows are None. On `meta` it loses its data."""
    given = [each.to(device) for each in batches.to_tensors(sample, inputs, torch.device("cpu")).values()]
    model = model.to(device).eval()
    with torch.no_grad():
        found = model(**dict(zip(keywords, given, strict=True))) if keywords else model(*given)
    return {name: (None, *value.shape[1:]) for name, value in flat_outputs(found) if isinstance(value, Tensor)}


class _TorchInlineTeacher(nn.Module):
    """An inline teacher: always in evaluation mode, and without gradients."""

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


inside = _TorchInlineTeacher


# --- What layers inside a model give, heard of by hooks while its forward runs ----------------------------------------


class _LayerHooks:
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
            module.register_forward_hook(partial(self._record, name))

    def begin(self, *_: Any) -> None:
        """Start to record a forward."""
        self._found = {}
        self._open = True

    def take(self) -> dict[str, Tensor]:
        """Return the recorded outputs of a forward, by name. Raises JobError for a layer that did not run."""
        found, self._found, self._open = self._found, {}, False
        return {name: layer_tensor(found, name, item, _is_tensor) for name, item in self._items.items()}

    def add_to(self, layers: Mapping[str, str], _module: nn.Module, _inputs: Any, outputs: Any) -> dict[str, Any]:
        """Return a model's outputs by name with those of layers, as a hook of its forward."""
        found = self.take()
        return {**dict(flat_outputs(outputs)), **{output: found[layer] for output, layer in layers.items()}}

    def _record(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._open:
            self._found[name] = output


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


# --- Several students as one module; see `strategies.distillation.multi_student` --------------------------------------


class _TorchAxisLinear(nn.Module):
    """A linear map along one axis."""

    def __init__(self, bridge: LayerProjection, dtype: torch.dtype) -> None:
        super().__init__()
        self.axis = bridge.axis
        self.linear = nn.Linear(bridge.given, bridge.wanted, dtype=dtype)

    def forward(self, layer: Tensor) -> Tensor:
        """Return a tensor with another size along the axis."""
        mapped: Tensor = self.linear(layer.movedim(self.axis, -1))
        return mapped.movedim(-1, self.axis)


class _TorchStudents(nn.Module):
    """Students with the same inputs, as one module.

    Attributes:
        only: the one that runs; empty for all.
    """

    def __init__(self, models: Mapping[str, nn.Module], wanted: RequestedOutputs) -> None:
        super().__init__()
        dtype = next(models[next(iter(models))].parameters()).dtype
        self.students = nn.ModuleDict(models)
        self.bridges = nn.ModuleDict(
            {_key(name): _TorchAxisLinear(bridge, dtype) for name, bridge in wanted.bridges.items()}
        )
        self.weighing = nn.Parameter(torch.zeros(wanted.teachers, dtype=dtype)) if wanted.teachers else None
        self.only = wanted.only
        layers = {} if wanted.only else wanted.layers
        self._taps = _LayerHooks({name: (models[student], layer) for name, (student, layer) in layers.items()})

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return {student: its outputs} and further requested outputs; of a single student its own outputs."""
        if self.only:
            return self.students[self.only](*inputs, **named)
        self._taps.begin()
        outputs = {name: model(*inputs, **named) for name, model in self.students.items()}
        for name, layer in self._taps.take().items():
            outputs[name] = self.bridges[_key(name)](layer) if _key(name) in self.bridges else layer
        if self.weighing is not None:
            rows = next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)).shape[0]
            outputs[TEACHER_WEIGHTS_OUTPUT] = self.weighing.repeat(rows, 1)  # no view of what FSDP2 takes away again
        return outputs


def combine_students(models: Mapping[str, Any], wanted: RequestedOutputs) -> nn.Module:
    """Return several models as one. Raises JobError if one is not of torch."""
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            raise JobError([f"the builder of student {name!r} returned {type(model).__name__}: all are of torch"])
        if hasattr(nn.ModuleDict, name):
            raise JobError([f"a student is named {name!r}, which torch's modules have a use for: rename it"])
    return _TorchStudents(models, wanted)


def built_shapes(build: Builder, sample: Columns, inputs: Names, keywords: Names) -> Mapping[str, Shape]:
    """Return output shapes as `shapes`, without computing where the model allows it."""
    try:
        with torch.device("meta"):
            model = build()
        return shapes(model, sample, inputs, keywords)
    except JobError:
        raise
    except Exception as error:  # it reads values, or loads weights
        cause = f"{type(error).__name__}: {error}"
        _log.info("the model is built in memory, because it failed on the meta device: %s", cause)
        return shapes(build(), sample, inputs, keywords, device="cpu")


def _key(output: str) -> str:
    """Return the parameter name of an output's projection."""
    return output.replace("/", "-")


# --- A job's loss and metrics of outputs that are there already, as arrays --------------------------------------------


def marked(spec: ModelSpec, batch: Batch, outputs: Any, only: str = "") -> Terms:
    """Return the terms of the metric `only`, or of the loss; outputs are arrays (rows, ...), bare or by name.

    Raises:
        JobError, UserCodeError: the function takes other outputs, or does not give one value for each sample.
    """
    caller = JobFunctions(spec=spec, device=torch.device("cpu"), autocast=None, where=only or LOSS)
    given = _tensors(outputs) if isinstance(outputs, Mapping) else _tensors({"output": outputs})["output"]
    columns = caller.target_columns(batch)
    with torch.no_grad():
        found = caller.metric(only, given, columns, batch) if only else caller.loss_of(given, columns, batch)
    return Terms(batches.to_numpy(found.values.double()), batches.to_numpy(found.weights.double()))


def _tensors(outputs: Columns) -> dict[str, torch.Tensor]:
    return batches.to_tensors(outputs, outputs, torch.device("cpu"))


# --- The tensor functions of distillation losses ----------------------------------------------------------------------


_CLASS_WEIGHTS = (
    "the mean of the student's loss= divides by its class weights, and the divergence from the teachers is a mean over "
    'samples: set reduction="none" in the loss, so that its weighted values are a mean over samples too, or leave out '
    "its weight="
)
_TINY = 1e-24  # smallest square of a length
_MOST_PREPARED = 64  # losses and metrics; more than a job has
_prepared: dict[int, tuple[Any, torch.device, Callable[[Any, Any], Any], bool]] = {}
"""By a function's id: itself, so that the id stays its own; where its tensors are; how to call it; class weights."""
_loaded: dict[tuple[str, str, torch.device], nn.Module] = {}


def _precisely(like: Tensor) -> AbstractContextManager[Any]:
    return nullcontext() if like.is_meta else torch.autocast(like.device.type, enabled=False)


def _answers(teacher: InlineTeacher, columns: Mapping[str, Tensor], like: Tensor) -> Mapping[str, Tensor]:
    """The module is loaded once a process, onto the device of `like`; one of other weights makes room."""
    key = (teacher.name, teacher.identity(), like.device)
    if key not in _loaded:
        for old in [old for old in _loaded if old[0] == teacher.name]:
            del _loaded[old]
        _loaded[key] = teacher.module().to(like.device)
    with torch.no_grad(), _precisely(like):
        said: Mapping[str, Tensor] = _loaded[key](columns)
    return said


def _called(function: Any, outputs: Any, targets: Any, *, metric: bool = False) -> Any:
    """Call a loss or metric as a job without teachers does; its own tensors are moved to the outputs' device.

    Raises:
        JobError: the terms of a loss are weighted by class. These weights would count for the divergences too.
    """
    device = next(leaf.device for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
    held = _prepared.get(id(function))
    if held is None or held[1] != device:
        if len(_prepared) == _MOST_PREPARED:
            _prepared.clear()
        single = per_sample(to_device(function, device))
        held = _prepared[id(function)] = (function, device, outputs_first(single), has_class_weights(single))
    found = held[2](outputs, targets)
    if held[3] and not metric and isinstance(found, Terms):
        raise JobError([_CLASS_WEIGHTS])
    return found


TENSORS = TensorOps(
    channels=1,
    is_tensor=lambda value: isinstance(value, Tensor),
    first=lambda outputs: next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)),
    shape=lambda value: tuple(value.shape),
    wide=lambda value: value if value.dtype == torch.float64 else value.float(),
    typed=lambda value, like: value.to(like.dtype),
    near=lambda value, like: value.detach().to(like.device, like.dtype),
    held=Tensor.detach,
    precisely=_precisely,
    called=_called,
    answers=_answers,
    log_softmax=lambda logits: torch.log_softmax(logits, -1),
    log_sigmoid=nn.functional.logsigmoid,
    exp=torch.exp,
    log=torch.log,
    log_add=torch.logaddexp,
    log_total=lambda value: torch.logsumexp(value, 0),
    softmax=lambda value: torch.softmax(value, 0),
    counted=lambda chance, value: torch.where(chance == 0, 0.0, chance * value),
    total=lambda value, axes: value.sum(axes),
    mean=lambda value, axes: value.mean(axes),
    unit=lambda value: value * (value * value).sum(-1, keepdim=True).clamp(min=_TINY).rsqrt(),
    stacked=lambda values: torch.stack([*values]),
    unstacked=lambda value: value.unbind(),
    paired=lambda one, other: torch.stack((one, other), -1),
    transposed=lambda value, axes: value.permute(axes),
    flat=lambda value: value.flatten(1),
    shortened=lambda value, like: value[:, : like.shape[1]],
    widened=lambda value, dimensions: value.reshape(*value.shape, *(1 for _ in range(dimensions - value.dim()))),
)
