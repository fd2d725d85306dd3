"""What a parameter server holds of a model: whole tensors, and rows of others, with the optimizer's state of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.plan import Plan
from trainwright.core.staleness import Outer
from trainwright.strategies.ps import tensor_placement
from trainwright.strategies.ps.shard_store import Kind, Shard
from trainwright.strategies.torch.checkpoint.shard_layout import Box, Part
from trainwright.strategies.torch.checkpoint.state import OUTER
from trainwright.strategies.torch.engines.sharded_model_engine import by_numbers
from trainwright.strategies.torch.training.train_state import Replica

Rows = tuple[int, int] | None  # of a tensor's first dimension, from and to; None for all of it


class Served(Replica):
    """A replica of which only what this server was dealt is left. It is never run.

    The job's optimizer is made for the whole model, so that its groups are the job's however many servers there are; it
    is then left with what was dealt.

    Args:
        spec: the job's functions.
        plan: says how the model is trained.
        where: the rank, for errors.
        part: of the servers, that this one is.

    Raises:
        JobError, UserCodeError: as a replica.
    """

    def __init__(self, spec: ModelSpec, plan: Plan, where: str, part: Part) -> None:
        super().__init__(spec, plan, torch.device("cpu"), where, part=part)
        self.scale = None  # each worker has its own: it is of what that computes
        self.outer = plan.local_steps > 1

    def keep(self, dealt: Mapping[str, Rows]) -> None:
        """Drop all but these parameters and persistent buffers, by full name; of a cut one all but its rows."""
        first = {tensor: name for name, tensor in named(self.model)}
        self._cut = {
            name: _box(tensor, rows)
            for name, tensor in self.model.named_parameters(remove_duplicate=False)
            if (rows := dealt.get(first[tensor])) is not None
        }
        for module in self.model.modules():
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    if tensor is not None and first.get(tensor, "") not in dealt:
                        held[key] = None
        for tensor, name in first.items():
            rows = dealt.get(name)
            if rows is not None:
                self._narrow(tensor, rows)
        self._drop({tensor for tensor, name in first.items() if name in dealt})

    def take_outer(self, differences: Sequence[Tensor], outer: Outer) -> None:
        """Change the parameters by what local steps came to in the mean, as `torch.optim.SGD` with Nesterov would."""
        self.sound = False
        with torch.no_grad():
            for parameter, difference in zip(self.trainable, differences, strict=True):
                parameter.add_(difference, alpha=outer.rate)
                if outer.momentum:
                    entries = self.optimizer.state[parameter]
                    momentum = entries.setdefault(OUTER, torch.zeros_like(parameter, requires_grad=False))
                    momentum.mul_(outer.momentum).add_(difference)
                    parameter.add_(momentum, alpha=outer.rate * outer.momentum)
        self.sound = True

    def _settled(self, model: nn.Module) -> Mapping[str, Box]:
        """In host memory, and never compiled."""
        return self._move(model)

    def _narrow(self, tensor: Tensor, rows: tuple[int, int]) -> None:
        """Leave some rows of a parameter, and of what the optimizer made for it when it was made."""
        whole = tensor.shape
        tensor.data = tensor.detach()[rows[0] : rows[1]].clone()
        for key, value in self.optimizer.state.get(tensor, {}).items():
            if isinstance(value, Tensor) and value.shape == whole:
                self.optimizer.state[tensor][key] = value[rows[0] : rows[1]].clone()

    def _drop(self, kept: set[Tensor]) -> None:
        """Train nothing but these."""
        self.trainable = [parameter for parameter in self.trainable if parameter in kept]
        self.names = {parameter: self.names[parameter] for parameter in self.trainable}
        for group in self.optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in kept]
        for parameter in [parameter for parameter in self.optimizer.state if parameter not in kept]:
            del self.optimizer.state[parameter]


def named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter and each persistent buffer once, by its first name, in the model's order: parameters first."""
    yield from model.named_parameters()
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def persistent(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Each persistent buffer wherever a module holds it: the module, its name there, and the buffer."""
    mine = {tensor for _, tensor in named(model)}
    places = [(module, key, held) for module in model.modules() for key, held in module._buffers.items()]
    return [(module, key, held) for module, key, held in places if held in mine and held is not None]


def shards(spec: ModelSpec, plan: Plan, model: nn.Module, where: str) -> tuple[Shard, ...]:
    """What each server holds of a model; an optimizer that looks at whole tensors is given whole ones.

    Raises:
        JobError: there are more servers than the model keeps busy.
    """
    whole = not by_numbers(spec)
    dealt = tensor_placement.deal([*_tensors(model)], plan.servers, cut=not whole)
    idle = sum(not shard.trained_bytes for shard in dealt)
    if idle:
        why = ": the optimizer does not work number by number, so that tensors cannot be cut" if whole else ""
        raise JobError(
            [f"{idle} of {plan.servers} servers would hold nothing to train{why}: use servers={plan.servers - idle}"],
            where=where,
        )
    return dealt


def _tensors(model: nn.Module) -> Iterator[tensor_placement.Tensor]:
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = {name for name, _ in model.named_parameters()} - trained
    for name, tensor in named(model):
        kind: Kind = "trained" if name in trained else "frozen" if name in frozen else "buffer"
        dtype = str(tensor.dtype).removeprefix("torch.")
        item = tensor.element_size()
        yield tensor_placement.Tensor(name=name, shape=tuple(tensor.shape), dtype=dtype, item_bytes=item, kind=kind)


def _box(tensor: Tensor, rows: tuple[int, int]) -> Box:
    """So many rows of a tensor."""
    whole = Box.all_of(tensor.shape)
    return Box(shape=whole.shape, start=(rows[0], *whole.start[1:]), stop=(rows[1], *whole.stop[1:]))
