"""How a student's loss combines labels, teacher outputs and matched layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainwright.core.errors import JobError
from trainwright.core.strict_model import StrictModel

_Divergence = Literal["kl", "reverse_kl", "jensen_shannon", "mse"]


class Match(StrictModel):
    """A layer of the student that learns the hidden states of a teacher's layer.

    A layer is named as in the model's `named_modules()` (torch), or as a Keras layer; `name:1` and `name:key` take an
    item of what it gives, which is a tuple or a dict. Where the two differ in width, a linear map that is trained with
    the student comes in between.

    Attributes:
        student: the student's layer.
        teacher: the teacher's.
        of: the teacher's name; it may be left out where there is one.
        by: `mse`, the mean squared difference, for hidden states and for maps of attention (rows, heads, queries,
            keys), as in TinyBERT (Jiao et al., 2020); `cosine`, one minus the cosine along the last axis, as in
            DistilBERT (Sanh et al., 2019); `attention`, that of attention transfer for feature maps (Zagoruyko &
            Komodakis, 2017): the mean squared difference of where they are active, squares summed over the channels,
            at length 1.
        weight: of this term in a sample's or token's loss.
    """

    student: Annotated[str, Field(min_length=1)]
    teacher: Annotated[str, Field(min_length=1)]
    of: str = ""
    by: Literal["mse", "cosine", "attention"] = "mse"
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


class SoftLoss(StrictModel):
    """The loss of a student: labels, teacher outputs and matched layers.

    The loss of a sample (of a token in language models), with D the divergence at temperature T and w the teachers'
    weights, is alpha * hard + (1 - alpha) * T^2 * sum of w * D(teacher, student), plus the sum of the matches' weights
    times their distances (Hinton et al., 2015). T^2 keeps the size of the gradient as T grows. The hard loss is the
    job's; its weights, such as a mask of tokens, count for all terms.

    Attributes:
        kind: `classification`, logits (rows, classes); `language_model`, logits (rows, tokens, vocabulary), a loss for
            each token; `multi_label`, logits (rows, labels), each label by itself; `regression`, values (rows, ...).
        alpha: share of the hard loss; 0 leaves it out, as where there are no labels.
        temperature: T, by which both logits are divided; none in regression.
        divergence: `kl`, of the student from the teacher, KL(teacher || student); `reverse_kl`, KL(student || teacher);
            `jensen_shannon`; `mse`, the mean squared difference of the logits; or a function (student, teacher) ->
            one value per sample or token, given both logits divided by T. In multi-label all are of the two outcomes
            of each label, summed over the labels. In regression it is always the mean squared difference, or a
            function of the two values.
        matches: layers that are to be alike.
        combine: weights of several teachers: `fixed`, by `weights`; `confidence`, for each sample or token by the
            softmax over the teachers of minus their own hard loss with its label (for two teachers that of CA-MKD,
            Zhang et al., 2022), or where there is no hard loss of minus the entropy of their outputs; `learned`, the
            softmax of trained numbers, which follow the hard loss of the teachers' mixture and never the divergence.
        weights: teacher -> weight, for `fixed`; 1 where none is given. Their sum is made 1.
        output: which of the student's outputs is compared with the teachers', where it has several; by default the
            only one, or `logits`.
        mask: target column with a weight for each sample or token, where there is no hard loss to give it.
    """

    kind: Literal["classification", "multi_label", "regression", "language_model"] = "classification"
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    divergence: _Divergence | Callable[[Any, Any], Any] = "kl"
    matches: tuple[Match, ...] = ()
    combine: Literal["fixed", "confidence", "learned"] = "fixed"
    weights: Mapping[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    output: str = ""
    mask: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> SoftLoss:
        problems = []
        if self.alpha == 1.0 and not self.matches:
            problems.append("alpha=1 leaves nothing to learn from a teacher: use less than 1, or matches=")
        if self.kind == "regression":
            problems += self._of_values()
        if self.weights and self.combine != "fixed":
            problems.append(f'weights= are those of combine="fixed": leave them out for combine={self.combine!r}')
        if self.weights and not sum(self.weights.values()):
            problems.append("weights= are all 0: give one teacher a weight")
        if problems:
            raise JobError(problems)
        return self

    @property
    def factor(self) -> float:
        """Weight of a divergence: (1 - alpha) * T^2."""
        return (1.0 - self.alpha) * (1.0 if self.kind == "regression" else self.temperature**2)

    def share(self, teachers: tuple[str, ...]) -> tuple[float, ...]:
        """Return the fixed weights of teachers, in their order, with sum 1. Raises JobError for a sum of 0."""
        weights = [self.weights.get(name, 0.0 if self.weights.keys() & {*teachers} else 1.0) for name in teachers]
        total = sum(weights)
        if not total:
            raise JobError([f"weights= give none to {', '.join(teachers)}: give one of them a weight"])
        return tuple(weight / total for weight in weights)

    def _of_values(self) -> Iterator[str]:
        """Describe options that regression does not use."""
        if "temperature" in self.model_fields_set:
            yield "temperature= is for logits: leave it out for kind='regression'"
        if isinstance(self.divergence, str) and self.divergence != "mse" and "divergence" in self.model_fields_set:
            yield f'divergence={self.divergence!r} is for logits: use "mse" or a function in regression'
        if self.combine == "confidence" and self.alpha == 0:
            yield "combine='confidence' needs a hard loss in regression: values have no entropy"
