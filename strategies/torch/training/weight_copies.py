"""Copies of a replica's weights beside its parameters: those before the last step, and their average."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from trainwright.core.weight_average import WeightAverage
from trainwright.strategies.torch.shard_layout import to_local
from trainwright.strategies.torch.torch_compat import foreach_copy, preserve_version_counter


class WeightStash:
    """Keeps the weights before the last step; a step's own micro-batches run with them (PipeDream-2BW).

    A parameter stays the same object with another memory behind it, so that optimizer, names, hooks and ties need not
    know. What autograd has kept of a forward is then the parameter, whose memory must be that of the forward when its
    backward runs; views of it keep theirs. That no memory changes between the two is what `turn` is for: it copies into
    the one that no micro-batch uses any more.

    Args:
        parameters: those that are trained.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._other: dict[nn.Parameter, Tensor] = {each: each.detach().clone() for each in parameters}
        self._swapped = False

    def use(self, *, before: bool) -> None:
        """Let the parameters hold the weights before the last step, or the newest."""
        if before != self._swapped:
            self._swap()

    def turn(self) -> None:
        """End a step: the newest weights become the earlier ones, and the parameters a copy to update."""
        foreach_copy([*self._other.values()], [each.detach() for each in self._other])
        self._swap()
        self._swapped = False

    def updating(self) -> AbstractContextManager[None]:
        """Return a context for updates in place that autograd must not count: no graph uses the changed memory."""
        return preserve_version_counter(self._other)

    @property
    def before(self) -> dict[nn.Parameter, Tensor]:
        """The weights before the last step, in their own memory."""
        assert not self._swapped, "asked for between steps"
        return dict(self._other)

    def _swap(self) -> None:
        for parameter, other in self._other.items():
            self._other[parameter] = parameter.data
            parameter.data = other
        self._swapped = not self._swapped


class AveragedWeights:
    """Averages of the parts of parameters that this rank holds.

    Args:
        average: how it is made.
        epoch_steps: steps of an epoch.
        parameters: that are trained.
    """

    def __init__(self, average: WeightAverage, epoch_steps: int, parameters: Sequence[nn.Parameter]) -> None:
        self._average, self._epoch_steps = average, epoch_steps
        self._tensors = {parameter: parameter.detach().clone() for parameter in parameters}

    def held(self, step: int | None) -> dict[nn.Parameter, Tensor]:
        """Return the average of each parameter after `step` completed steps; none before the average begins."""
        return self._tensors if self._average.begun(step or 0, self._epoch_steps) else {}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the parameters after `step` completed steps."""
        share = self._average.share(step, self._epoch_steps)
        if share:
            for parameter, mean in self._tensors.items():
                to_local(mean).lerp_(to_local(parameter.detach()), share)

    @contextmanager
    def in_place(self, step: int | None) -> Iterator[None]:
        """Let the parameters hold their averages, in their own memory, where other modules look for them."""
        held = self.held(step)
        kept = {parameter: to_local(parameter.detach()).clone() for parameter in held}
        try:
            for parameter, mean in held.items():
                to_local(parameter.detach()).copy_(to_local(mean))
            yield
        finally:
            for parameter, value in kept.items():
                to_local(parameter.detach()).copy_(value)
