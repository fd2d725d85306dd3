"""A model that is built without being in memory at once has the bits of one that is, whatever its code does."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainwright.strategies.torch.training.deferred_init import DeferredInit

WIDTH = 160  # a square of it is large enough to be released


def layers(count: int = 12) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def copied_layers() -> nn.Module:
    """Whose layers are deep copies of one."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(400, WIDTH, padding_idx=3), layers(), nn.Linear(WIDTH, 400))
    model[2].weight = model[0].weight
    return model


def by_hand() -> nn.Module:
    """Draws from several generators, seeds again, and changes rows, types and buffers."""
    torch.manual_seed(5)
    model = layers()
    own = torch.Generator().manual_seed(3)
    model.scaled = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.02)
    model.drawn = nn.Parameter(torch.empty(WIDTH, WIDTH).normal_(generator=own))
    model.again = nn.Parameter(torch.empty(WIDTH, WIDTH).normal_(generator=own))
    model.register_buffer("mask", torch.tril(torch.ones(WIDTH, WIDTH)))
    for number, init in enumerate((nn.init.trunc_normal_, nn.init.kaiming_normal_, nn.init.xavier_uniform_)):
        init(model[number].weight)
    model[3].weight.data = model[3].weight.data.to(torch.bfloat16).float()
    with torch.no_grad():
        model[4].weight[2:5].fill_(7.0)
        model[5].weight.copy_(model[4].weight.T)
        model[6].weight.add_(model[5].weight).clamp_(-1.0, 1.0)
    model.zeros = nn.Parameter(torch.zeros_like(model[0].weight))
    model.form = nn.Parameter(model[1].weight.new_ones(WIDTH, WIDTH))
    torch.set_default_dtype(torch.float64)
    try:
        model.wide = nn.Parameter(torch.rand(WIDTH, WIDTH))
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(9)
        model.forked = nn.Parameter(torch.rand(WIDTH, WIDTH))
    return model


def reading() -> nn.Module:
    """Decides by values, hands memory to NumPy, and computes what cannot be computed again."""
    model = layers()
    nn.init.orthogonal_(model[0].weight)
    seen = model[1].weight.detach().numpy()
    numbers = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype(np.float32)
    model.plain = model[2].weight.detach() * 2.0
    model.kept = [model[3].weight]
    with torch.no_grad():
        model[4].weight.copy_(torch.from_numpy(numbers))
        model[5].weight.div_(model[5].weight.norm())
        if model[6].weight[0, 0].item() < 2.0:
            model[6].weight.mul_(2.0)
        model[1].weight.mul_(float(seen.sum()))
    model.copied = copy.deepcopy(model.plain)
    return model


def ran_once() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(WIDTH), layers())
    model(torch.randn(2, WIDTH)).sum().backward()
    model.zero_grad()
    return model


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # here: every process that runs tests loads this module

    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "vocab_size": 400}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, num_attention_heads=4, **sizes))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # here: every process that runs tests loads this module

    ids = {"bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(n_embd=WIDTH, n_layer=3, n_head=4, vocab_size=400, n_positions=64, **ids))


def vit() -> nn.Module:
    """Whose weights are drawn from a truncated normal distribution, in several rounds."""
    from transformers import ViTConfig, ViTModel  # here: every process that runs tests loads this module

    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "image_size": 32, "patch_size": 16}
    return ViTModel(ViTConfig(num_hidden_layers=3, num_attention_heads=4, **sizes))


MODELS = [layers, copied_layers, tied, by_hand, reading, ran_once, llama, gpt2, vit]


def tensors(model: nn.Module) -> dict[str, Tensor]:
    plain = {key: value for key, value in vars(model).items() if isinstance(value, Tensor)}
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **plain}


