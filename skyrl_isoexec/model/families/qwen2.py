"""Qwen2 and Qwen2.5: biases on the query, key and value projections, none on the output."""

from __future__ import annotations

from collections.abc import Mapping

from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.families.base import Family, read_config, refuse


def from_hf(hf_config: Mapping[str, object], *, dtype: str | None = None) -> DecoderConfig:
    """DecoderConfig of a Qwen2 configuration."""
    if hf_config.get("attention_bias") not in (None, True):
        raise refuse("qwen2", "attention_bias", hf_config["attention_bias"], "True: q, k and v always have a bias")
    return read_config("qwen2", hf_config, qkv_bias=True, o_bias=False, dtype=dtype)


FAMILY = Family(name="qwen2", architectures=("Qwen2ForCausalLM",), model_types=("qwen2",), from_hf=from_hf)
