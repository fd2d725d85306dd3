"""One batch of students and their teachers: the formula of the loss, said once for all frameworks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainwright.core.data import Terms
from trainwright.core.errors import JobError
from trainwright.core.teacher_columns import TEACHERS, matched, of_layer, teacher_column
from trainwright.strategies.distillation.divergences import Tensors, divergence, surprise, union
from trainwright.strategies.distillation.layer_distance import distance
from trainwright.strategies.distillation.layer_projection import Shape, fits, shown, unlike

if TYPE_CHECKING:
    from trainwright.core.soft_loss import Match

if TYPE_CHECKING:
    from trainwright.strategies.distillation.losses import Distilled


class Learning:
    """One batch of a class: its outputs, and what the teachers say to it.

    Args:
        loss: says what is taught.
        outputs: of the model.
        columns: the targets.
        ops: the framework's functions.
    """

    def __init__(self, loss: Distilled, outputs: Any, columns: Mapping[str, Any], ops: Tensors) -> None:
        self._loss, self._soft, self._outputs, self._ops = loss, loss.soft, outputs, ops
        like = ops.first(outputs)
        self._like = ops.wide(like)
        self._columns = dict(columns)
        for teacher in loss.inline.values():
            self._columns |= ops.answers(teacher, {name: columns[name] for name in teacher.wanted}, like)

    def terms(self) -> Any:
        """The sum over the students."""
        results = [self._hard(name) for name in self._loss.joint]
        results += [self._student(name) for name in self._loss.learners]
        if self._soft.combine == "learned":
            results.append(self._mixture())
        total = results[0].values
        for result in results[1:]:
            total = total + result.values
        weights = results[-1].weights
        return total if weights is None else Terms(total, weights)

    def heard(self, teacher: str) -> Any:
        """What a teacher says, in the form that the students' outputs have; of `""` all together, by their weights.

        Weights that are made of labels, or learned, are no part of that: then each counts alike.
        """
        ops, loss = self._ops, self._loss
        if teacher:
            return self._as_said(ops.near(self._said(teacher), self._like))
        with ops.precisely(self._like):
            said = [ops.near(self._said(name), self._like) for name in loss.told]
            shares = [one * 0 + share for one, share in zip(said, self._soft.share(loss.told), strict=True)]
            return self._as_said(union(self._soft, ops.stacked(said), ops.stacked(shares), ops))

    def _hard(self, student: str) -> Terms:
        return self._hard_of(self._loss.said(self._outputs, student))

    def _hard_of(self, outputs: Any) -> Terms:
        """The hard loss of some outputs; its weights, or None."""
        assert self._loss.hard is not None, "whoever asks has one"
        labels = tuple(self._columns[name] for name in self._loss.labels)
        given = labels[0] if len(labels) == 1 else labels
        result = self._ops.called(self._loss.hard, outputs, given)
        if not isinstance(result, Terms):
            result = Terms(result, None)
        return Terms(self._typed(result.values), result.weights)

    def _student(self, name: str) -> Terms:
        """The loss of a student."""
        outputs, loss, ops = self._loss.said(self._outputs, name), self._loss, self._ops
        hard = self._hard_of(outputs) if loss.hard is not None else None
        own = self._typed(self._chosen(outputs, f"student {name!r}"))
        teachers = loss.taught_by(name)
        with ops.precisely(own):
            terms = [self._divergence(own, name, teacher, hard) for teacher in teachers]
            soft = self._combined(terms, teachers, hard, own) * self._soft.factor
            total = soft if hard is None or not self._soft.alpha else soft + hard.values * self._soft.alpha
            for number, match in enumerate(self._soft.matches):
                total = total + self._distance(name, number, match, total) * match.weight
        if hard is not None:
            return Terms(total, hard.weights)
        return Terms(total, self._columns[self._soft.mask] if self._soft.mask else None)

    def _divergence(self, own: Any, student: str, teacher: str, hard: Terms | None) -> Any:
        """From a teacher to a student, in the shape of the hard loss."""
        said = self._ops.near(self._said(teacher), own)
        self._alike(own, said, student, teacher)
        apart = divergence(self._soft, own, said, self._ops)
        return self._fitted(apart, hard, own)

    def _fitted(self, values: Any, hard: Terms | None, own: Any) -> Any:
        """Values of samples, tokens or their labels in the shape of the hard loss."""
        ops, kind = self._ops, self._soft.kind
        shape, whole = ops.shape(values), ops.shape(own)
        unlabelled = 1 if kind == "regression" else len(whole) - 1
        wanted = unlabelled if hard is None else len(ops.shape(hard.values))
        if len(shape) > wanted and kind == "regression":
            values = ops.mean(values, tuple(range(wanted, len(shape))))
        elif len(shape) == wanted + 1 and kind == "multi_label":
            values = ops.total(values, (wanted,))
        elif hard is not None and kind == "language_model" and _of_next(ops.shape(hard.values), shape):
            values = ops.shortened(values, hard.values)
        if hard is not None and not fits(ops.shape(hard.values), ops.shape(values)):
            raise JobError(
                [
                    f"the hard loss has shape {shown(ops.shape(hard.values))} and the divergence from a teacher "
                    f"{shown(ops.shape(values))}, of outputs {shown(whole)} and kind={kind!r}: return one loss for "
                    "each sample, in language models for each token, (rows, tokens), with Terms(values, weights) for "
                    "a mask"
                ]
            )
        return values

    def _combined(self, terms: Sequence[Any], teachers: tuple[str, ...], hard: Terms | None, own: Any) -> Any:
        """The weighted sum over the teachers."""
        if self._soft.combine == "fixed" or len(terms) == 1:
            shares: Sequence[Any] = self._soft.share(teachers)
        elif self._soft.combine == "learned":
            shares = [self._spread(share, terms[0]) for share in self._learned()]
        else:
            shares = self._confidence(teachers, hard, own)
        total = terms[0] * shares[0]
        for term, share in zip(terms[1:], shares[1:], strict=True):
            total = total + term * share
        return total

    def _confidence(self, teachers: tuple[str, ...], hard: Terms | None, own: Any) -> Sequence[Any]:
        """Each teacher's weight, for each sample or token."""
        ops, sure = self._ops, []
        for teacher in teachers:
            said = ops.near(self._said(teacher), own)
            if hard is not None:
                sure.append(-ops.near(self._hard_of(self._as_said(said)).values, own))
            else:
                sure.append(-self._fitted(surprise(self._soft, said, ops), hard, own))
        return ops.unstacked(ops.held(ops.softmax(ops.stacked(sure))))

    def _learned(self) -> Sequence[Any]:
        """Each teacher's weight, (rows,)."""
        return self._ops.unstacked(self._ops.held(self._weighing()))

    def _weighing(self) -> Any:
        """The same with its gradient, (teachers, rows)."""
        logits = self._typed(self._outputs[TEACHERS])
        return self._ops.softmax(self._ops.transposed(logits, (1, 0)))

    def _mixture(self) -> Terms:
        """The hard loss of what the teachers say together, which is what their weights learn from."""
        ops, teachers = self._ops, (*self._loss.told, *self._loss.joint)
        with ops.precisely(self._like):
            said = ops.stacked([ops.near(self._said(teacher), self._like) for teacher in teachers])
            shares = ops.stacked([self._spread(share, said[0]) for share in ops.unstacked(self._weighing())])
            mixed = union(self._soft, said, shares, ops)
        return self._hard_of(self._as_said(mixed))

    def _spread(self, share: Any, like: Any) -> Any:
        """(rows,) made (rows, 1, ...), to go with a tensor of more dimensions."""
        return self._ops.widened(share, len(self._ops.shape(like)))

    def _typed(self, value: Any) -> Any:
        """As wide as all that is added up."""
        return self._ops.typed(value, self._like)

    def _said(self, teacher: str) -> Any:
        """A teacher's outputs, without a gradient."""
        if teacher in self._loss.students:
            return self._ops.held(self._chosen(self._loss.said(self._outputs, teacher), f"student {teacher!r}"))
        return self._columns[teacher_column(teacher)]

    def _as_said(self, logits: Any) -> Any:
        """A teacher's outputs in the form that the students' have, for the hard loss."""
        outputs = self._loss.said(self._outputs, self._loss.learners[0])
        name = self._name(outputs, "the student")
        return logits if name is None else {name: logits}

    def _chosen(self, outputs: Any, whose: str) -> Any:
        """Of a model's outputs the one that is compared."""
        name = self._name(outputs, whose)
        return outputs if name is None else outputs[name]

    def _name(self, outputs: Any, whose: str) -> str | None:
        """Its name; None where there is one that has none."""
        if self._ops.is_tensor(outputs):
            return None
        names = [str(name) for name in outputs] if isinstance(outputs, Mapping) else []
        wanted = self._soft.output or ("logits" if "logits" in names else names[0] if len(names) == 1 else "")
        if wanted in names:
            return wanted
        what = f"outputs {', '.join(names)}" if names else f"a {type(outputs).__name__}"
        raise JobError([f"{whose} gives {what}: name by SoftLoss(output=...) what is compared with the teachers"])

    def _distance(self, student: str, number: int, match: Match, like: Any) -> Any:
        """Of a student's layer to a teacher's, in the shape of the loss."""
        ops, teacher = self._ops, self._loss.teacher_of(match)
        own = self._typed(self._outputs[matched(student, number)])
        if teacher in self._loss.students:
            theirs = ops.held(self._outputs[of_layer(teacher, match.teacher)])
        else:
            theirs = self._columns[teacher_column(teacher, match.teacher)]
        where = f"student {student!r}, {match.student!r} to {match.teacher!r} of {teacher!r}"
        tokens = self._soft.kind == "language_model"
        return distance(match, own, ops.near(theirs, own), like, ops, tokens=tokens, where=where)

    def _alike(self, own: Any, said: Any, student: str, teacher: str) -> None:
        """Raise JobError for other classes, labels, words or shapes."""
        problem = unlike(self._soft.kind, self._ops.shape(own), self._ops.shape(said), student, teacher)
        if problem:
            raise JobError([problem])


def _of_next(hard: Shape, soft: Shape) -> bool:
    """Whether a hard loss of tokens is, or may be, of the next ones: the last token has none."""
    if len(hard) != 2 or len(soft) != 2:
        return False
    return hard[1] is None or soft[1] is None or hard[1] == soft[1] - 1
