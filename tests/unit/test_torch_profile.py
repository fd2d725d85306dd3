"""What a transformer of a billion parameters costs, found without its memory."""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from tests.support.torch_profile import profile_model
from trainwright.core.model_profile import LayerCost, ModelProfile
from trainwright.strategies.cost_model.machine_model import MachineModel
from trainwright.strategies.search.plan_ranking import stage_sizes
from trainwright.strategies.torch import profiling

WIDTH, LAYERS, HEADS, TOKENS, WORDS = 2048, 24, 16, 512, 50_257


def total(profile: ModelProfile, name: str) -> float:
    return sum(getattr(layer, name) for layer in profile.layers)


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        split = self.qkv(self.norms[0](x)).view(rows, tokens, 3, HEADS, width // HEADS)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.mlp(self.norms[1](x))


class Apart(Block):
    """One whose queries, keys and values tensor parallelism can divide, and whose heads it counts itself."""

    def __init__(self) -> None:
        super().__init__()
        del self.qkv
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        queries, keys, values = (
            each(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        seen = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """An embedding, blocks, and logits tied to it."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.logits.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def test_a_billion_parameters_take_seconds_and_no_memory() -> None:
    begun, before_kib = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    profile = profile_model(Transformer, {"tokens": np.zeros((1, TOKENS), np.int64)}, ("tokens",))
    assert time.process_time() - begun < 15
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 10**6
    known = tw.transformer_profile(
        hidden=WIDTH, layers=LAYERS, heads=HEADS, sequence=TOKENS, vocabulary=WORDS, fused_attention=True
    )
    assert profile.parameters == pytest.approx(known.parameters, rel=0.002) and profile.parameters > 1.2e9
    assert profile.flops == pytest.approx(known.flops, rel=0.01)
    assert total(profile, "matmuls") == total(known, "matmuls")
    assert (profile.heads, profile.tokens) == (HEADS, TOKENS)
    dropped = LAYERS * TOKENS * WIDTH  # the masks of the dropout that `known` has, of a byte each
    assert total(profile, "kept_numbers") == pytest.approx(total(known, "kept_numbers") - dropped, rel=0.02)
    assert not total(profile, "scores_numbers")
    assert len(set(profile.layers)) < 12 < LAYERS * 7 < len(profile.layers), "blocks that are alike are collapsed"
    step = [
        tw.estimate(one, tw.Cluster.parse("8xA100-80GB"), tw.Plan.parse("dp=8"), batch_size=64, precision="bf16").step_s
        for one in (profile, known)
    ]
    assert step[0] == pytest.approx(step[1], rel=0.10)
    assert torch.is_grad_enabled()


class Attention(nn.Module):
    """One block's attention, with as many heads for keys and values as are given."""

    def __init__(self, heads: int = 8, key_heads: int = 8, explicit: bool = False) -> None:
        super().__init__()
        self.heads, self.key_heads, self.explicit = heads, key_heads, explicit
        self.query, self.key = nn.Linear(256, 256), nn.Linear(256, 32 * key_heads)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        query = self.query(x).view(rows, tokens, self.heads, 32).transpose(1, 2)
        key = self.key(x).view(rows, tokens, self.key_heads, 32).transpose(1, 2)
        if not self.explicit:
            seen = nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=self.heads > self.key_heads)
        else:
            scores = (query @ key.transpose(-1, -2)).masked_fill(torch.ones(tokens, tokens, device=x.device) > 1, -1e9)
            seen = self.dropout(scores.softmax(-1)) @ key
        return seen.transpose(1, 2).reshape(rows, tokens, 256)


def attention_of(module: nn.Module, rows: int = 2, tokens: int = 128) -> tuple[ModelProfile, LayerCost]:
    """The profile, and its layer that attends."""
    profile = profile_model(module, {"x": np.zeros((rows, tokens, 256), np.float32)}, ("x",))
    assert not profile.untraced
    return profile, next(layer for layer in profile.layers if layer.matmuls > 1)


def test_fused_attention_keeps_and_writes_no_scores_and_its_operations_are_told_apart() -> None:
    whole, attention = attention_of(Attention())
    assert (attention.matmuls, attention.launches, attention.traffic_numbers) == (2, 1, 0)
    assert attention.flops == attention.fused_flops == 4 * 128 * 128 * 256 and attention.scores_numbers == 0
    inputs_and_output = 3 * 128 * 256  # keys are values too
    assert attention.kept_numbers == inputs_and_output + 128 * 8
    grouped, fewer = attention_of(Attention(key_heads=2))
    assert fewer.flops == attention.flops and fewer.kept_numbers < attention.kept_numbers
    assert (whole.heads, whole.tokens, grouped.heads) == (8, 128, 2)


def test_scores_that_are_written_are_told_from_the_rest() -> None:
    profile, attention = attention_of(Attention(explicit=True))
    scores = total(profile, "scores_numbers")
    assert scores == 2.5 * 8 * 128**2  # softmax's, dropout's and its mask: Korthikanti et al. (2022)
    assert attention.flops == 4 * 128 * 128 * 256 and (profile.heads, profile.tokens) == (8, 128)
    assert attention.kept_numbers < scores / 2 < attention.traffic_numbers
    plan = tw.Plan.parse("recompute=selective")
    node = tw.Cluster.parse("1xA100-80GB")
    deep = replace(profile, layers=profile.layers * 5)  # the scores of the one that is made again are there
    none, selective = (
        tw.estimate(deep, node, replace(plan, recompute=name), batch_size=64, precision="bf16").stage_memory_bytes[0]
        for name in ("none", "selective")
    )
    assert 4 < (none - selective) / (64 * 2 * scores) < 5


def test_probabilities_of_classes_are_no_scores() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(256, 4), nn.Parameter(torch.zeros(4, 256, 256))

        def forward(self, x: Tensor) -> Tensor:
            chosen = self.router(x).softmax(-1)
            return torch.einsum("bte,btef->btf", chosen, torch.einsum("btd,edf->btef", x, self.experts))

    profile = profile_model(Routed(), {"x": np.zeros((2, 16, 256), np.float32)}, ("x",))
    assert not profile.untraced and not total(profile, "scores_numbers") and not profile.heads


@pytest.mark.parametrize("weights", [False, True])
def test_torchs_own_attention(weights: bool) -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, x, x, need_weights=weights)[0]

    profile, attention = attention_of(Own(256, 8, dropout=0.1, batch_first=True))
    assert profile.heads == 8 and attention.matmuls == 4
    assert total(profile, "scores_numbers") == (2.5 * 8 * 128**2 if weights else 0)


def test_an_encoder_layer_is_traced_as_it_trains() -> None:
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.1, batch_first=True)
    profile = profile_model(layer, {"x": np.zeros((1, 128, 256), np.float32)}, ("x",))
    block = tw.transformer_profile(
        hidden=256, layers=1, heads=8, sequence=128, vocabulary=1, fused_attention=True
    ).layers[1]
    assert not profile.untraced and profile.flops == block.flops and profile.heads == 8
    relu_keeps_its_output = 4
    kept = total(profile, "kept_numbers") / 128 / 256 + 0.5 * relu_keeps_its_output
    assert kept == pytest.approx(17, abs=2.6)  # and the mask of the dropout inside the MLP


