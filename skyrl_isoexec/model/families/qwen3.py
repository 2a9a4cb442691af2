"""Qwen3, dense: RMSNorm over each query and key head, head width of its own."""

from __future__ import annotations

from collections.abc import Mapping

from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.families.base import Family, read_config


def from_hf(hf_config: Mapping[str, object], *, dtype: str | None = None) -> DecoderConfig:
    """DecoderConfig of a Qwen3 configuration; `attention_bias` adds biases to all four projections."""
    bias = bool(hf_config.get("attention_bias", False))
    return read_config(
        "qwen3", hf_config, qkv_bias=bias, o_bias=bias, qk_norm=True, implied_head_dim=False, dtype=dtype
    )


FAMILY = Family(name="qwen3", architectures=("Qwen3ForCausalLM",), model_types=("qwen3",), from_hf=from_hf)