def built(make: Callable[[], nn.Module], held_bytes: int) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a model, and the numbers that come after it."""
    torch.manual_seed(1)
    init = DeferredInit(held_bytes)
    with init.building():
        model = make()
        after = torch.rand(3)
        init.divide(model)
    return tensors(model), after


def released_bytes(model: nn.Module) -> int:
    """Bytes of parameters that are not in memory. Only within the building."""
    sizes = [(each.nbytes, storage_bytes(each)) for each in model.parameters()]
    return sum(size for size, held in sizes if not held)


def storage_bytes(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("held_bytes", [1, 1 << 40], ids=["few", "all"])
def test_a_model_has_the_bits_of_a_plain_build(make: Callable[[], nn.Module], held_bytes: int) -> None:
    torch.manual_seed(1)
    expected, after = tensors(make()), torch.rand(3)
    found, then = built(make, held_bytes)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    assert torch.equal(then, after)


@pytest.mark.parametrize("make", [layers, by_hand, llama, gpt2])
def test_few_large_tensors_are_in_memory_at_a_time(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    init = DeferredInit(1)
    with init.building():
        model = make()
        whole = sum(each.nbytes for each in model.parameters())
        largest = max(each.nbytes for each in model.parameters())
        small = sum(each.nbytes for each in model.parameters() if each.nbytes < 1 << 16)
        held = whole - released_bytes(model)
        init.divide(model)
        init.keep_new()
        half = [each.detach()[: len(each) // 2].clone() for each in model.parameters()]
        left = whole - released_bytes(model)
    assert held <= 4 * largest + small < whole and left <= largest + small
    torch.manual_seed(1)
    for found, value in zip(half, make().parameters(), strict=True):
        assert torch.equal(found, value[: len(value) // 2])


def test_what_files_give_is_not_computed() -> None:
    draws: list[int] = []

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            draws.append(func is torch.ops.aten.uniform_.default)
            return func(*args, **(kwargs or {}))

    init = DeferredInit(1)
    with Counted(), init.building():
        model = layers()
        drawn = sum(draws)
        init.divide(model, {name for name, _ in model.named_parameters()} - {"0.weight"})
    assert sum(draws) == drawn + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.manual_seed(2),
        lambda: nn.init.constant_(MODEL[0].weight, 1.0),
        lambda: MODEL[0].weight.data[0, :2].mul_(2.0),
        lambda: MODEL[0].weight.data.copy_(MODEL[1].weight.data),
        lambda: MODEL[0].weight.data.copy_(torch.from_numpy(np.ones((WIDTH, WIDTH), np.float32))),
        lambda: MODEL[0].bias.data.zero_(),
    ],
)
def test_the_digest_tells_models_apart_without_computing_them(change: Callable[[], object]) -> None:
    def digest(changed: bool) -> int:
        global MODEL
        torch.manual_seed(1)
        init = DeferredInit(1)
        with init.building():
            MODEL = layers(2)
            if changed:
                change()
            MODEL.append(nn.Linear(WIDTH, WIDTH, bias=False))
            return init.divide(MODEL)

    assert digest(False) == digest(False) != digest(True) == digest(True)


MODEL: nn.Sequential


def test_tensors_that_stay_in_memory_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def from_numpy() -> nn.Module:
        model = layers()
        for layer in model:
            layer.weight.data.copy_(torch.from_numpy(np.ones((WIDTH, WIDTH), np.float32)))
        return model

    with caplog.at_level(logging.WARNING):
        built(layers, 1)
        assert not caplog.records
        found, _ = built(from_numpy, 1)
    (line,) = caplog.messages
    assert "aten.copy_" in line and "initial_weights=" in line and found["0.weight"].min() == 1.0


def test_an_operation_that_raises_changes_nothing_else() -> None:
    def raising() -> nn.Module:
        model = layers()
        with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
            model[0].weight.copy_(torch.ones(3, 5))
        with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
            model[1].weight.add_(torch.ones(3, 5))
        return model

    torch.manual_seed(1)
    expected = tensors(layers())
    found, _ = built(raising, 1)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_an_error_of_the_model_leaves_tensors_with_their_values() -> None:
    left: list[nn.Module] = []

    def failing() -> nn.Module:
        left.append(layers())
        raise OSError("no disk")

    torch.manual_seed(1)
    expected = tensors(layers())
    with pytest.raises(OSError, match="no disk"):
        built(failing, 1)
    assert all(torch.equal(found, expected[name]) for name, found in tensors(left[0]).items())


def peak_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def test_the_peak_is_what_is_kept_and_one_layer() -> None:
    width, count = 1024, 64
    layer_bytes, kept = 4 * width * width, []
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = peak_bytes()
    init = DeferredInit(layer_bytes)
    with init.building():
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
        init.divide(model)
        init.keep_new()
        for layer in model:
            kept.append(layer.weight.detach()[: width // 8].clone())
            del layer.weight
    found = peak_bytes() - before
    assert found < count * layer_bytes // 8 + 12 * layer_bytes, f"{found:,} bytes for {count} layers of {layer_bytes:,}"
