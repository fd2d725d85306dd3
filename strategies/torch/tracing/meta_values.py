"""Values of meta tensors that follow from the inputs, such as masks and lengths that a model's flow depends on."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.strategies.torch.torch_compat import TorchDispatchMode, tree_flatten, tree_map

_log = logging.getLogger(__name__)
_INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
_LARGEST = 2**22  # elements of a tensor whose values are followed


class MetaValues:
    """Repeats on the CPU what a model computes from its inputs and constants alone, without its parameters.

    Masks, positions and lengths are such, and cheap; what depends on a parameter has no value, and a flow that asks for
    it stops the trace.

    Args:
        inputs: (on the meta device, with values) of each.

    Attributes:
        asked: the flow has asked for values.
    """

    def __init__(self, inputs: list[tuple[Tensor, Tensor]]) -> None:
        self._known: Any = WeakIdKeyDictionary()
        self.asked = False
        for meta, real in inputs:
            self._known[meta] = real.clone()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on the meta device, and on the values where all of them are known."""
        given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        known = all(each in self._known for each in given) and torch.Tag.nondeterministic_seeded not in func.tags
        if known and torch.Tag.data_dependent_output in func.tags:
            self.asked = True
            return self._real(func, args, kwargs)
        if known and torch.Tag.dynamic_output_shape in func.tags:
            return tree_map(self._meta, self._real(func, args, kwargs))
        if func._overloadpacket in _INDEXED:
            args = (args[0], self._places(args[1]), *args[2:])
        outputs = func(*args, **kwargs)
        made = [each for each in tree_flatten(outputs)[0] if isinstance(each, Tensor)]
        small = all(each.numel() <= _LARGEST for each in made)
        real = self._tried(func, args, kwargs) if known and made and small else None
        for number, each in enumerate(made):
            if real is None:
                self._known.pop(each, None)  # one that was known and was written to
            else:
                self._known[each] = real[number]
        return outputs

    def _tried(self, func: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
        """Return the values of an operation's outputs; None where the CPU cannot compute them."""
        try:
            found = self._real(func, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            _log.debug("the values that %s makes are not followed: %s", func, error)
            return None
        return [each for each in tree_flatten(found)[0] if isinstance(each, Tensor)]

    def _real(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*tree_map(self._value, args), **tree_map(self._value, kwargs))

    def _places(self, indices: Any) -> list[Any]:
        """Return where a mask with known values is true: the shape of the result depends on them."""
        places: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype == torch.bool and index in self._known:
                places += [self._meta(each) for each in self._known[index].nonzero(as_tuple=True)]
            else:
                places.append(index)
        return places

    def _meta(self, real: Any) -> Any:
        if not isinstance(real, Tensor):
            return real
        made = real.to("meta")
        self._known[made] = real
        return made

    def _value(self, each: Any) -> Any:
        if isinstance(each, Tensor):
            return self._known[each]
        return torch.device("cpu") if isinstance(each, torch.device) else each


class MetaValueMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what a model asks of meta tensors where that follows from constants and inputs.

    Args:
        inputs: as of `MetaValues`; none where a flow must be the same for all of them.
    """

    def __init__(self, inputs: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = MetaValues([*inputs])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._values.run(func, args, kwargs or {})
