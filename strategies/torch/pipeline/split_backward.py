"""A backward in two halves, for zero-bubble orders: gradients of what a stage was given, then of its parameters.

torch's own functions halve it where each parameter's way to the outputs enters the way of what was given at one place,
as in rows of layers with residuals. Elsewhere they lose gradients without a word, so that it is asked beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from trainwright.strategies.torch.torch_compat import (
    backward_of_inputs,
    backward_of_parameters,
    graph_closure,
    graph_consumers,
    graph_node,
)

_COMPILED = "CompiledFunctionBackward"
Groups = list[dict[str, Any]]  # what the second half starts from


def halves(roots: Sequence[Tensor], given: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> bool:
    """Whether both halves together give all gradients of a graph."""
    ends = [each.grad_fn for each in roots if each.grad_fn is not None]
    consumers = graph_consumers(ends)
    if any(node.name() == _COMPILED for node in consumers):
        return False  # one node gives the gradients of inputs and of parameters
    on_the_way, _ = graph_closure([node for each in given if (node := graph_node(each))], set(), consumers)
    for parameter in parameters:
        node = graph_node(parameter)
        if node not in consumers:
            continue  # not of this graph
        beside, met = graph_closure([node], on_the_way, consumers)
        if len(met) != 1 or any(end in beside for end in ends):
            return False
    return True


def of_inputs(
    roots: Sequence[Tensor], slopes: Sequence[Tensor], given: Sequence[Tensor], parameters: Sequence[nn.Parameter]
) -> Groups:
    """The first half: adds to the gradients of what was given."""
    copies = [each.clone() for each in roots]  # torch detaches them in place, and what is kept for backward with them
    try:
        groups: Groups = backward_of_inputs(copies, slopes, given, parameters)
    except RuntimeError as error:
        raise (error.__cause__ or error) from None  # torch hides what the user's own code raised behind one of its own
    return groups


def of_parameters(groups: Groups, parameters: Sequence[nn.Parameter]) -> None:
    """The second half."""
    if groups:
        backward_of_parameters(parameters, groups)
