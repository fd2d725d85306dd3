"""Profiles of transformers that need not exist: from their sizes, or from a configuration file of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.core.errors import PlanError
from trainwright.core.model_profile import LayerCost, ModelProfile


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """The sizes of a transformer's blocks."""

    sequence: int  # tokens of one sample
    hidden: int
    heads: int
    kv_heads: int  # heads of keys and values
    head: int  # width of one head
    mlp: int  # width inside the MLP
    gated: bool
    experts: int  # MLPs of a block
    active: int  # of them, that each token passes

    def check(self) -> None:
        """Raise ValueError for numbers that do not go together."""
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} do not divide heads={self.heads}")
        if self.active > self.experts:
            raise ValueError(f"active_experts={self.active} are more than experts={self.experts}")


def transformer_profile(
    *,
    hidden: int,
    layers: int,
    heads: int,
    sequence: int,
    vocabulary: int,
    kv_heads: int | None = None,
    head: int | None = None,
    mlp: int | None = None,
    gated: bool = False,
    experts: int = 1,
    active_experts: int = 1,
    rotary: bool = False,
    tied: bool = True,
    fused_attention: bool = False,
    fused_loss: bool = False,
) -> ModelProfile:
    """Return the profile of a transformer: an embedding, blocks of attention and an MLP, logits.

    Operations as in Narayanan et al. (2021), activations as in Korthikanti et al. (2022): of a block's
    s h (34 + 5 a s / h) bytes in half precision 10 s h are whole on every tensor rank.

    Args:
        hidden: width.
        layers: blocks.
        heads: attention heads.
        sequence: tokens of one sample.
        vocabulary: tokens that there are.
        kv_heads: heads of keys and values, which groups of heads share (Ainslie et al., 2023); by default all.
        head: width of one head; by default the heads divide `hidden`.
        mlp: width inside the MLP, by default four times `hidden`.
        gated: whether the MLP has three matrices instead of two, such as SwiGLU (Shazeer, 2020).
        experts: MLPs of each block. Each token passes `active_experts` of them (Fedus et al., 2022). All of them are
            parameters, gradients and optimizer state; operations and activations are those of the active ones.
        rotary: whether positions are no parameters.
        tied: whether the logits use the embedding's parameters.
        fused_attention: whether a kernel such as FlashAttention (Dao et al., 2022) never writes the scores.
        fused_loss: whether a kernel computes the cross-entropy from logits in the step's precision and writes their
            gradient over them. Else the loss makes copies of the logits in full precision.

    Raises:
        ValueError: a number is not positive, or the numbers of heads, widths and experts do not go together.
    """
    if min(hidden, layers, heads, sequence, vocabulary, experts, active_experts, mlp or 1, head or 1) < 1:
        raise ValueError("hidden, layers, heads, sequence, vocabulary, mlp, head and experts must be positive")
    if head is None and hidden % heads:
        raise ValueError(f"heads={heads} do not divide hidden={hidden}")
    sizes = _Sizes(
        sequence=sequence, hidden=hidden, heads=heads, kv_heads=kv_heads or heads, head=head or hidden // heads,
        mlp=mlp or 4 * hidden, gated=gated, experts=experts, active=active_experts,
    )  # fmt: skip
    sizes.check()
    block, width = _block(sizes, fused=fused_attention), sequence * hidden
    first = _embedding(vocabulary * hidden + (0 if rotary else width), width)
    last = _logits(sequence, hidden, vocabulary, tied=tied, fused=fused_loss)
    return ModelProfile(
        framework="", layers=(first, *(block,) * layers, last), heads=heads, tokens=sequence, divides_tokens=True
    )


def _block(sizes: _Sizes, *, fused: bool) -> LayerCost:
    """Return the costs of attention and MLP with their norms, in numbers of one sample."""
    hidden, sequence, width = sizes.hidden, sizes.sequence, sizes.sequence * sizes.hidden
    queries, keys = sizes.heads * sizes.head, sizes.kv_heads * sizes.head  # widths of queries, and of keys and values
    attention = 2 * hidden * (queries + keys)
    mlp_parameters = (3 if sizes.gated else 2) * hidden * sizes.mlp
    router = hidden * sizes.experts if sizes.experts > 1 else 0
    parameters = attention + mlp_parameters * sizes.experts + router + 13 * hidden
    inside = sequence * sizes.mlp * sizes.active  # numbers inside the active MLPs
    kept = 5.5 * width + 2 * sequence * (queries + keys) - 4 * width  # input, queries, keys, values, output, mask
    kept += (1.5 if sizes.experts == 1 else 0.5 + sizes.active) * width + (3 if sizes.gated else 2) * inside
    kept += 2 * width  # what the norms read
    traffic = 16.0 * width + (6 if sizes.gated else 4) * inside
    scores = 4.0 * sequence**2 * queries
    return LayerCost(
        name="block",
        parameters=parameters,
        parameter_bytes=4 * parameters,
        flops=2.0 * sequence * (attention + mlp_parameters * sizes.active + router) + scores,
        fused_flops=scores if fused else 0.0,
        output_numbers=width,
        kept_numbers=kept,
        traffic_numbers=traffic,
        scores_numbers=0.0 if fused else 2.5 * sizes.heads * sequence**2,
        block_place=1,
        matmuls=4 + (3 if sizes.gated else 2) * sizes.active,
        launches=34,
        splits=True,
        shared_kept=5 * width / kept,
        shared_traffic=10 * width / traffic,
        reductions=2,
    )


