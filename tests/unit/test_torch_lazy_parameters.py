"""Parameters that are on their way when forward begins: nothing is used before it is there, and the first not later."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.torch_engines import plan, spec
from trainwright.core.errors import PeerLost
from trainwright.strategies.torch.ps.parameter_worker import OverlappedPull, ParameterPull, tensor_pieces
from trainwright.strategies.torch.ps.shard_store import named_tensors, server_shards
from trainwright.strategies.torch.step_trace import PhaseTimer

GIVEN = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


class Wire:
    """Servers' regions, of which a range is there once it was asked for; until then it reads as NaN."""

    def __init__(self, sent: Sequence[Tensor], memory: Sequence[memoryview]) -> None:
        self.sent, self.memory, self.left = sent, memory, 1000
        self.asked: list[tuple[int, int]] = []

    def pulled(self, server: int, offset: int, size: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise PeerLost("rank 0 is gone")
        self.asked.append((server, offset))
        self.memory[server][offset : offset + size] = self.sent[server].numpy().data.cast("B")[offset : offset + size]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 9), nn.Linear(9, 9)
        self.norm = nn.BatchNorm1d(9)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(torch.tanh(self.first(x))))


class Reaching(nn.Module):
    """Uses what others hold, in functions and by attributes, a tied one, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(4, 9, bias=False)
        self.head = nn.Linear(4, 9)
        self.tied = nn.Linear(4, 9, bias=False)
        self.tied.weight = self.table.weight
        self.gain, self.idle = nn.Parameter(torch.ones(9)), nn.Parameter(torch.ones(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.linear(x, self.head.weight) * self.gain
        return hidden + self.tied(x) + torch.stack([self.head.bias, self.head.bias]).sum(0)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 5, num_layers=2, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x.unsqueeze(0))[0]


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated
            self.inner = torch.jit.script(nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def arriving(build: Callable[[], nn.Module], servers: int) -> tuple[nn.Module, nn.Module, OverlappedPull, Wire]:
    """A model as it is to be, the same with nothing of it there, and how that comes."""
    torch.manual_seed(1)
    job, how = spec(model=build), plan(servers=servers, consistency="sync")
    right, model = build(), build()
    dealt = server_shards(job, how, right, "")
    there, incoming = (ParameterPull(each, dealt, torch.device("cpu")) for each in (right, model))
    for place, tensor in there._copies.values():
        place.copy_(tensor)
    for _, tensor in named_tensors(model):
        if tensor.is_floating_point():
            tensor.detach().fill_(float("nan"))
    for each in incoming._bytes:
        each.fill_(255)  # NaN again
    wire = Wire([each.clone() for each in there._bytes], incoming.memory)
    return right, model, OverlappedPull(model, tensor_pieces(dealt), incoming, PhaseTimer(torch.device("cpu"))), wire


def taught(model: nn.Module) -> dict[str, Tensor]:
    model(GIVEN).square().sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {**gradients, **{name: each.clone() for name, each in model.named_buffers()}}


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("build", [Plain, Reaching, Recurrent])
def test_nothing_is_used_before_it_is_there(build: Callable[[], nn.Module], servers: int) -> None:
    right, model, arrivals, wire = arriving(build, servers)
    expected = taught(right)
    began: list[Tensor] = []
    arrivals.begin(wire, began.append)  # type: ignore[arg-type]
    with arrivals.waiting():
        found = taught(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)
    assert {id(each) for each in began} == {id(each) for _, each in named_tensors(model)} and len(began) == len(
        {*map(id, began)}
    )
    assert sorted(wire.asked) == sorted({*wire.asked}), "each piece once"
    for name, value in right.named_parameters():
        assert torch.equal(model.get_parameter(name), value), "what was never used is there at the end too"
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_first_layer_runs_before_the_second_is_there() -> None:
    _, model, arrivals, wire = arriving(Plain, 1)
    counts: list[int] = []
    handle = model.get_submodule("first").register_forward_hook(lambda *_: counts.append(len(wire.asked)))
    arrivals.begin(wire, lambda tensor: None)  # type: ignore[arg-type]
    with arrivals.waiting():
        model(GIVEN)
        counts.append(len(wire.asked))
    handle.remove()
    assert counts == [2, len([*named_tensors(model)])], "weight and bias of the first, then all"


def test_what_is_told_of_a_tensor_comes_before_it_changes() -> None:
    right, model, arrivals, wire = arriving(Plain, 1)
    pulled: dict[int, Tensor] = {}
    arrivals.begin(wire, lambda tensor: pulled.update({id(tensor): tensor.detach().clone()}))  # type: ignore[arg-type]
    with arrivals.waiting():
        model(GIVEN)
    for name, buffer in right.named_buffers():
        assert torch.equal(pulled[id(model.get_buffer(name))], buffer)
        assert not torch.equal(model.get_buffer(name), buffer)


def test_a_lost_server_ends_the_forward_and_leaves_no_hook() -> None:
    _, model, arrivals, wire = arriving(Plain, 1)
    wire.left = 3
    arrivals.begin(wire, lambda tensor: None)  # type: ignore[arg-type]
    with pytest.raises(PeerLost), arrivals.waiting():
        model(GIVEN)
    assert not any(module._forward_pre_hooks for module in model.modules())
    torch.ones(2) + 1  # no mode is left either
    assert len(wire.asked) == 3


def test_scripted_code_is_not_trusted() -> None:
    assert arriving(Plain, 1)[2].sees and not arriving(Scripted, 1)[2].sees
