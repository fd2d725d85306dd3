"""Forward begins while parameters are still on their way: what uses one waits until it is there, layer by layer.

They come in the model's order. A module waits for what it holds before its own forward, and every function of torch for
what it is given: a forward may use what another module holds, and compiled extensions do not say what they use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.strategies.ps.client import Clients
from trainwright.strategies.torch.ps.server_shard import named
from trainwright.strategies.torch.ps.transfer import Incoming, Piece
from trainwright.strategies.torch.training.phase_timer import Laps

Arrived = Callable[[Tensor], None]


class Arrivals(TorchFunctionMode):
    """Waits for parameters and buffers that a pull without waiting brings.

    Args:
        model: of the worker.
        where: pieces of each tensor, by name.
        incoming: takes what has come.
        laps: counts the time that is waited.
    """

    def __init__(self, model: nn.Module, where: Mapping[str, Sequence[Piece]], incoming: Incoming, laps: Laps) -> None:
        super().__init__()
        self._model, self._incoming, self._laps = model, incoming, laps
        self._pieces = {id(tensor): (tensor, where[name]) for name, tensor in named(model)}
        self._away: dict[int, tuple[Tensor, Sequence[Piece]]] = {}
        self._clients: Clients | None = None
        self._arrived: Arrived = lambda tensor: None

    @property
    def sees(self) -> bool:
        """Whether every use can be seen: scripted code uses what it holds unseen."""
        return not any(isinstance(module, torch.jit.ScriptModule) for module in self._model.modules())

    def begin(self, clients: Clients, arrived: Arrived) -> None:
        """A pull is under way; `arrived` is told of each tensor once it is there, before anything uses it."""
        self._clients, self._arrived, self._away = clients, arrived, dict(self._pieces)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Code that runs the model; at its end all is there. Raises PeerLost."""
        with ExitStack() as stack:
            for module in self._model.modules():
                held = (*module._parameters.values(), *module._buffers.values())
                own = [tensor for tensor in held if tensor is not None and id(tensor) in self._pieces]
                if own:
                    hook = partial(self._before, own)
                    stack.callback(module.register_forward_pre_hook(hook, prepend=True).remove)
            stack.callback(self.finish)
            stack.enter_context(self)
            yield

    def finish(self) -> None:
        """Wait for all that nothing has used. Raises PeerLost."""
        self._need([tensor for tensor, _ in self._away.values()])

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for what a function is given."""
        kwargs = kwargs or {}
        if self._away:
            self._need(_tensors((args, kwargs)))
        return func(*args, **kwargs)

    def _before(self, own: Iterable[Tensor], module: nn.Module, given: Any) -> None:
        if self._away:
            self._need(own)

    def _need(self, tensors: Iterable[Tensor]) -> None:
        """Wait for these, where they have not come."""
        late = [found for tensor in tensors if (found := self._away.pop(id(tensor), None)) is not None]
        if not late:
            return
        assert self._clients is not None, "begin() comes first"
        self._laps.forward()
        for tensor, pieces in late:
            for piece in pieces:
                self._clients.pulled(piece.server, piece.slot.offset, piece.slot.size)
            self._incoming.take(pieces)
            self._arrived(tensor)
        self._laps.wait()


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        yield from _tensors(given.values())
    elif isinstance(given, (tuple, list, type({}.values()))):
        for each in given:
            yield from _tensors(each)
