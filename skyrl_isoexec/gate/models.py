"""The models that the gates of the decoder run, one region for each kind, and the region of a model.

A kind is which operators mix positions and whether some layers have experts; another kind's kernels do not move its
record. Standard library only, but for the description of a decoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from skyrl_isoexec.kernels.bundle import FORMS
from skyrl_isoexec.model.config import DecoderConfig

SIZES = {"vocab_size": 72, "hidden_size": 40, "intermediate_size": 56, "num_layers": 3, "max_position": 256}
HEADS = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 6}
CONSTANTS = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
HYBRID = {
    "qk_norm": True,
    "rotary_dim": 4,
    "attention_gate": True,
    "zero_centred_norm": True,
    "full_attention_interval": 2,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "intermediate_size": None,
    "num_experts": 8,
    "num_experts_per_tok": 3,  # of two the sum has no order
    "moe_intermediate_size": 12,
    "router_scoring": "softmax",
    "router_renormalise": True,
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 24, "shared_expert_gate": True}
LATENT = {
    "num_kv_heads": 16,
    "head_dim": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "latent_norm_eps": 1e-5,
}
QUERY_LATENT = {"q_lora_rank": 20, "rope_interleaved": True}
BIASED = EXPERTS | {
    "intermediate_size": 56,
    "first_dense_layers": 1,
    "shared_expert_intermediate_size": 24,
    "router_scoring": "sigmoid",
    "router_bias": True,
    "router_scale": 1.75,
    "router_eps": 1e-20,
}
ATTENTION_BIASES = {"qkv_bias": True, "o_bias": True}
GROUPS = {"router_groups": 4, "router_groups_kept": 2}
UNLIKE = {
    "intermediate_size": None,
    "first_dense_layers": 0,
    "router_renormalise": False,
    "router_eps": 0.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
"""What a configuration of latent attention may say in the place of what the published one says."""
DECODERS: dict[str, dict[str, Mapping[str, object]]] = {
    "decoder": {
        "qwen3": {"family": "qwen3", "qk_norm": True},
        "qwen3 biases": {"family": "qwen3", "qk_norm": True, "qkv_bias": True, "o_bias": True},
        "qwen2": {"family": "qwen2", "qkv_bias": True, "tied_head": True},
    },
    "decoder_hybrid": {"qwen3_5": {"family": "qwen3_5", **HYBRID}},
    "decoder_hybrid_moe": {"qwen3_5_moe": {"family": "qwen3_5_moe", **HYBRID, **EXPERTS, **SHARED_EXPERT}},
    "decoder_mla": {
        "glm4_moe_lite": {"family": "glm4_moe_lite", **LATENT, **QUERY_LATENT, **BIASED},
        "glm4_moe_lite biases": {
            "family": "glm4_moe_lite",
            "tied_head": True,
            **LATENT,
            **QUERY_LATENT,
            **ATTENTION_BIASES,
            **BIASED,
            **GROUPS,
        },
        "glm4_moe_lite one projection": {"family": "glm4_moe_lite", **LATENT, **BIASED, **UNLIKE},
    },
    "decoder_moe": {"qwen3_moe": {"family": "qwen3_moe", "qk_norm": True, **EXPERTS}},
}
"""Region -> name of a model -> its fields."""
TENSOR_CORE_WIDTHS = {
    "head_dim": 64,
    "rotary_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 48,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
"""Instead of the above where a tensor core computes."""
TWINS = (2, 5)
"""Experts whose scores tie."""


def region_of(config: DecoderConfig) -> str:
    """The region whose gate runs models of this kind."""
    if config.latent:
        return "decoder_mla"
    return "decoder" + ("_hybrid" if config.hybrid else "") + ("_moe" if config.has_experts else "")


def variants(region: str) -> Iterator[tuple[str, Mapping[str, str], Mapping[str, object]]]:
    """(name, {operator: its other form}, fields) of every model of a region, in every form of its operators."""
    for model, fields in DECODERS[region].items():
        yield model, {}, fields
        for form, op in FORMS.items():
            if op in model_config("float32", fields).operators:
                yield f"{model} {form}", {op: form}, fields


def operators(region: str) -> tuple[str, ...]:
    """Sorted operators, and other forms of them, that a region's models compute with."""
    made = [(form, model_config("float32", fields).operators) for _, form, fields in variants(region)]
    return tuple(sorted({form.get(op, op) for form, ops in made for op in ops}))


def model_config(dtype: str, fields: Mapping[str, object]) -> DecoderConfig:
    """A model that eight ranks and eight leaves cut evenly."""
    return DecoderConfig(**SIZES | HEADS | CONSTANTS | fields, dtype=dtype)
