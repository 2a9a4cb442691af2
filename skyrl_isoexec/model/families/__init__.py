"""Families of checkpoints, found by name or by what a Hugging Face configuration says of itself."""

from __future__ import annotations

from collections.abc import Mapping

from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.families import glm4_moe_lite, llama, mimo, qwen2, qwen3, qwen3_5, qwen3_5_moe, qwen3_moe
from skyrl_isoexec.model.families.base import Family, Unsupported

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (qwen3, llama, qwen2, mimo, qwen3_5, qwen3_moe, qwen3_5_moe, glm4_moe_lite)
}
OWN_ARCHITECTURES = ("IsoExecForCausalLM", "IsoExecHybridForCausalLM")
"""Names under which an engine is asked for this model; they say nothing about the family."""


def lookup(name: str) -> Family:
    """Family by its name; Unsupported lists the known ones."""
    if name not in FAMILIES:
        raise Unsupported(f"model family {name!r} is not known; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def detect(hf_config: Mapping[str, object]) -> Family:
    """Family of a Hugging Face configuration, from `architectures` and `model_type`, which must agree."""
    names = [name for name in hf_config.get("architectures") or () if name not in OWN_ARCHITECTURES]
    kind = hf_config.get("model_type")
    found = [f for f in FAMILIES.values() if kind in f.model_types or set(names) & set(f.architectures)]
    agreed = [f for f in found if kind in (None, *f.model_types) and set(names) <= set(f.architectures)]
    if len(agreed) == 1:
        return agreed[0]
    known = "; ".join(f"{', '.join(f.model_types)}: {', '.join(f.architectures)}" for f in FAMILIES.values())
    raise Unsupported(f"configuration has architectures = {names} and model_type = {kind!r}; supported: {known}")


def from_hf(hf_config: Mapping[str, object], *, dtype: str | None = None) -> DecoderConfig:
    """DecoderConfig of a Hugging Face configuration of any supported family."""
    return detect(hf_config).from_hf(hf_config, dtype=dtype)
