"""A backward in halves gives what a whole one gives, or is not halved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trainwright.strategies.torch.torch_compat import backward_of_inputs, backward_of_parameters, can_split_backward

Stage = Callable[[nn.ModuleList, list[Tensor]], list[Tensor]]
ROW: Stage = lambda layers, given: [layers[1](torch.relu(layers[0](given[0])))]  # noqa: E731
RESIDUAL: Stage = lambda layers, given: [given[0] + layers[1](torch.relu(layers[0](given[0])))]  # noqa: E731
NORMED: Stage = lambda layers, given: [layers[1](layers[2](layers[0](given[0])) + given[1])]  # noqa: E731
BESIDE: Stage = lambda layers, given: [layers[0](given[0]), layers[1](torch.ones(2, 3))]  # noqa: E731
PASSED_ON: Stage = lambda layers, given: [given[0], layers[1](given[0].detach())]  # noqa: E731
TWICE: Stage = lambda layers, given: [layers[0](torch.relu(layers[0](given[0])))]  # noqa: E731
LEAVING: Stage = lambda layers, given: [inner := layers[0](given[0]), layers[1](inner)]  # noqa: E731


UNUSED: Stage = lambda layers, given: [layers[0](given[1])]  # noqa: E731


def graph(stage: Stage) -> tuple[nn.ModuleList, list[Tensor], list[Tensor], list[Tensor]]:
    """Layers, what they are given, what they make, and its gradients."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.LayerNorm(3)])
    given = [torch.randn(2, 3, requires_grad=True) for _ in range(1 + (stage in (NORMED, UNUSED)))]
    roots = stage(layers, given)
    return layers, given, roots, [torch.randn_like(root) for root in roots]


def slopes_of(layers: nn.ModuleList, given: list[Tensor]) -> list[Tensor | None]:
    return [each.grad for each in (*layers.parameters(), *given)]


@pytest.mark.parametrize(
    ("stage", "halved"),
    [
        (ROW, True), (RESIDUAL, True), (NORMED, True), (LEAVING, True), (BESIDE, False), (PASSED_ON, False),
        (TWICE, False), (UNUSED, False),
    ],
    ids=["row", "residual", "normed", "leaving", "beside", "passed on", "twice", "unused"],
)  # fmt: skip
def test_halves_are_a_whole(stage: Stage, halved: bool) -> None:
    layers, given, roots, slopes = graph(stage)
    torch.autograd.backward(roots, slopes)
    expected = slopes_of(layers, given)
    layers, given, roots, slopes = graph(stage)
    parameters = [*layers.parameters()]
    assert can_split_backward(roots, given, parameters) is halved
    if halved:
        groups = backward_of_inputs(roots, slopes, given, parameters)
        assert all(parameter.grad is None for parameter in parameters)
        backward_of_parameters(parameters, groups)
        for found, wanted in zip(slopes_of(layers, given), expected, strict=True):
            assert (found is None and wanted is None) or torch.allclose(found, wanted)  # type: ignore[arg-type]


class Torn(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: object, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: object, *slopes: Tensor) -> Tensor:
        raise ZeroDivisionError("torn on purpose")


def test_what_the_users_code_raises_is_not_hidden_behind_torchs() -> None:
    layers, given, roots, slopes = graph(lambda layers, given: [Torn.apply(layers[0](given[0]))])
    with pytest.raises(ZeroDivisionError, match="torn on purpose"):
        backward_of_inputs(roots, slopes, given[:1], [*layers[0].parameters()])
