"""Checkpoints without frozen parameters (`save_frozen=False`): an adapter on a base that `model()` makes again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.planner_cases import decide
from tests.support.torch_engines import Files, feed, one_device, saved, spec
from trainwright.core.data import fold_seed
from trainwright.core.errors import CheckpointError, PlanError
from trainwright.strategies.torch.checkpoint.initial_weights import stream_safetensors
from trainwright.strategies.torch.checkpoint.safetensors_files import take_weights


class Adapted(nn.Module):
    """A base that stays as it is, tied in two places, and a low-rank adapter, as in LoRA."""

    def __init__(self, seed: int = 5) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base = nn.Linear(4, 4)
        with torch.no_grad():
            for parameter in self.base.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator)).requires_grad_(False)
        self.again = self.base
        self.down, self.up, self.head = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False), nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return self.head(torch.tanh(self.again(self.base(x) + self.up(self.down(x)))))


def other_base() -> nn.Module:
    return Adapted(seed=6)


def trained(job: Any, first: int = 0, last: int = 6, engine: Any = None) -> Any:
    engine = engine or one_device(job)
    for step in range(first, last):
        engine.train_step(feed(step=step))
    return engine


LIGHT = spec(model=Adapted, save_frozen=False)


def arrays(files: Files) -> dict[str, torch.Tensor]:
    return dict(stream_safetensors([memoryview(files.files["model.safetensors"])]))


def test_a_checkpoint_holds_the_adapter_and_goes_on_bit_by_bit() -> None:
    unbroken, whole = trained(LIGHT), saved(trained(spec(model=Adapted)))
    light = saved(unbroken)
    frozen = {"base.weight", "base.bias", "again.weight", "again.bias"}
    assert arrays(light).keys() == arrays(whole).keys() - frozen
    assert all(torch.equal(value, arrays(whole)[name]) for name, value in arrays(light).items())
    assert unbroken.snapshot().size_bytes < trained(spec(model=Adapted)).snapshot().size_bytes
    stopped = trained(LIGHT, last=3)
    for resumed in (one_device(LIGHT), one_device(LIGHT)):
        resumed.load(saved(stopped))
        assert saved(trained(LIGHT, 3, 6, resumed)).files == light.files
    restored = one_device(LIGHT)
    restored.restore(stopped.snapshot())
    assert saved(trained(LIGHT, 3, 6, restored)).files == light.files


def test_another_base_is_refused() -> None:
    files = saved(trained(LIGHT))
    with pytest.raises(CheckpointError, match=r"frozen parameters: [0-9a-f]{16} when it was trained, [0-9a-f]{16} as"):
        one_device(replace(LIGHT, model=other_base)).load(files)
    with pytest.raises(CheckpointError, match=r"let model.. make the parameters that it made"):
        take_weights(other_base(), files)


def test_a_checkpoint_that_holds_them_and_one_that_does_not_are_told_apart() -> None:
    light, whole = saved(trained(LIGHT)), saved(trained(spec(model=Adapted)))
    assert "base" not in json.loads(whole.files["state.json"])
    with pytest.raises(CheckpointError, match="does not hold the frozen parameters: set save_frozen=False"):
        one_device(spec(model=Adapted)).load(light)
    with pytest.raises(CheckpointError, match="holds the frozen parameters: set save_frozen=True"):
        one_device(LIGHT).load(whole)


def test_its_weights_are_loaded_into_a_model() -> None:
    engine, model = trained(LIGHT), Adapted()
    take_weights(model, saved(engine))
    for name, value in engine.replica.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_parameter_servers_refuse_it() -> None:
    with pytest.raises(PlanError, match="its servers do not have save_frozen=False"):
        decide(save_frozen=False, strategy="parameter_server", workers=2)


def with_lora() -> nn.Module:
    """A network of peft's, whose base is the same in each process."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(5)
        base = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return get_peft_model(base, LoraConfig(r=2, target_modules=["0", "2"]))


def test_lora_of_peft_is_a_plain_loop_and_its_checkpoint_holds_the_adapter() -> None:
    light, losses = spec(model=with_lora, save_frozen=False), list[float]()
    torch.manual_seed(fold_seed(light.seed, -1))
    plain = with_lora()
    optimizer = light.optimizer([parameter for parameter in plain.parameters() if parameter.requires_grad])
    for step in range(6):
        columns = feed(step=step).parts[0][0].columns
        optimizer.zero_grad()
        found = nn.functional.cross_entropy(plain(torch.from_numpy(columns["x"])), torch.from_numpy(columns["y"]))
        found.backward()
        optimizer.step()
        losses.append(found.item())
    engine = one_device(light)
    assert [engine.train_step(feed(step=step)).loss for step in range(6)] == pytest.approx(losses, rel=1e-6)
    adapter = {name: value for name, value in plain.state_dict().items() if "lora_" in name}
    held = arrays(saved(engine))
    assert held.keys() == adapter.keys() and len(held) == 4
    for name, value in adapter.items():
        torch.testing.assert_close(held[name], value)
    resumed = one_device(light)
    resumed.load(saved(trained(light, last=3)))
    assert saved(trained(light, 3, 6, resumed)).files == saved(engine).files
