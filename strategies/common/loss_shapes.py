"""The shapes that a loss or metric is given and returns, without a framework."""

from __future__ import annotations

from collections.abc import Sequence

Shape = Sequence[int]


def broadcast_problem(what: str, outputs: Shape, targets: Shape, values: Shape) -> str:
    """Say why the values are no loss of each sample: outputs and targets were broadcast against each other.

    Outputs (n, 1) minus targets (n,) is (n, n): each sample's output is compared with every sample's target. NumPy,
    torch and TensorFlow compute that without an error.

    Args:
        what: names the function, such as `loss=` or `metric 'mae'`.
        outputs, targets: shapes of what the function was given.
        values: shape of what it returned, before any mean.

    Returns:
        The problem with both shapes and the remedy; empty where there is none.
    """
    given, wanted, made = tuple(outputs), tuple(targets), tuple(values)
    if len(given) == len(wanted) or made in (given, wanted) or made != _broadcast(given, wanted):
        return ""
    longer, shape = max(("outputs", given), ("targets", wanted), key=lambda each: len(each[1]))
    return (
        f"{what} broadcasts outputs of shape {given} and targets of shape {wanted} to {made}, so that each sample is "
        f"compared with every other: give both one shape{f', such as {longer}[..., 0]' if shape[-1] == 1 else ''}"
    )


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that two arrays are broadcast to, by NumPy's rule; None where they are not."""
    rank = max(len(first), len(second))
    pairs = zip((1,) * (rank - len(first)) + first, (1,) * (rank - len(second)) + second, strict=True)
    sizes = [{one, other} - {1} or {1} for one, other in pairs]
    return tuple(size for (size,) in sizes) if all(len(each) == 1 for each in sizes) else None
