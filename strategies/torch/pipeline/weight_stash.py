"""Two versions of a stage's weights, of a pipeline that does not drain (PipeDream-2BW; Narayanan et al., 2021a).

With W(k) the weights after k steps, step k, counted from 0, takes its gradient at W(k - 1), the first step at W(0):
W(k + 1) = W(k) + update(gradient of step k at W(k - 1)). So the next step's forwards, which use W(k), may begin while
backwards of step k are under way, which use W(k - 1). The rule is the same on every stage, and nothing in it depends on
time: that a pipeline drains, or that what was begun of a step is dropped and done again, changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import Tensor, nn

from trainwright.strategies.torch.torch_compat import copy, preserve_version_counter


class Versions:
    """The parameters hold the newest weights; while a step's own micro-batches are run, those before.

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
        """A step is complete: the newest weights become those before, and the parameters a copy of them, to update."""
        copy([*self._other.values()], [each.detach() for each in self._other])
        self._swap()
        self._swapped = False

    def updating(self) -> AbstractContextManager[None]:
        """Within, the optimizer changes what no graph has kept, though it changes parameters that graphs know."""
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
