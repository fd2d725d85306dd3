"""A class of students as one module; see `strategies.students`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.data import Columns
from trainwright.core.errors import JobError
from trainwright.core.teacher_columns import TEACHERS
from trainwright.strategies.distillation.layer_projection import Bridge, Shape
from trainwright.strategies.distillation.multi_student import Builder, Classes, Names, Wanted
from trainwright.strategies.torch.distillation.hidden_states import Taps
from trainwright.strategies.torch.torch_compat import tree_leaves, tree_map_only
from trainwright.strategies.torch.training import tensors as batches


class Along(nn.Module):
    """A linear map along one axis."""

    def __init__(self, bridge: Bridge, dtype: torch.dtype) -> None:
        super().__init__()
        self.axis = bridge.axis
        self.linear = nn.Linear(bridge.given, bridge.wanted, dtype=dtype)

    def forward(self, layer: Tensor) -> Tensor:
        """The same with another size there."""
        mapped: Tensor = self.linear(layer.movedim(self.axis, -1))
        return mapped.movedim(-1, self.axis)


class StudentClass(nn.Module):
    """Students that are given the same inputs.

    Args:
        models: by name.
        wanted: what it gives beside their outputs.

    Attributes:
        only: the one that runs; empty for all.
    """

    def __init__(self, models: Mapping[str, nn.Module], wanted: Wanted) -> None:
        super().__init__()
        dtype = next(models[next(iter(models))].parameters()).dtype
        self.students = nn.ModuleDict(models)
        self.bridges = nn.ModuleDict({_key(name): Along(bridge, dtype) for name, bridge in wanted.bridges.items()})
        self.weighing = nn.Parameter(torch.zeros(wanted.teachers, dtype=dtype)) if wanted.teachers else None
        self.only = wanted.only
        layers = {} if wanted.only else wanted.layers
        self._taps = Taps({name: (models[student], layer) for name, (student, layer) in layers.items()})

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """{student: its outputs}, and what else is wanted; of the only one its own outputs."""
        if self.only:
            return self.students[self.only](*inputs, **named)
        self._taps.begin()
        outputs = {name: model(*inputs, **named) for name, model in self.students.items()}
        for name, layer in self._taps.take().items():
            outputs[name] = self.bridges[_key(name)](layer) if _key(name) in self.bridges else layer
        if self.weighing is not None:
            rows = next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)).shape[0]
            outputs[TEACHERS] = self.weighing.repeat(rows, 1)  # no view of what FSDP2 takes away again
        return outputs


class _Torch:
    """Models of torch as a class."""

    def model_of(self, models: Mapping[str, Any], wanted: Wanted) -> nn.Module:
        for name, model in models.items():
            if not isinstance(model, nn.Module):
                raise JobError([f"the builder of student {name!r} returned {type(model).__name__}: all are of torch"])
            if hasattr(nn.ModuleDict, name):
                raise JobError([f"a student is named {name!r}, which torch's modules have a use for: rename it"])
        return StudentClass(models, wanted)

    def shapes(self, build: Builder, sample: Columns, inputs: Names, keywords: Names) -> Mapping[str, Shape]:
        """Without data where the model can do without."""
        given = list(batches.tensors(sample, inputs, torch.device("cpu")).values())
        try:
            with torch.device("meta"):
                model = build()
            found = _run(model, [each.to("meta") for each in given], keywords)
        except JobError:
            raise
        except Exception:  # it looks at values, or loads weights
            found = _run(build(), given, keywords)
        return {name: (None, *value.shape[1:]) for name, value in found.items() if isinstance(value, Tensor)}


CLASSES: Classes = _Torch()


def _run(model: nn.Module, given: list[Tensor], keywords: Names) -> Mapping[str, Any]:
    """What a class gives in evaluation; inputs are in the type of its parameters, as the profiler has them."""
    model.eval()
    with torch.no_grad():
        named = dict(zip(keywords, given, strict=True)) if keywords else {}
        outputs = model(*(() if named else given), **named)
    return dict(tree_map_only(Tensor, Tensor.detach, outputs))


def _key(output: str) -> str:
    """The name of an output's bridge among parameters."""
    return output.replace("/", "-")
