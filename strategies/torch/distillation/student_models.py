"""Several students as one torch module; see `strategies.distillation.multi_student`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.data import Batch, Columns, Terms
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.loss_api import TEACHER_WEIGHTS_OUTPUT
from trainwright.strategies.distillation.layer_match import LayerProjection, Shape
from trainwright.strategies.distillation.multi_student import Builder, Names, RequestedOutputs, StudentBackend
from trainwright.strategies.torch.distillation.teacher_backend import LayerHooks
from trainwright.strategies.torch.torch_compat import tree_leaves
from trainwright.strategies.torch.training import batch_tensors as batches
from trainwright.strategies.torch.training.evaluation import LOSS
from trainwright.strategies.torch.training.objective import JobFunctions


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

    Args:
        models: by name.
        wanted: what it gives beside their outputs.

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
        self._taps = LayerHooks({name: (models[student], layer) for name, (student, layer) in layers.items()})

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


class _TorchStudentBackend:
    """Combine torch models."""

    def model_of(self, models: Mapping[str, Any], wanted: RequestedOutputs) -> nn.Module:
        for name, model in models.items():
            if not isinstance(model, nn.Module):
                raise JobError([f"the builder of student {name!r} returned {type(model).__name__}: all are of torch"])
            if hasattr(nn.ModuleDict, name):
                raise JobError([f"a student is named {name!r}, which torch's modules have a use for: rename it"])
        return _TorchStudents(models, wanted)

    def shapes(self, build: Builder, sample: Columns, inputs: Names, keywords: Names) -> Mapping[str, Shape]:
        """Return output shapes, without computing where the model allows it."""
        given = list(batches.to_tensors(sample, inputs, torch.device("cpu")).values())
        try:
            with torch.device("meta"):
                model = build()
            found = _run(model, [each.to("meta") for each in given], keywords)
        except JobError:
            raise
        except Exception:  # it looks at values, or loads weights
            found = _run(build(), given, keywords)
        return {name: (None, *value.shape[1:]) for name, value in found.items() if isinstance(value, Tensor)}


CLASSES: StudentBackend = _TorchStudentBackend()


def _run(model: nn.Module, given: list[Tensor], keywords: Names) -> Mapping[str, Any]:
    """Return the outputs in evaluation mode; inputs have the type of the parameters, as in the profiler."""
    model.eval()
    with torch.no_grad():
        named = dict(zip(keywords, given, strict=True)) if keywords else {}
        outputs: Mapping[str, Any] = model(*(() if named else given), **named)
    return outputs


def _key(output: str) -> str:
    """Return the parameter name of an output's projection."""
    return output.replace("/", "-")


# --- A job's loss and metrics of outputs that are there already, as arrays --------------------------------------------


def marked(spec: ModelSpec, batch: Batch, outputs: Any, only: str = "") -> Terms:
    """Return the terms of a metric, or of the loss.

    Args:
        spec: of the job.
        batch: with the targets.
        outputs: an array (rows, ...), or arrays by the output's name.
        only: the metric; empty for the loss.

    Raises:
        JobError, UserCodeError: the function takes other outputs, or does not give one value for each sample.
    """
    caller = JobFunctions(spec=spec, device=torch.device("cpu"), autocast=None, where=only or LOSS)
    given = _tensors(outputs) if isinstance(outputs, Mapping) else _tensors({"output": outputs})["output"]
    columns = caller.wanted(batch)
    with torch.no_grad():
        found = caller.metric(only, given, columns, batch) if only else caller.loss_of(given, columns, batch)
    return Terms(batches.to_numpy(found.values.double()), batches.to_numpy(found.weights.double()))


def _tensors(outputs: Columns) -> dict[str, torch.Tensor]:
    return batches.to_tensors(outputs, outputs, torch.device("cpu"))
