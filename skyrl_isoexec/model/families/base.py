"""What a family is, and how it reads a Hugging Face configuration: a field is read, known to be inert, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from skyrl_isoexec.model.config import LLAMA3_KEYS, DecoderConfig

INERT = frozenset(
    "transformers_version architectures model_type _name_or_path name_or_path initializer_range use_cache auto_map "
    "pad_token_id bos_token_id eos_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id "
    "output_hidden_states output_attentions return_dict return_dict_in_generate id2label label2id problem_type "
    "num_labels attn_implementation _attn_implementation _attn_implementation_internal _commit_hash torchscript "
    "tokenizer_class task_specific_params max_window_layers pretraining_tp chunk_size_feed_forward".split()
)
"""Fields that do not change the function the model computes, in any supported family."""

FIXED = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "mlp_bias": (False, None),
    "is_encoder_decoder": (False, None),
    "partial_rotary_factor": (1, None),
}
"""Fields that are supported at these values only."""

READ = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "rms_norm_eps rope_theta rope_scaling rope_parameters max_position_embeddings attention_bias tie_word_embeddings "
    "dtype torch_dtype sliding_window use_sliding_window layer_types".split()
)
"""Fields that `read_config` interprets."""


class Unsupported(ValueError):
    """A configuration that is not computed here; the message names the field, its value and what is supported."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of checkpoint."""

    name: str
    architectures: tuple[str, ...]
    """Names in the `architectures` field of its configurations."""
    model_types: tuple[str, ...]
    """Values of their `model_type`."""
    from_hf: Callable[..., DecoderConfig]
    """(hf_config, *, dtype=None) -> DecoderConfig."""
    to_hf: Callable[[Mapping[str, object]], Mapping[str, object]] = dict
    """hf_config -> the configuration of a checkpoint that holds the decoder's tensors alone, under its names."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint tensors that are left out on purpose: pattern of the whole name (regular expression) -> reason. In a
    pattern, <num_layers> stands for the number of the decoder's layers."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint tensors under other names than the decoder's: pattern of the whole name -> template of its own."""

    shared_expert: str = "shared_expert"
    """Name of the expert that every token has, below `mlp`."""
    pieces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors [E, N, K] of all experts that a checkpoint may have as matrices of each: pattern of the whole name ->
    templates of the matrices that an expert's rows are, in order, with {expert} for its number."""

    def pieces_of(self, name: str, num_experts: int) -> list[tuple[str, ...]]:
        """For each expert, the names that its part of a tensor may come under; empty for what is never in pieces."""
        matches = ((re.fullmatch(pattern, name), templates) for pattern, templates in self.pieces.items())
        match, templates = next(((match, templates) for match, templates in matches if match), (None, ()))
        if match is None:
            return []
        names = [match.expand(template) for template in templates]
        return [tuple(each.format(expert=expert) for each in names) for expert in range(num_experts)]

    def reason(self, name: str, num_layers: int) -> str | None:
        """Why a checkpoint's tensor is left out, of a decoder of so many layers; None for one that is not."""
        patterns = ((pattern.replace("<num_layers>", str(num_layers)), why) for pattern, why in self.ignored.items())
        return next((why for pattern, why in patterns if re.fullmatch(pattern, name)), None)

    def own_name(self, name: str) -> str:
        """The decoder's name of a checkpoint's tensor."""
        matches = ((re.fullmatch(pattern, name), template) for pattern, template in self.renamed.items())
        return next((found.expand(template) for found, template in matches if found), name)


def refuse(family: str, name: str, value: object, supported: str) -> Unsupported:
    """The error for one field."""
    return Unsupported(f"{family}: configuration field {name} = {value!r} is not supported; supported: {supported}")


def need(family: str, hf: Mapping[str, object], name: str) -> int | float:
    """A field without a default; Unsupported if it is missing."""
    if hf.get(name) is None:
        raise Unsupported(f"{family}: configuration field {name} is missing; it has no default here")
    return hf[name]


def check_fields(
    family: str, hf: Mapping[str, object], known: Set[str], fixed: Mapping[str, tuple[object, ...]]
) -> None:
    """Unsupported for the first field that is neither known nor empty, or that is fixed at another value."""
    for name, value in hf.items():
        if name in fixed and value not in fixed[name]:
            raise refuse(family, name, value, " or ".join(map(repr, fixed[name])))
        if name not in known | fixed.keys() and not (value is None or value is False or value in ("", [], {})):
            raise refuse(family, name, value, "its absence: this field is unknown here and might change the arithmetic")


