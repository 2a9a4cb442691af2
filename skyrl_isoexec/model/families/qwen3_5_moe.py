"""Qwen3.5 with experts: the layers of Qwen3.5, and in each of them a mixture of experts with a gated shared one.

Fields are those of Qwen3_5MoeTextConfig (transformers 5.8.0), read as `qwen3_5` reads them. The router is a softmax
over all experts whose chosen scores are divided by their sum. No layer is dense, so `intermediate_size` has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping

from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.families.base import Family, need
from skyrl_isoexec.model.families.mixture import FIELDS, FIXED, PIECES, read_experts
from skyrl_isoexec.model.families.qwen3_5 import IGNORED, RENAMED, Names, read_text, text_alone, text_part

NAMES = Names(
    family="qwen3_5_moe",
    text_type="qwen3_5_moe_text",
    whole_type="qwen3_5_moe",
    text_class="Qwen3_5MoeForCausalLM",
    whole_class="Qwen3_5MoeForConditionalGeneration",
)
SHARED = "shared_expert_intermediate_size"
GIVEN = FIXED | {"norm_topk_prob": (True, None), "decoder_sparse_step": (1, None)}


def from_hf(hf_config: Mapping[str, object], *, dtype: str | None = None) -> DecoderConfig:
    """DecoderConfig of the text part; `attention_bias` adds biases to the four projections of the attention."""
    text = text_part(NAMES, hf_config)
    experts = read_experts(NAMES.family, text, renormalise=True) | {
        "intermediate_size": None,
        SHARED: need(NAMES.family, text, SHARED),
        "shared_expert_gate": True,
    }
    return read_text(NAMES, text, inert=FIELDS | {SHARED}, fixed=GIVEN, more=experts, dtype=dtype)


def to_hf(hf_config: Mapping[str, object]) -> Mapping[str, object]:
    """The text part as a configuration of its own, which Qwen3_5MoeForCausalLM loads."""
    return text_alone(NAMES, hf_config)


FAMILY = Family(
    name=NAMES.family,
    architectures=(NAMES.text_class, NAMES.whole_class),
    model_types=(NAMES.text_type, NAMES.whole_type),
    from_hf=from_hf,
    to_hf=to_hf,
    ignored=IGNORED,
    renamed=RENAMED,
    pieces=PIECES,
)
