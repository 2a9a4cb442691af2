"""MiMo-7B: the arithmetic of Qwen2, plus multi-token-prediction layers that only a speculative decoder would run.

Its published configuration derives from Qwen2's (model_type "mimo": 36 layers, hidden 4096, 32 heads of 128, 8 key and
value heads, intermediate 11008, vocabulary 151680) and adds `num_nextn_predict_layers`. Those layers take no part in a
token's probability. Their tensors are left out by the rule below, and reported.
"""

from __future__ import annotations

from collections.abc import Mapping

from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.families.base import Family, read_config, refuse


def from_hf(hf_config: Mapping[str, object], *, dtype: str | None = None) -> DecoderConfig:
    """DecoderConfig of a MiMo configuration."""
    if hf_config.get("attention_bias") not in (None, True):
        raise refuse("mimo", "attention_bias", hf_config["attention_bias"], "True: q, k and v always have a bias")
    inert = frozenset({"num_nextn_predict_layers"})
    return read_config("mimo", hf_config, qkv_bias=True, o_bias=False, inert=inert, dtype=dtype)


FAMILY = Family(
    name="mimo",
    architectures=("MiMoForCausalLM",),
    model_types=("mimo",),
    from_hf=from_hf,
    ignored={r"model\.mtp_layers\..*": "multi-token prediction, not part of the model's probabilities"},
)
