"""Qwen3 with experts: the attention of Qwen3, and in every layer, or after some dense ones, a mixture of experts.

Published configurations have a head width of their own; transformers' class gives hidden / heads where they do not. A
layer is dense where `mlp_only_layers` names it or `decoder_sparse_step` passes over it. Only dense layers before all
others are supported.
"""

from __future__ import annotations

from collections.abc import Mapping

from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.families.base import Family, need, read_config, refuse
from skyrl_isoexec.model.families.mixture import FIELDS, FIXED, PIECES, read_experts

NAME = "qwen3_moe"
OWN = FIELDS | {"norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"}


def from_hf(hf_config: Mapping[str, object], *, dtype: str | None = None) -> DecoderConfig:
    """DecoderConfig of a Qwen3 configuration with experts; `attention_bias` adds biases to all four projections."""
    need(NAME, hf_config, "num_key_value_heads")  # elsewhere its absence means as many as query heads; here it does not
    renormalise = need(NAME, hf_config, "norm_topk_prob")
    if not isinstance(renormalise, bool):
        raise refuse(NAME, "norm_topk_prob", renormalise, "True or False")
    first = _first_dense_layers(hf_config)
    experts = read_experts(NAME, hf_config, renormalise=renormalise)
    bias = bool(hf_config.get("attention_bias", False))
    return read_config(
        NAME,
        hf_config,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        inert=OWN,
        fixed=FIXED,
        more=experts | {"first_dense_layers": first} | ({} if first else {"intermediate_size": None}),
        dtype=dtype,
    )


def _first_dense_layers(hf: Mapping[str, object]) -> int:
    num_layers, listed = need(NAME, hf, "num_hidden_layers"), hf.get("mlp_only_layers") or []
    step = 1 if hf.get("decoder_sparse_step") is None else hf["decoder_sparse_step"]
    if type(step) is not int or step < 1:
        raise refuse(NAME, "decoder_sparse_step", step, "a positive integer")
    dense = [layer in listed or (layer + 1) % step != 0 for layer in range(num_layers)]
    first = dense.index(False) if False in dense else num_layers
    if first == num_layers or any(dense[first:]):
        name = "mlp_only_layers" if listed else "decoder_sparse_step"
        found = [layer for layer in range(num_layers) if dense[layer]]
        raise refuse(NAME, name, hf[name], f"dense layers before all others and not all; it makes dense {found}")
    return first


FAMILY = Family(
    name=NAME,
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    from_hf=from_hf,
    pieces=PIECES,
)
