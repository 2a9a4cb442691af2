"""Qwen3.5, dense: every n-th layer attends, gated and on partly rotated heads; the others are gated delta rules.

Fields are those of Qwen3_5TextConfig (transformers 5.8.0). Published checkpoints also hold a vision tower: their text
part is read from `text_config`, their tensors from under `model.language_model`, and what belongs to pictures is left
out and reported. mrope turns sections of a head by a token's time, height and width; in text all three are its
position, so the sections change no angle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from skyrl_isoexec.model.config import GDN_SIZES, DecoderConfig
from skyrl_isoexec.model.families.base import INERT, Family, check_fields, need, read_config, refuse

ATTENTION, RECURRENCE = "full_attention", "linear_attention"
OWN = frozenset(GDN_SIZES) | {"layer_types", "full_attention_interval", "partial_rotary_factor"}
"""Fields of the text part that are read here; the others are as in every family."""
WITHOUT_EFFECT = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
GIVEN = {"attn_output_gate": (True, None), "mamba_ssm_dtype": ("float32", None)}
"""Fields at the values that they have here: the gate is there, and a state goes from chunk to chunk in fp32."""
MROPE = ("mrope_section", "mrope_interleaved")
PICTURES = frozenset("vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id".split())
SHARED = frozenset({"dtype", "torch_dtype", "tie_word_embeddings"})
"""Fields of the whole that hold for the text part where that is silent."""
ROTATED = 0.25
"""Part of a head that is rotated where a configuration does not say, as in Qwen3_5TextConfig."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """What one model of this kind is called: by itself, and with a vision tower around it."""

    family: str
    text_type: str
    whole_type: str
    text_class: str
    whole_class: str


DENSE = Names(
    family="qwen3_5",
    text_type="qwen3_5_text",
    whole_type="qwen3_5",
    text_class="Qwen3_5ForCausalLM",
    whole_class="Qwen3_5ForConditionalGeneration",
)


def from_hf(hf_config: Mapping[str, object], *, dtype: str | None = None) -> DecoderConfig:
    """DecoderConfig of the text part; `attention_bias` adds biases to the four projections of the attention."""
    return read_text(DENSE, text_part(DENSE, hf_config), dtype=dtype)


def read_text(
    names: Names,
    text: Mapping[str, object],
    *,
    inert: frozenset[str] = frozenset(),
    fixed: Mapping[str, tuple[object, ...]] | None = None,
    more: Mapping[str, object] | None = None,
    dtype: str | None = None,
) -> DecoderConfig:
    """DecoderConfig of the fields of a text part; `inert`, `fixed` and `more` as in `read_config`."""
    need(names.family, text, "num_key_value_heads")  # absent, it does not mean as many as query heads
    interval = _interval(names.family, text)
    rotary_dim, rest = _rotation(names.family, text)
    bias = bool(text.get("attention_bias", False))
    config = read_config(
        names.family,
        rest,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        implied_head_dim=False,
        inert=WITHOUT_EFFECT | inert,
        fixed=GIVEN | dict(fixed or {}),
        more=more,
        dtype=dtype,
    )
    return dataclasses.replace(
        config,
        rotary_dim=rotary_dim,
        attention_gate=True,
        zero_centred_norm=True,
        full_attention_interval=interval,
        **({name: need(names.family, text, name) for name in GDN_SIZES} if interval > 1 else {}),
    )


def to_hf(hf_config: Mapping[str, object]) -> Mapping[str, object]:
    """The text part as a configuration of its own, which Qwen3_5ForCausalLM loads."""
    return text_alone(DENSE, hf_config)


def text_alone(names: Names, hf_config: Mapping[str, object]) -> Mapping[str, object]:
    """The text part as a configuration of its own, which `names.text_class` loads."""
    if hf_config.get("text_config") is None:
        return dict(hf_config)
    common = {name: value for name, value in hf_config.items() if name in INERT}
    return common | text_part(names, hf_config) | {"architectures": [names.text_class], "model_type": names.text_type}


def text_part(names: Names, hf_config: Mapping[str, object]) -> dict[str, object]:
    """The fields that describe the decoder: all of them, or those of `text_config`. Checks what is around those."""
    text = hf_config.get("text_config")
    if text is None:
        if hf_config.get("model_type") == names.whole_type:
            raise refuse(
                names.family, "text_config", None, f"the text part, or model_type {names.text_type!r} without it"
            )
        return dict(hf_config)
    check_fields(names.family, hf_config, INERT | PICTURES | SHARED | {"text_config"}, {})
    if text.get("model_type") not in (None, names.text_type):
        raise refuse(names.family, "text_config.model_type", text["model_type"], repr(names.text_type))
    tied = {part["tie_word_embeddings"] for part in (hf_config, text) if part.get("tie_word_embeddings") is not None}
    if len(tied) == 2:
        raise refuse(
            names.family,
            "text_config.tie_word_embeddings",
            text["tie_word_embeddings"],
            "that of the whole configuration",
        )
    silent = {name for name in SHARED & hf_config.keys() if text.get(name) is None}
    return dict(text) | {name: hf_config[name] for name in silent}


def _interval(family: str, text: Mapping[str, object]) -> int:
    """One layer in so many attends, the last of them."""
    num_layers, said = need(family, text, "num_hidden_layers"), text.get("full_attention_interval")
    if text.get("layer_types") is not None:
        found = _period(family, list(text["layer_types"]), num_layers)
        if said not in (None, found):
            raise refuse(family, "full_attention_interval", said, f"{found}, as layer_types says")
        return found
    said = need(family, text, "full_attention_interval")
    if type(said) is not int or not 0 < said <= num_layers:
        raise refuse(family, "full_attention_interval", said, f"1 to num_hidden_layers = {num_layers}")
    return said


def _period(family: str, kinds: list[object], num_layers: int) -> int:
    if len(kinds) != num_layers or ATTENTION not in kinds:
        raise refuse(family, "layer_types", kinds, f"{num_layers} layers, one of them at least {ATTENTION!r}")
    found = kinds.index(ATTENTION) + 1
    for layer, kind in enumerate(kinds):
        wanted = RECURRENCE if (layer + 1) % found else ATTENTION
        if kind != wanted:
            raise refuse(family, f"layer_types[{layer}]", kind, f"{wanted!r}, as one layer in {found} attends")
    return found


def _rotation(family: str, text: Mapping[str, object]) -> tuple[int | None, dict[str, object]]:
    """Rotated entries of a head, None for all; and the fields that are left for the common reader."""
    rest = {name: value for name, value in text.items() if name not in OWN}
    factors = []
    for name in ("rope_scaling", "rope_parameters"):
        if given := text.get(name):
            factors.append(given.get("partial_rotary_factor"))
            rest[name] = {k: v for k, v in given.items() if k not in ("partial_rotary_factor", *MROPE)}
    if len(set(factors)) == 2:
        raise refuse(
            family, "rope_parameters.partial_rotary_factor", factors[1], f"{factors[0]!r}, as rope_scaling says"
        )
    factor = factors[0] if factors and factors[0] is not None else text.get("partial_rotary_factor", ROTATED)
    head_dim = need(family, text, "head_dim")
    rotated = int(head_dim * factor) if isinstance(factor, (int, float)) and 0 < factor <= 1 else 0
    if rotated < 2 or rotated % 2:
        raise refuse(family, "partial_rotary_factor", factor, f"an even part of head_dim = {head_dim}")
    return None if rotated == head_dim else rotated, rest


IGNORED = {
    r"model\.visual\..*": "the vision tower: the decoder reads text",
    r"mtp\..*": "multi-token prediction, not part of the model's probabilities",
}
RENAMED = {r"model\.language_model\.(.+)": r"model.\1"}
FAMILY = Family(
    name=DENSE.family,
    architectures=(DENSE.text_class, DENSE.whole_class),
    model_types=(DENSE.text_type, DENSE.whole_type),
    from_hf=from_hf,
    to_hf=to_hf,
    ignored=IGNORED,
    renamed=RENAMED,
)
