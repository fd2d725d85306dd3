"""Compare layers of a student with layers of a teacher, and project them to equal shapes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainwright.core.errors import JobError

if TYPE_CHECKING:
    from trainwright.core.soft_loss import Match
    from trainwright.strategies.distillation.distillation_loss import TensorOps

Shape = tuple[int | None, ...]
_TO_FIRST, _TO_LAST = (0, 3, 1, 2), (0, 2, 3, 1)  # of feature maps: where the channels go


@dataclass(frozen=True, kw_only=True)
class LayerProjection:
    """A linear map from a student's width to a teacher's."""

    axis: int  # of the layer's output that is mapped; the first is the rows
    given: int  # its size at the student
    wanted: int  # its size at the teacher


def layer_item(layer: str) -> tuple[str, str]:
    """Split `layer:item` into a layer's name and the item of its output; empty for all, or for a tuple's first item."""
    name, _, item = layer.partition(":")
    return name, item


def layer_tensor(outputs: Mapping[str, Any], name: str, item: str, is_tensor: Callable[[Any], bool]) -> Any:
    """Return the selected tensor of a layer's output.

    Raises:
        JobError: the layer did not run, or its output has no such tensor.
    """
    if name not in outputs:
        raise JobError([f"{name!r}: the model did not run that layer: match one that it runs"])
    output, value = outputs[name], None
    if is_tensor(output):
        value, held = None if item else output, "one tensor"
    elif isinstance(output, Mapping):
        value, held = output.get(item), f"a dict with {', '.join(map(str, output))}"
    elif isinstance(output, tuple | list):
        place = int(item) if item.isdecimal() else -1 if item else 0
        value, held = output[place] if 0 <= place < len(output) else None, f"a tuple of {len(output)}"
    else:
        held = type(output).__name__
    if not is_tensor(value):
        raise JobError(
            [f"{name!r}: item {item!r} of the layer is not a tensor: it gives {held}: name one as `layer:item`"]
        )
    return value


def _transposition(student: Shape, teacher: Shape) -> tuple[int, ...] | None:
    """Return how to transpose a teacher's feature map if its channels are first and the student's last, or vice versa.

    None if nothing is to transpose: the shapes differ only in their channels, or are no feature maps.
    """
    if len(student) != 4 or len(teacher) != 4:
        return None
    ways = [(teacher, None)] + [(tuple(teacher[place] for place in way), way) for way in (_TO_FIRST, _TO_LAST)]
    for shape, way in ways:
        if any(_same(student, shape, but=axis) for axis in (3, 1)):
            return way
    return None


def projection_for(match: Match, student: Shape, teacher: Shape) -> LayerProjection | None:
    """Return the projection that two layers need, given the shapes of their outputs; None if they match.

    Raises:
        ValueError: no linear map makes them match; has the reason.
    """
    way = _transposition(student, teacher)
    teacher = teacher if way is None else tuple(teacher[place] for place in way)
    if match.by == "attention":
        if len(student) != len(teacher) or len(student) < 3:
            raise ValueError(f"{shape_text(student)} and {shape_text(teacher)} have different numbers of dimensions")
        if not any(_same(student, teacher, but=axis) for axis in _axes(student)):
            raise ValueError(f"{shape_text(student)} and {shape_text(teacher)} differ in more than their channels")
        return None
    if _same(student, teacher):
        return None
    for axis in _axes(student):
        given, wanted = student[axis], teacher[axis] if len(student) == len(teacher) else None
        if given and wanted and _same(student, teacher, but=axis):
            return LayerProjection(axis=axis, given=given, wanted=wanted)
    raise ValueError(f"{shape_text(student)} and {shape_text(teacher)} differ in more than their width")


def _channel_axis(student: Shape, teacher: Shape, usual: int) -> int:
    """Return the axis over which `attention` sums: where two maps differ, else `usual`; in sequences the last.

    Both shapes are after `_transposition`.
    """
    differing = [axis for axis in _axes(student) if not _same(student, teacher) and _same(student, teacher, but=axis)]
    return differing[0] if differing else usual if len(student) == 4 else len(student) - 1


def _axes(shape: Shape) -> tuple[int, ...]:
    """Return the axes that may be channels: the last one, and in feature maps the first after the rows."""
    return (3, 1) if len(shape) == 4 else (len(shape) - 1,)


def _same(one: Shape, other: Shape, but: int | None = None) -> bool:
    """Return whether two shapes match after the rows; unknown sizes match any."""
    given = range(1, min(len(one), len(other)))
    return len(one) == len(other) and all(shapes_match((one[axis],), (other[axis],)) for axis in given if axis != but)


def shapes_match(one: Shape, other: Shape) -> bool:
    """Return whether shapes match; unknown sizes match any."""
    return len(one) == len(other) and all(a is None or b is None or a == b for a, b in zip(one, other, strict=True))


def output_mismatch(kind: str, own: Shape, said: Shape, student: str, teacher: str) -> str:
    """Return why the outputs of a student and a teacher cannot be compared; empty if they can."""
    if shapes_match(own, said):
        return ""
    what = {"classification": "classes", "multi_label": "labels", "language_model": "words in the vocabulary"}
    if kind in what and len(own) == len(said) and shapes_match(own[:-1], said[:-1]):
        problem = f"teacher {teacher!r} has {said[-1]} {what[kind]}, student {student!r} has {own[-1]}"
        return f"{problem}: distil between models of the same outputs in the same order"
    problem = f"teacher {teacher!r} gives {shape_text(said)}, student {student!r} gives {shape_text(own)}"
    return f"{problem}: give both one shape, or name by SoftLoss(output=...) which output is compared"


def shape_text(shape: Shape) -> str:
    """Return a shape as text, for an error."""
    return "(" + ", ".join("?" if size is None else str(size) for size in shape) + ")"


# --- Distance of a student's layer from a teacher's -------------------------------------------------------------------


def layer_distance(match: Match, own: Any, theirs: Any, like: Any, ops: TensorOps, *, tokens: bool, where: str) -> Any:
    """Return the distance for each sample, in language models for each token, with the dimensions of the loss.

    Args:
        match: which layers, and how they are compared.
        own, theirs: outputs of the layers, (rows, ...); the student's is projected to the teacher's width.
        like: the loss so far.
        ops: the framework's functions.
        tokens: the loss has a value for each token; so has the distance of layers with tokens.
        where: the layers, for errors.

    Raises:
        JobError: the shapes do not match.
    """
    try:
        apart = projection_for(match, ops.shape(own), ops.shape(theirs))
        problem = "" if apart is None else f"widths {apart.given} and {apart.wanted} differ and no bridge was made"
    except ValueError as error:
        problem = str(error)
    if problem:
        raise JobError([f"{where}: {problem}: choose layers whose outputs have one shape but for their width"])
    way = _transposition(ops.shape(own), ops.shape(theirs))
    theirs = theirs if way is None else ops.transposed(theirs, way)
    if match.by == "attention":
        values = _active(own, theirs, ops)
    elif match.by == "cosine":
        values = 1.0 - ops.total(ops.unit(own) * ops.unit(theirs), (len(ops.shape(own)) - 1,))
    else:
        values = (own - theirs) * (own - theirs)
    return _reduced(values, ops.shape(own), like, ops, tokens=tokens and match.by != "attention", where=where)


def _active(own: Any, theirs: Any, ops: TensorOps) -> Any:
    """Return (rows, places): squared differences of two attention maps, each normalized to length 1."""
    axis = _channel_axis(ops.shape(own), ops.shape(theirs), ops.channels)
    mine, wanted = (ops.unit(ops.flat(ops.total(each * each, (axis,)))) for each in (own, theirs))
    return (mine - wanted) * (mine - wanted)


def _reduced(values: Any, layer: Shape, like: Any, ops: TensorOps, *, tokens: bool, where: str) -> Any:
    """Return the mean of a sample's or token's numbers, with the dimensions of the loss."""
    loss, held = ops.shape(like), len(ops.shape(values))
    if not tokens or len(layer) < 3:
        return ops.widened(ops.mean(values, tuple(range(1, held))) if held > 1 else values, len(loss))
    axes = [axis for axis in range(1, held) if axis != (2 if len(layer) == 4 else 1)]
    values = ops.mean(values, tuple(axes)) if axes else values
    has = ops.shape(values)[1]
    if has is None or loss[1] is None or has == loss[1] + 1:  # a loss of the next tokens: the last has none
        values = ops.shortened(values, like)
    if not shapes_match(ops.shape(values), loss):
        raise JobError(
            [f"{where}: the layers have {has} tokens, the loss {shape_text(loss)}: choose layers of the tokens"]
        )
    return values