def _embedding(parameters: int, width: int) -> LayerCost:
    return LayerCost(
        name="embedding",
        parameters=parameters,
        parameter_bytes=4 * parameters,
        flops=0.0,
        output_numbers=width,
        kept_numbers=width,
        traffic_numbers=3.0 * width,
        matmuls=0,
        launches=4,
        splits=True,
        shared_kept=1.0,
        shared_traffic=1.0,
        reductions=1,
    )


def _logits(sequence: int, hidden: int, vocabulary: int, *, tied: bool, fused: bool) -> LayerCost:
    """Return the costs of the last norm, the logits and the loss, which reads full-precision logits several times.

    A fused loss reads them once and writes them once.
    """
    table, scores = vocabulary * hidden, sequence * vocabulary
    parameters = 2 * hidden + (0 if tied else table)
    return LayerCost(
        name="logits",
        parameters=parameters,
        parameter_bytes=4 * parameters,
        flops=2.0 * scores * hidden,
        output_numbers=scores,
        kept_numbers=sequence * hidden + (scores if fused else 0),
        loss_numbers=0.0 if fused else scores,
        traffic_numbers=(4.0 if fused else 16.0) * scores,
        launches=20,
        splits=True,
        tied_parameters=table if tied else 0,
    )


# --- Configurations of Hugging Face -----------------------------------------------------------------------------------


_FIELDS: Mapping[str, tuple[str, ...]] = {  # by our name; models call them differently
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocabulary": ("vocab_size",),
    "kv_heads": ("num_key_value_heads",),
    "head": ("head_dim",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "active_experts": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k"),
}
_MLP = ("intermediate_size", "n_inner", "ffn_dim", "d_ff")
_TOKENS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_NEEDED = ("hidden", "layers", "heads", "vocabulary")
_UNDESCRIBED = {
    "kv_lora_rank": "latent attention",
    "n_shared_experts": "experts that every token passes",
    "shared_expert_intermediate_size": "experts that every token passes",
    "first_k_dense_replace": "blocks that differ from each other",
    "encoder_layers": "an encoder beside the decoder",
    "num_decoder_layers": "an encoder beside the decoder",
    "state_size": "state space layers",
}
_GATED = ("silu", "swiglu", "swish", "gelu_pytorch_tanh")


def profile_of(config: str | Path, *, sequence: int | None = None, fused_loss: bool = False) -> ModelProfile:
    """Return the profile of a decoder from its Hugging Face configuration; nothing is downloaded.

    Attention is taken as fused, and positions as rotary where the configuration has `rope_theta`.

    Args:
        config: path of `config.json`, or of the folder with it.
        sequence: tokens of one sample; by default the longest that the configuration names.
        fused_loss: as for `transformer_profile`.

    Raises:
        PlanError: the file cannot be read, lacks a size, or describes what this profile has no numbers for.
    """
    path = Path(config)
    facts = _read(path / "config.json" if path.is_dir() else path)
    where = str(path)
    for name, what in _UNDESCRIBED.items():
        if facts.get(name):
            raise PlanError(
                f"{name}: {what} cannot be predicted from a configuration",
                where=where,
                remedy="plan a job with the model itself, or give its sizes to transformer_profile",
            )
    sizes: dict[str, Any] = {name: _first(facts, keys) for name, keys in _FIELDS.items()}
    lacking = [name for name in _NEEDED if sizes[name] is None]
    tokens = sequence or _first(facts, _TOKENS)
    if lacking or tokens is None:
        name = lacking[0] if lacking else "sequence"
        remedy = f"add {_FIELDS[name][0]} to it" if lacking else "give sequence="
        raise PlanError(f"the configuration has no size {name!r}", where=where, remedy=remedy)
    experts = sizes["experts"] or 1
    mlp = _first(facts, ("moe_intermediate_size",)) if experts > 1 else None
    activation = facts.get("hidden_act") or facts.get("hidden_activation")
    try:
        return transformer_profile(
            **sizes | {"experts": experts, "active_experts": (sizes["active_experts"] or 1) if experts > 1 else 1},
            sequence=tokens,
            mlp=mlp or _first(facts, _MLP),
            gated=activation in _GATED,
            rotary="rope_theta" in facts or "rope_scaling" in facts or "rope_parameters" in facts,
            tied=bool(facts.get("tie_word_embeddings", True)),
            fused_attention=True,
            fused_loss=fused_loss,
        )
    except ValueError as error:
        raise PlanError(str(error), where=where, remedy="correct the configuration") from error


def _read(path: Path) -> dict[str, Any]:
    remedy = "give the path of a config.json, such as a folder that huggingface-cli download wrote"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"the configuration cannot be read: {error.strerror}", where=str(path), remedy=remedy) from None
    except ValueError as error:
        raise PlanError(f"the configuration is not JSON: {error}", where=str(path), remedy=remedy) from None
    if not isinstance(facts, dict):
        raise PlanError("the configuration is no JSON object", where=str(path), remedy=remedy)
    inner = facts.get("text_config")  # of models that see images too
    return {**facts, **inner} if isinstance(inner, dict) else facts


def _first(facts: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """Return the first whole number under one of the keys; None without one."""
    return next((facts[key] for key in keys if isinstance(facts.get(key), int) and facts[key] > 0), None)