def test_masks_and_lengths_that_the_flow_asks_for_are_known() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Embedding(9, 64), nn.Linear(64, 64)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            x = self.inner(ids)
            if not bool((mask == 1).all()):
                x = x[mask.bool()]  # as many tokens as there are
            return self.outer(x)

    sample = {"ids": np.zeros((1, 8), np.int64), "mask": np.ones((1, 8), np.int64)}
    full = profile_model(Padded, sample, ("ids", "mask"))
    sample["mask"][:, 6:] = 0
    some = profile_model(Padded, sample, ("ids", "mask"))
    assert not full.untraced and not some.untraced
    assert (full.flops, some.flops) == (2.0 * 8 * 64 * 64, 2.0 * 6 * 64 * 64)


def test_a_trained_parameter_of_16_bits_is_named() -> None:
    model = nn.Sequential(nn.Linear(256, 256).requires_grad_(False), nn.Linear(256, 2)).bfloat16()
    sample = {"x": np.zeros((2, 256), np.float32)}
    assert profile_model(model, sample, ("x",)).narrow == "1.weight"
    assert profile_model(nn.Linear(256, 2), sample, ("x",)).narrow == ""


def test_a_model_that_cannot_be_traced_has_plans_that_need_no_more_than_its_parameters() -> None:
    class Asking(Transformer):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) if self.norm.weight.sum() > 0 else tokens

    profile = profile_model(Asking, {"tokens": np.zeros((1, TOKENS), np.int64)}, ("tokens",))
    assert "item()" in profile.untraced and not total(profile, "kept_numbers")
    known = tw.transformer_profile(hidden=WIDTH, layers=LAYERS, heads=HEADS, sequence=TOKENS, vocabulary=WORDS)
    assert profile.flops == pytest.approx(known.flops, rel=0.15), "each parameter meets each token"
    plans = tw.rank(profile, tw.Cluster.parse("8xA100-80GB"), batch_size=64, precision="bf16")
    strategies = {plan.strategy for plan in plans}
    assert {"one_device", "data_parallel", "sharded", "parameter_server"} == strategies


