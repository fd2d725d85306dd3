"""Which layer of a student is compared with which of a teacher's, and what makes their shapes alike. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainwright.core.errors import JobError

if TYPE_CHECKING:
    from trainwright.core.soft_loss import Match

Shape = tuple[int | None, ...]
_TO_FIRST, _TO_LAST = (0, 3, 1, 2), (0, 2, 3, 1)  # of feature maps: where the channels go


@dataclass(frozen=True, kw_only=True)
class Bridge:
    """A linear map from a student's width to a teacher's.

    Attributes:
        axis: of the layer's output that is mapped; the first is the rows.
        given, wanted: its sizes at the student and at the teacher.
    """

    axis: int
    given: int
    wanted: int


def layer_item(layer: str) -> tuple[str, str]:
    """A layer's own name, and which item of its output is meant; empty for all of it, or the first of a tuple."""
    name, _, item = layer.partition(":")
    return name, item


def item_of(outputs: Mapping[str, Any], name: str, item: str, is_tensor: Callable[[Any], bool]) -> Any:
    """The tensor that is meant of what a layer gave.

    Args:
        outputs: of layers, by name.
        name: of the layer's.
        item: as `layer_item` has it.
        is_tensor: whether a value is one.

    Raises:
        JobError: the layer did not run, or there is no such tensor; says what there is.
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
            [f"{name!r}: item {item!r} of the layer is no tensor: it gives {held}: name one as `layer:item`"]
        )
    return value


def turned(student: Shape, teacher: Shape) -> tuple[int, ...] | None:
    """How a teacher's feature map is transposed where its channels come first and the student's last, or vice versa.

    None where it stays as it is: the two are alike but for their channels, or are no feature maps.
    """
    if len(student) != 4 or len(teacher) != 4:
        return None
    ways = [(teacher, None)] + [(tuple(teacher[place] for place in way), way) for way in (_TO_FIRST, _TO_LAST)]
    for shape, way in ways:
        if any(_same(student, shape, but=axis) for axis in (3, 1)):
            return way
    return None


def bridge(match: Match, student: Shape, teacher: Shape) -> Bridge | None:
    """What is needed for the distance of two layers, given the shapes of their outputs; None where they fit.

    Raises:
        ValueError: no linear map makes them fit; says why.
    """
    way = turned(student, teacher)
    teacher = teacher if way is None else tuple(teacher[place] for place in way)
    if match.by == "attention":
        if len(student) != len(teacher) or len(student) < 3:
            raise ValueError(f"{shown(student)} and {shown(teacher)} are no two maps of as many dimensions")
        if not any(_same(student, teacher, but=axis) for axis in _axes(student)):
            raise ValueError(f"{shown(student)} and {shown(teacher)} differ in more than their channels")
        return None
    if _same(student, teacher):
        return None
    for axis in _axes(student):
        given, wanted = student[axis], teacher[axis] if len(student) == len(teacher) else None
        if given and wanted and _same(student, teacher, but=axis):
            return Bridge(axis=axis, given=given, wanted=wanted)
    raise ValueError(f"{shown(student)} and {shown(teacher)} differ in more than their width")


def channels(student: Shape, teacher: Shape, usual: int) -> int:
    """The axis over which `attention` sums: where two maps differ, else the usual one, in sequences the last.

    Both are as `turned` leaves them.
    """
    differing = [axis for axis in _axes(student) if not _same(student, teacher) and _same(student, teacher, but=axis)]
    return differing[0] if differing else usual if len(student) == 4 else len(student) - 1


def _axes(shape: Shape) -> tuple[int, ...]:
    """Those that may hold a width: the last one, and of maps the first after the rows."""
    return (3, 1) if len(shape) == 4 else (len(shape) - 1,)


def _same(one: Shape, other: Shape, but: int | None = None) -> bool:
    """Whether two shapes are alike after the rows; sizes that are not known are like any."""
    given = range(1, min(len(one), len(other)))
    return len(one) == len(other) and all(fits((one[axis],), (other[axis],)) for axis in given if axis != but)


def fits(one: Shape, other: Shape) -> bool:
    """Whether shapes are the same; sizes that are not known are like any."""
    return len(one) == len(other) and all(a is None or b is None or a == b for a, b in zip(one, other, strict=True))


def unlike(kind: str, own: Shape, said: Shape, student: str, teacher: str) -> str:
    """Why the outputs of a student and a teacher cannot be compared: other classes, labels, words or shapes.

    Args:
        kind: as `SoftLoss` has it.
        own, said: shapes of their outputs.
        student, teacher: names.

    Returns:
        Empty where they can.
    """
    if fits(own, said):
        return ""
    what = {"classification": "classes", "multi_label": "labels", "language_model": "words in the vocabulary"}
    if kind in what and len(own) == len(said) and fits(own[:-1], said[:-1]):
        problem = f"teacher {teacher!r} has {said[-1]} {what[kind]}, student {student!r} has {own[-1]}"
        return f"{problem}: distil between models of the same outputs in the same order"
    problem = f"teacher {teacher!r} gives {shown(said)}, student {student!r} gives {shown(own)}"
    return f"{problem}: give both one shape, or name by SoftLoss(output=...) which output is compared"


def shown(shape: Shape) -> str:
    """For an error."""
    return "(" + ", ".join("?" if size is None else str(size) for size in shape) + ")"
