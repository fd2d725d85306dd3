"""The ranks of a tensor-parallel group: their collectives, and what the layers of one rank share.

Layers and sharded tensors communicate through `TensorParallelGroup` alone. The planner and the tests replace its
collectives by their own, to run a rank without the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed

from trainwright.core.data import fold_seed
from trainwright.strategies.torch.distributed.process_group import reduce_scatter
from trainwright.strategies.torch.shard_layout import ShardSlice
from trainwright.strategies.torch.torch_compat import generator_of

_InputKey = tuple[Callable[..., Any], int, bool]


@dataclass(kw_only=True)
class TensorParallelGroup:
    """The ranks that hold each layer together."""

    index: int  # this rank's number in the group
    size: int  # number of ranks
    process_group: distributed.ProcessGroup | None = None  # in which they communicate; replaced after each rendezvous
    sequence: bool = False  # between divided layers each rank holds a part of the tokens, in training
    _saved_rng: list[tuple[torch.device, Tensor]] | None = None
    _shared_inputs: dict[_InputKey, tuple[Tensor, int, Any]] = field(default_factory=dict)  # an input, its version then

    def own_range(self, width: int) -> tuple[int, int]:
        """Return start and length of this rank's part of so many numbers."""
        box = ShardSlice.share((width,), 0, self.index, self.size)
        return box.start[0], box.count

    def once(self, make: Callable[[Tensor, TensorParallelGroup], Any], tensor: Tensor) -> Any:
        """Return what `make` gives for a tensor; layers given the same, unchanged tensor share the result.

        Results with and without a graph are separate. They are kept until `clear_shared_inputs`.
        """
        key = make, id(tensor), torch.is_grad_enabled()
        _, version, made = self._shared_inputs.get(key, (None, -1, None))
        if version != tensor._version:
            made = make(tensor, self)
            self._shared_inputs[key] = tensor, tensor._version, made
        return made

    def clear_shared_inputs(self) -> None:
        """Forget the results of `once`: no later layer asks for them."""
        self._shared_inputs.clear()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        total = tensor.contiguous().clone()
        distributed.all_reduce(total, group=self.process_group)
        return total

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks."""
        top = tensor.contiguous().clone()
        distributed.all_reduce(top, distributed.ReduceOp.MAX, group=self.process_group)
        return top

    def all_gather(self, tensor: Tensor, width: int, dim: int = -1) -> Tensor:
        """Return the ranks' parts joined along a dimension.

        Args:
            width: size of the result along `dim`; parts may be of unequal sizes.
        """
        own = _padded(tensor, -(-width // self.size), dim).contiguous()
        pieces = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(pieces, own, group=self.process_group)
        return torch.cat(pieces, dim=dim).narrow(dim, 0, width)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part, along a dimension, of the sum over the ranks."""
        width = tensor.shape[dim]
        each = -(-width // self.size)
        whole = _padded(tensor, each * self.size, dim).movedim(dim, 0).contiguous()
        own = whole.new_empty((each, *whole.shape[1:]))
        reduce_scatter(own, whole, self.process_group)
        return own[: self.own_range(width)[1]].movedim(0, dim)

    def before_gather(self, func: Any) -> None:
        """Called when an operation without a rule is about to gather a sharded tensor; subclasses record it."""

    def fork_rng(self, device: torch.device) -> None:
        """Let each rank draw random numbers of its own, for values that no other rank has, until `restore_rng`."""
        devices = [torch.device("cpu"), *([device] if device.type == "cuda" else [])]
        seed = int(torch.randint(2**62, ()))
        self._saved_rng = [(one, generator_of(one).get_state()) for one in devices]
        for one, _ in self._saved_rng:
            generator_of(one).manual_seed(fold_seed(seed, self.index))

    def restore_rng(self) -> None:
        """Let all ranks draw the same random numbers again."""
        for device, state in self._saved_rng or ():
            generator_of(device).set_state(state)
        self._saved_rng = None


def _padded(tensor: Tensor, width: int, dim: int) -> Tensor:
    """Return the tensor with zeros appended up to a width along a dimension."""
    shape = [*tensor.shape]
    shape[dim] = width - shape[dim]
    return torch.cat((tensor, tensor.new_zeros(shape)), dim=dim) if shape[dim] else tensor