def split_layers(module: nn.Module, name: str = "x") -> tuple[ModelProfile, set[str]]:
    """The profile, and the names of the layers that tensor parallelism divides."""
    profile = profile_model(module, {name: np.zeros((2, 64, 256), np.float32)}, (name,))
    assert not profile.untraced
    return profile, {layer.name for layer in profile.layers if layer.splits}


class Heads(Attention):
    """With values of their own, and all heads put together."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.out = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        made = (each(x).unflatten(-1, (self.heads, 32)).transpose(1, 2) for each in (self.query, self.key, self.value))
        seen: Tensor = self.out(nn.functional.scaled_dot_product_attention(*made).transpose(1, 2).flatten(-2))
        return seen


ATTENTION = {"attention", *(f"attention.{name}" for name in ("query", "key", "value", "out"))}


class Stack(nn.Module):
    """Attention and an MLP with something in the middle of it."""

    def __init__(self, middle: nn.Module, *, norm: bool = False) -> None:
        super().__init__()
        self.attention = Heads()
        self.up, self.middle, self.down = nn.Linear(256, 1024), middle, nn.Linear(1024, 256)
        self.norm = nn.LayerNorm(1024) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.down(self.norm(self.middle(self.up(x))))


def test_tensor_parallelism_divides_what_goes_from_one_linear_layer_to_another_number_by_number() -> None:
    profile, split = split_layers(Stack(nn.GELU()))
    assert split == ATTENTION | {"up", "down"} and profile.heads == 8
    named = {layer.name: layer for layer in profile.layers}
    assert [named[name].reductions for name in ("attention.query", "attention.out", "up", "down")] == [0, 1, 0, 1]
    assert named["up"].shared_kept == pytest.approx(1 / 5), (
        "its input is whole, and its output, four times as wide, not"
    )
    assert split_layers(Stack(nn.GELU(), norm=True))[1] == ATTENTION, "a norm looks at all numbers of a token"


def test_and_not_what_is_used_whole() -> None:
    class Kept(Stack):
        def forward(self, x: Tensor) -> Tensor:
            wide = self.up(x)
            return super().forward(x) + self.down(wide.relu()) + wide.mean(-1, keepdim=True)

    assert split_layers(Kept(nn.GELU()))[1] == ATTENTION
    plain = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    profile = profile_model(plain, {"x": np.zeros((2, 256), np.float32)}, ("x",))
    assert not profile.heads and not any(layer.splits for layer in profile.layers), "only beside attention"


def test_a_traced_transformer_is_divided_as_one_from_numbers() -> None:
    profile = profile_model(lambda: Transformer(Apart), {"tokens": np.zeros((1, TOKENS), np.int64)}, ("tokens",))
    known = tw.transformer_profile(
        hidden=WIDTH, layers=LAYERS, heads=HEADS, sequence=TOKENS, vocabulary=WORDS, fused_attention=True
    )
    assert total(profile, "reductions") == total(known, "reductions")
    whole = sum(layer.parameters for layer in profile.layers if not layer.splits)
    assert whole < 0.001 * profile.parameters, "norms"
    node = tw.Cluster.parse("8xA100-80GB")
    for text in ("tp=8,micro_batch=16", "pp=2,tp=4,micro_batch=16"):  # where launches do not decide
        one, other = (
            tw.estimate(each, node, tw.Plan.parse(text), batch_size=32, precision="bf16") for each in (profile, known)
        )
        assert one.step_s == pytest.approx(other.step_s, rel=0.15), text
        assert max(one.stage_memory_bytes) == pytest.approx(max(other.stage_memory_bytes), rel=0.15), text


def test_a_model_without_parameters_has_no_layers() -> None:
    profile = profile_model(nn.Identity(), {"x": np.zeros((1, 4), np.float32)}, ("x",))
    assert not profile.layers and not profile.untraced


def test_a_cut_carries_all_that_is_needed_behind_it() -> None:
    named = {layer.name: layer for layer in split_layers(Stack(nn.GELU()))[0].layers}
    width = 64 * 256
    assert named["up"].cut_numbers == (4 + 1) * width, "the wide numbers, and those that go round them"
    assert named["up"].output_numbers == 4 * width

    class Round(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            first = self.layers[0](x)
            return self.layers[3](self.layers[2](self.layers[1](first))) + first

    sizes = [layer.cut_numbers / width for layer in split_layers(Round())[0].layers if "layers" in layer.name]
    assert sizes[:3] == [2, 2, 2], "what goes on, and what goes round"


def test_a_transformer_is_cut_between_its_blocks_where_the_network_is_slow() -> None:
    profile = profile_model(Transformer, {"tokens": np.zeros((1, TOKENS), np.int64)}, ("tokens",))
    plan = replace(tw.Plan.parse("pp=4,micro_batch=4"), batch_size=32, precision="bf16")
    sizes = stage_sizes(profile, MachineModel.of(tw.Cluster.parse("4x1xL4@5Gb")), plan, room_bytes=1e12)
    ends = [profile.layers[end - 1] for end in accumulate(sizes)][:-1]
    assert all(layer.name.endswith("mlp.2") and layer.cut_numbers == TOKENS * WIDTH for layer in ends)


def test_a_probe_does_not_count_the_wait_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device computes 1 ms a call, and the host notices its end 0.2 ms later: the blocks of calls are long."""
    now_s, queued_s = 0.0, 0.0

    def work() -> None:
        nonlocal queued_s
        queued_s += 1e-3

    def synchronize() -> None:
        nonlocal now_s, queued_s
        now_s, queued_s = now_s + queued_s + 2e-4, 0.0

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: now_s))
    assert profiling._call_s(work, "cuda") == pytest.approx(1e-3, rel=0.01)
    assert now_s < 1.0