def read_config(
    family: str,
    hf: Mapping[str, object],
    *,
    qkv_bias: bool,
    o_bias: bool,
    qk_norm: bool = False,
    implied_head_dim: bool = True,
    inert: frozenset[str] = frozenset(),
    fixed: Mapping[str, tuple[object, ...]] | None = None,
    more: Mapping[str, object] | None = None,
    dtype: str | None = None,
) -> DecoderConfig:
    """DecoderConfig of a Hugging Face configuration; Unsupported names the first field it cannot honour.

    `implied_head_dim`: an absent head_dim means hidden_size / num_attention_heads. `inert`: more fields without effect.
    `fixed`: more fields that are supported at these values only. `more`: fields of the DecoderConfig that the family
    has read itself, among them `intermediate_size` where no layer has a dense MLP. `dtype` overrides the
    configuration's own.
    """
    check_fields(family, hf, INERT | READ | inert, FIXED | dict(fixed or {}))
    _check_window(family, hf)
    heads, hidden = need(family, hf, "num_attention_heads"), need(family, hf, "hidden_size")
    head_dim = hf.get("head_dim")
    if head_dim is None:
        if not implied_head_dim or hidden % heads:
            raise refuse(family, "head_dim", None, f"an explicit value (hidden {hidden}, heads {heads})")
        head_dim = hidden // heads
    theta, scaling = _read_rope(family, hf)
    own = dict(more or {})
    if "intermediate_size" not in own:
        own["intermediate_size"] = need(family, hf, "intermediate_size")
    return DecoderConfig(
        family=family,
        vocab_size=need(family, hf, "vocab_size"),
        hidden_size=hidden,
        num_layers=need(family, hf, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads if hf.get("num_key_value_heads") is None else hf["num_key_value_heads"],
        head_dim=head_dim,
        rms_norm_eps=need(family, hf, "rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=need(family, hf, "max_position_embeddings"),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
        tied_head=bool(hf.get("tie_word_embeddings", False)),
        dtype=dtype or _read_dtype(family, hf),
        **own,
    )


def _read_dtype(family: str, hf: Mapping[str, object]) -> str:
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16"):
        raise refuse(family, "dtype", name, "float32, bfloat16")
    return name


def _check_window(family: str, hf: Mapping[str, object]) -> None:
    kinds = hf.get("layer_types")
    if kinds is not None:
        for kind in kinds:
            if kind != "full_attention":
                raise refuse(family, "layer_types", kind, "full_attention in every layer")
    elif hf.get("sliding_window") is not None and hf.get("use_sliding_window", True):
        first = hf.get("max_window_layers")
        if first is None or first < need(family, hf, "num_hidden_layers"):
            raise refuse(family, "sliding_window", hf["sliding_window"], "none in use (use_sliding_window false)")


def _read_rope(family: str, hf: Mapping[str, object]) -> tuple[float, dict[str, float] | None]:
    """Base and scaling from either spelling: rope_parameters, or rope_theta with rope_scaling."""
    scaling, parameters = hf.get("rope_scaling") or {}, hf.get("rope_parameters") or {}
    merged = dict(scaling or parameters)
    for name, value in parameters.items():
        if name not in merged or merged[name] != value:
            raise refuse(family, f"rope_parameters.{name}", value, f"{merged.get(name)!r}, as rope_scaling says")
    kind = merged.pop("rope_type", None)
    old = merged.pop("type", None)
    if kind is not None and old is not None and kind != old:
        raise refuse(family, "rope_scaling.type", old, f"{kind!r}, as rope_type says")
    kind = kind or old or "default"
    theta = merged.pop("rope_theta", hf.get("rope_theta"))
    if hf.get("rope_theta") is not None and theta != hf["rope_theta"]:
        raise refuse(family, "rope_theta", hf["rope_theta"], f"{theta!r}, as rope_parameters says")
    if merged.pop("partial_rotary_factor", 1) not in (1, None):
        raise refuse(family, "partial_rotary_factor", hf.get("rope_parameters"), "1")
    if kind not in ("default", "llama3"):
        raise refuse(family, "rope_type", kind, "default, llama3")
    wanted = set(LLAMA3_KEYS) if kind == "llama3" else set()
    if set(merged) != wanted:
        raise refuse(family, "rope_parameters", dict(sorted(merged.items())), f"{kind} with keys {sorted(wanted)}")
    return 10000.0 if theta is None else theta, merged or None
