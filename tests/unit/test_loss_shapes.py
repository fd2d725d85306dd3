"""Outputs and targets that a loss broadcasts against each other."""

from __future__ import annotations

import pytest

from trainwright.strategies.common.user_code_errors import Shape, loss_broadcast_problem


@pytest.mark.parametrize(
    ("outputs", "targets", "values"),
    [((8, 1), (8,), (8, 8)), ((8,), (8, 1), (8, 8)), ((8, 8, 1), (8, 8), (8, 8, 8))],
)
def test_a_loss_of_all_pairs_is_named_with_both_shapes_and_the_remedy(
    outputs: Shape, targets: Shape, values: Shape
) -> None:
    problem = loss_broadcast_problem("loss=", outputs, targets, values)
    assert f"outputs of shape {outputs} and targets of shape {targets} to {values}" in problem
    assert problem.endswith(f"one shape, such as {'outputs' if len(outputs) > len(targets) else 'targets'}[..., 0]")


@pytest.mark.parametrize(
    ("outputs", "targets", "values"),
    [
        ((8, 1), (8,), (8,)),  # the loss takes the column out itself
        ((8, 1), (8, 1), (8, 1)),
        ((8, 10), (8,), (8,)),  # classes
        ((8, 8), (8,), (8, 8)),  # one-hot targets made in the loss, of as many classes as rows
        ((8, 1, 3), (8, 5, 3), (8, 5, 3)),  # of one rank: meant
        ((1, 1), (1,), (1, 1)),
        ((8, 2), (8,), (8, 8)),
    ],
)
def test_other_shapes_are_let_be(outputs: Shape, targets: Shape, values: Shape) -> None:
    assert loss_broadcast_problem("loss=", outputs, targets, values) == ""
