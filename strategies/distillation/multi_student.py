"""Combine several students into one model of a job, or let one student also return hidden layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainwright.core import random_state
from trainwright.core.data import Columns
from trainwright.core.errors import JobError, nearest
from trainwright.core.frameworks import load_module
from trainwright.core.loss_api import bridge_output, layer_output, teacher_column
from trainwright.strategies.distillation.distillation_loss import DistillationLoss
from trainwright.strategies.distillation.layer_match import LayerProjection, Shape, projection_for

_FRAMEWORKS = {"torch": "torch", "keras.src.backend.tensorflow": "tensorflow"}
Builder = Callable[[], Any]
Names = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RequestedOutputs:
    """Outputs of the combined model beside the students' own outputs."""

    layers: Mapping[str, tuple[str, str]]  # output -> student, and its layer
    # projections of layers to another width, by output
    bridges: Mapping[str, LayerProjection] = field(default_factory=dict)
    teachers: int = 0  # number of teachers with learned weights; 0 if weights are not learned
    only: str = ""  # the one student that runs, whose outputs are returned without a dict; empty for all


@dataclass(frozen=True, kw_only=True)
class StudentModels:
    """A job's `model=` for `loss=DistillationLoss(...)`: () -> one model around all students.

    The model has the students' own parameters, as `students.<name>.<parameter>`, those of the bridges and the learned
    weights of teachers. It returns {student: its outputs}, and the matched layers. Each student gets the initial
    weights that it would have alone.
    """

    builders: Mapping[str, Builder]  # name -> () -> model; of one framework
    loss: DistillationLoss  # with the matched layers
    bridges: Mapping[str, LayerProjection] = field(default_factory=dict)  # projections, see `fitted`
    only: str = ""  # see `alone`

    def __post_init__(self) -> None:
        if tuple(self.builders) != self.loss.students:
            raise JobError(
                [f"the builders are of {', '.join(self.builders)}, the loss of {', '.join(self.loss.students)}"]
            )

    def __call__(self) -> Any:
        """Build the models."""
        again, models = random_state.save_generators(), {}
        for name, build in self.builders.items():
            again()
            models[name] = build()
        return model_backend(next(iter(models.values()))).combine_students(models, self.wanted)

    def fitted(self, sample: Columns, inputs: Names, keywords: Names = ()) -> StudentModels:
        """Return the builder with the projections that its matches need. Run the students once on a row to find them.

        `sample` has the columns of a row after collation, with those of the teachers.

        Raises:
            JobError: a layer is unknown, or two cannot be compared.
        """
        if not self.loss.soft.matches:
            return self
        bare = replace(self, bridges={}, only="")
        found = model_backend(next(iter(self.builders.values()))()).built_shapes(bare, sample, inputs, keywords)
        bridges: dict[str, LayerProjection] = {}
        problems: list[str] = []
        for student in self.loss.learners:
            for number, match in enumerate(self.loss.soft.matches):
                output, teacher = bridge_output(student, number), self.loss.teacher_of(match)
                theirs = found.get(layer_output(teacher, match.teacher)) or _column(sample, teacher, match.teacher)
                try:
                    needed = projection_for(match, found[output], theirs)
                except ValueError as error:
                    problems.append(f"{match.student!r} of {student!r} and {match.teacher!r} of {teacher!r}: {error}")
                else:
                    bridges |= {output: needed} if needed else {}
        if problems:
            raise JobError(problems)
        return replace(self, bridges=bridges)

    @property
    def wanted(self) -> RequestedOutputs:
        """The outputs of the model."""
        loss, soft = self.loss, self.loss.soft
        layers = {
            bridge_output(student, number): (student, match.student)
            for student in loss.learners
            for number, match in enumerate(soft.matches)
        }
        layers |= {
            layer_output(teacher, match.teacher): (teacher, match.teacher)
            for match in soft.matches
            if (teacher := loss.teacher_of(match)) in loss.students
        }
        teachers = len(loss.told) + len(loss.joint) if soft.combine == "learned" else 0
        return RequestedOutputs(layers=layers, bridges=self.bridges, teachers=teachers, only=self.only)

    def alone(self, student: str) -> StudentModels:
        """Return the builder for one student alone, to evaluate, predict or export it.

        Its model returns the student's own outputs, for a loss and metrics of one model. It keeps the parameter names
        of the combined model, so that checkpoints fit; `trainwright.load_model` returns the student itself. Raises
        JobError for an unknown student.
        """
        if student not in self.builders:
            raise JobError([f"there is no student {student!r}: {nearest(student, self.builders)}"])
        return replace(self, only=student)


def unwrap_student(model: Any) -> Any:
    """Return the student of a model that `StudentModels.alone` built; return any other model as it is."""
    only = getattr(model, "only", "")
    return model.students[only] if only and hasattr(model, "students") else model


def model_backend(model: Any) -> Any:
    """Return the `distillation.model_backend` of a model's framework, or of a parameter's. Raises JobError."""
    for kind in type(model).__mro__:
        for package, framework in _FRAMEWORKS.items():
            if kind.__module__.startswith(package):
                return load_module(f"trainwright.strategies.{framework}.distillation.model_backend")
    named = f"{type(model).__module__}.{type(model).__qualname__}"
    raise JobError([f"the builder of a model returned {named}: return a torch.nn.Module, or a keras.Model"])


def _column(sample: Columns, teacher: str, layer: str) -> Shape:
    name = teacher_column(teacher, layer)
    if name not in sample:
        raise JobError([f"there is no column {name!r}: {nearest(name, sample)}"])
    return (None, *sample[name].shape[1:])