def test_a_probe_of_a_core_does_not_count_the_time_in_which_others_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    spent_s = 0.0

    def work() -> None:
        nonlocal spent_s
        spent_s += 1e-3

    clocks = SimpleNamespace(thread_time=lambda: spent_s, perf_counter=lambda: 10 * spent_s)
    monkeypatch.setattr(profiling, "time", clocks)
    assert profiling._call_s(work, "cpu") == pytest.approx(1e-3, rel=0.01)


def test_a_probe_of_a_core_has_one_thread_and_gives_the_process_its_own_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with two would have to wait for the busier one of two cores."""
    before, seen = torch.get_num_threads(), list[int]()
    monkeypatch.setattr(profiling, "_call_s", lambda *_: seen.append(torch.get_num_threads()) or 1.0)
    torch.set_num_threads(2)
    try:
        profiling.probe("CPU", "cpu")
        assert {*seen} == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_probe_takes_the_fastest_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other virtual machines on the host slow the first ones, which no clock of this machine shows."""
    spent_s, calls = 0.0, 0

    def work() -> None:
        nonlocal spent_s, calls
        calls += 1
        spent_s += 3e-3 if calls < 200 else 1e-3

    monkeypatch.setattr(profiling, "time", SimpleNamespace(thread_time=lambda: spent_s, perf_counter=lambda: spent_s))
    assert profiling._call_s(work, "cpu") == pytest.approx(1e-3, rel=0.01)
