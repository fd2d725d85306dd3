"""Profiles of transformers from their sizes, and from configurations of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from trainwright.core.errors import PlanError

# Sizes, and the published number of parameters in billions.
LLAMA_2 = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32_000, "hidden_act": "silu",
           "max_position_embeddings": 4096, "rope_theta": 1e4, "tie_word_embeddings": False}  # fmt: skip
LLAMA_3 = {**LLAMA_2, "intermediate_size": 14_336, "num_key_value_heads": 8, "vocab_size": 128_256,
           "max_position_embeddings": 8192}  # fmt: skip
MIXTRAL = {**LLAMA_3, "vocab_size": 32_000, "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN_3 = {**LLAMA_2, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "head_dim": 128,
          "num_key_value_heads": 4, "vocab_size": 151_936, "num_experts": 128, "num_experts_per_tok": 8,
          "moe_intermediate_size": 768}  # fmt: skip
GPT_2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50_257, "n_positions": 1024}


def written(folder: Path, **facts: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize(
    ("facts", "billions"),
    [(LLAMA_2, 6.738), (LLAMA_3, 8.030), (MIXTRAL, 46.70), (QWEN_3, 30.53), (GPT_2, 0.1244)],
    ids=["Llama 2 7B", "Llama 3 8B", "Mixtral 8x7B", "Qwen3 30B-A3B", "GPT-2"],
)
def test_parameters_are_those_of_the_model(tmp_path: Path, facts: dict[str, Any], billions: float) -> None:
    profile = tw.profile_of(written(tmp_path, **facts))
    assert profile.parameters / 1e9 == pytest.approx(billions, rel=0.002)
    assert profile.heads == facts.get("num_attention_heads", 12)
    assert profile.tokens == facts.get("max_position_embeddings", 1024)
    assert tw.profile_of(tmp_path / "config.json", sequence=512).tokens == 512


def test_a_token_passes_the_active_experts_alone(tmp_path: Path) -> None:
    sparse, dense = tw.profile_of(written(tmp_path, **MIXTRAL)), tw.profile_of(written(tmp_path, **LLAMA_3))
    blocks = [profile.layers[1] for profile in (sparse, dense)]
    assert blocks[0].parameters > 6 * blocks[1].parameters, "all experts are held"
    assert 1.5 < blocks[0].flops / blocks[1].flops < 2.0, "two of them compute, and attention is the same"
    cluster = tw.Cluster.parse("8xH100-80GB")
    held = [
        tw.estimate(one, cluster, tw.Plan.parse("fsdp=8,micro_batch=1"), batch_size=8, precision="bf16")
        for one in (sparse, dense)
    ]
    assert held[0].stage_memory_bytes[0] > 2 * held[1].stage_memory_bytes[0]


def test_grouped_heads_keep_less_and_three_matrices_more() -> None:
    sizes: dict[str, Any] = {"hidden": 1024, "layers": 1, "heads": 16, "sequence": 512, "vocabulary": 1000}
    plain, grouped, gated = (
        tw.transformer_profile(**sizes, **more).layers[1] for more in ({}, {"kv_heads": 4}, {"gated": True})
    )
    width = 512 * 1024
    assert (plain.kept_numbers, plain.traffic_numbers) == (17 * width, 32 * width)
    assert plain.kept_numbers - grouped.kept_numbers == 2 * 0.75 * width, "keys and values of four heads of sixteen"
    assert plain.parameters - grouped.parameters == 2 * 0.75 * 1024**2
    assert gated.kept_numbers - plain.kept_numbers == 4 * width and gated.parameters - plain.parameters == 4 * 1024**2


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"kv_lora_rank": 512}, "latent attention cannot be predicted"),
        ({"n_shared_experts": 1}, "experts that every token passes"),
        ({"hidden_size": None}, "no size 'hidden'"),
        ({"max_position_embeddings": None}, "no size 'sequence'"),
        ({"num_key_value_heads": 5}, "kv_heads=5 do not divide heads=32"),
    ],
)
def test_what_a_configuration_lacks_is_said(tmp_path: Path, facts: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said) as raised:
        tw.profile_of(written(tmp_path, **{**LLAMA_2, **facts}))
    assert raised.value.where == str(tmp_path) and raised.value.remedy


def test_a_file_that_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        tw.profile_of("meta-llama/Llama-3.1-8B")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PlanError, match="is not JSON"):
        tw.profile_of(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(PlanError, match="is no JSON object"):
        tw.profile_of(tmp_path)


@pytest.mark.parametrize("name", ["cp", "ep"])
def test_what_is_not_available_is_said_so(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name}=: .* is not available"):
        tw.Plan.parse(f"dp=2,{name}=2")


@pytest.mark.parametrize(("batch", "precision", "said"), [
    (0, "bf16", "batch_size=0"), (-8, "bf16", "batch_size=-8"), (2.5, "bf16", "batch_size=2.5"),
    (True, "bf16", "batch_size=True"), (8, "fp8", "precision='fp8' cannot be predicted"),
    (8, "bfloat16", "precision='bfloat16'.*\n.*bf16"), (8, None, "precision=None"),
])  # fmt: skip
def test_questions_that_make_no_sense(batch: Any, precision: Any, said: str) -> None:
    profile = tw.transformer_profile(hidden=64, layers=2, heads=4, sequence=8, vocabulary=100)
    cluster = tw.Cluster.parse("2xT4")
    with pytest.raises(PlanError, match=said):
        tw.rank(profile, cluster, batch_size=batch, precision=precision)
    with pytest.raises(PlanError, match=said):
        tw.estimate(profile, cluster, tw.Plan.parse("dp=2"), batch_size=batch, precision=precision)


@pytest.mark.parametrize("step_s", [0.0, -1.0, float("nan"), float("inf")])
def test_measurements_that_make_no_sense(step_s: float) -> None:
    profile = tw.transformer_profile(hidden=64, layers=2, heads=4, sequence=8, vocabulary=100)
    plan, cluster = tw.Plan.parse("dp=2"), tw.Cluster.parse("2xT4")
    row = tw.Measurement(profile=profile, cluster=cluster, plan=plan, batch_size=8, precision="fp32", step_s=step_s)
    with pytest.raises(PlanError, match="must be above 0 and finite") as raised:
        tw.calibrate([row])
    assert raised.value.where == "measurement 0"
