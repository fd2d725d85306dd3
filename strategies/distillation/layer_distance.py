"""How far a layer of a student is from a teacher's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.core.errors import JobError
from trainwright.strategies.distillation.divergences import Tensors
from trainwright.strategies.distillation.layer_projection import Shape, bridge, channels, fits, shown, turned

if TYPE_CHECKING:
    from trainwright.core.soft_loss import Match


def distance(match: Match, own: Any, theirs: Any, like: Any, ops: Tensors, *, tokens: bool, where: str) -> Any:
    """The distance for each sample, in language models for each token, in as many dimensions as the loss has.

    Args:
        own, theirs: outputs of the layers, (rows, ...); the student's is bridged to the teacher's width.
        like: the loss so far.
        tokens: the loss is one of tokens: so is a distance of layers that have them.
        where: the layers, for errors.

    Raises:
        JobError: the shapes do not fit.
    """
    try:
        apart = bridge(match, ops.shape(own), ops.shape(theirs))
        problem = "" if apart is None else f"widths {apart.given} and {apart.wanted} differ and no bridge was made"
    except ValueError as error:
        problem = str(error)
    if problem:
        raise JobError([f"{where}: {problem}: choose layers whose outputs have one shape but for their width"])
    way = turned(ops.shape(own), ops.shape(theirs))
    theirs = theirs if way is None else ops.transposed(theirs, way)
    if match.by == "attention":
        values = _active(own, theirs, ops)
    elif match.by == "cosine":
        values = 1.0 - ops.total(ops.unit(own) * ops.unit(theirs), (len(ops.shape(own)) - 1,))
    else:
        values = (own - theirs) * (own - theirs)
    return _reduced(values, ops.shape(own), like, ops, tokens=tokens and match.by != "attention", where=where)


def _active(own: Any, theirs: Any, ops: Tensors) -> Any:
    """(rows, places) squared differences of where two maps are active, each at length 1."""
    axis = channels(ops.shape(own), ops.shape(theirs), ops.channels)
    mine, wanted = (ops.unit(ops.flat(ops.total(each * each, (axis,)))) for each in (own, theirs))
    return (mine - wanted) * (mine - wanted)


def _reduced(values: Any, layer: Shape, like: Any, ops: Tensors, *, tokens: bool, where: str) -> Any:
    """The mean of a sample's or token's numbers, in as many dimensions as the loss has."""
    loss, held = ops.shape(like), len(ops.shape(values))
    if not tokens or len(layer) < 3:
        return ops.widened(ops.mean(values, tuple(range(1, held))) if held > 1 else values, len(loss))
    axes = [axis for axis in range(1, held) if axis != (2 if len(layer) == 4 else 1)]
    values = ops.mean(values, tuple(axes)) if axes else values
    has = ops.shape(values)[1]
    if has is None or loss[1] is None or has == loss[1] + 1:  # a loss of the next tokens: the last has none
        values = ops.shortened(values, like)
    if not fits(ops.shape(values), loss):
        raise JobError([f"{where}: the layers have {has} tokens, the loss {shown(loss)}: choose layers of the tokens"])
    return values
