"""Llama: no head norms, plain or llama3 rotary angles."""

from __future__ import annotations

from collections.abc import Mapping

from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.families.base import Family, read_config


def from_hf(hf_config: Mapping[str, object], *, dtype: str | None = None) -> DecoderConfig:
    """DecoderConfig of a Llama configuration; `attention_bias` adds biases to all four projections."""
    bias = bool(hf_config.get("attention_bias", False))
    return read_config("llama", hf_config, qkv_bias=bias, o_bias=bias, dtype=dtype)


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    from_hf=from_hf,
    ignored={r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "recomputed from the configuration"},
)
