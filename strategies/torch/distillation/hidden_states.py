"""What layers inside a model give, heard of by hooks while its forward runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from trainwright.core.errors import JobError, nearest
from trainwright.strategies.distillation.layer_projection import item_of, layer_item


class Taps:
    """Of each layer what its last call in a forward gave. What backward computes again is not heard of.

    Args:
        layers: name -> the model, and the layer in it, as in `Match`.

    Raises:
        JobError: a model has no such layer.
    """

    def __init__(self, layers: Mapping[str, tuple[nn.Module, str]]) -> None:
        self._items: dict[str, str] = {}
        self._found: dict[str, Any] = {}
        self._open = False
        for name, (model, layer) in layers.items():
            path, self._items[name] = layer_item(layer)
            try:
                module = model.get_submodule(path)
            except AttributeError:
                known = [each for each, _ in model.named_modules() if each]
                raise JobError([f"the model has no layer {path!r}: {nearest(path, known)}"]) from None
            module.register_forward_hook(partial(_hear, self, name))

    def begin(self) -> None:
        """A forward begins."""
        self._found = {}
        self._open = True

    def take(self) -> dict[str, Tensor]:
        """What was heard, by name; a forward is over. Raises JobError for a layer that did not run."""
        found, self._found, self._open = self._found, {}, False
        return {name: item_of(found, name, item, _is_tensor) for name, item in self._items.items()}

    def hear(self, name: str, output: Any) -> None:
        """A layer was called."""
        if self._open:
            self._found[name] = output


def _hear(taps: Taps, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
    taps.hear(name, output)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
