"""GLM-4.7-Flash: multi-head latent attention, and after some dense layers a mixture of experts with a shared one.

Fields are those of Glm4MoeLiteConfig (transformers 5.8.0), and those that published configurations have beside them.
The router is a sigmoid whose choice, but not whose weights, depends on a bias for each expert; `n_group` limits the
choice to the experts of the best groups. The norms of the latents have the eps of transformers' class, 1e-6 whatever
`rms_norm_eps` says; vLLM's own class and Megatron's add `rms_norm_eps` there.

A checkpoint may go on with a layer that predicts one token further (`num_nextn_predict_layers`). It takes no part in a
token's probability; its tensors are left out, and reported.
"""

from __future__ import annotations

from collections.abc import Mapping

from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.families.base import Family, need, read_config, refuse
from skyrl_isoexec.model.families.mixture import FIXED, PIECES

NAME = "glm4_moe_lite"
LATENT_NORM_EPS = 1e-6
"""The default of Glm4MoeLiteRMSNorm, which its norms of latents are left with."""
ROUTER_EPS = 1e-20
"""Added to the sum of a token's scores that divides them (Glm4MoeLiteMoE)."""
SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OWN = frozenset(
    "q_lora_rank qk_head_dim rope_interleave n_routed_experts num_local_experts n_shared_experts num_experts_per_tok "
    "moe_intermediate_size n_group topk_group norm_topk_prob routed_scaling_factor mlp_layer_types "
    "first_k_dense_replace router_aux_loss_coef".split()
)
GIVEN = FIXED | {
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "moe_layer_freq": (1, None),
    "num_nextn_predict_layers": (0, 1, None),
}
KINDS = ("dense", "sparse")


def from_hf(hf_config: Mapping[str, object], *, dtype: str | None = None) -> DecoderConfig:
    """DecoderConfig of a GLM-4.7-Flash configuration; `attention_bias` adds biases beside the head projections."""
    sizes = {name: need(NAME, hf_config, name) for name in SIZES}
    width, rotated = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"], sizes["qk_rope_head_dim"]
    for name, value in (("qk_head_dim", width), ("head_dim", rotated)):
        if hf_config.get(name) not in (None, value):
            raise refuse(NAME, name, hf_config[name], f"{value}, as qk_nope_head_dim and qk_rope_head_dim say")
    if "q_lora_rank" not in hf_config:  # null is one projection, absence a default of transformers
        need(NAME, hf_config, "q_lora_rank")
    first = _first_dense_layers(hf_config)
    latent = sizes | {
        "q_lora_rank": hf_config["q_lora_rank"],
        "rope_interleaved": _switch(hf_config, "rope_interleave", True),
        "latent_norm_eps": LATENT_NORM_EPS,
    }
    bias = bool(hf_config.get("attention_bias", False))
    return read_config(
        NAME,
        {**hf_config, "head_dim": width},
        qkv_bias=bias,
        o_bias=bias,
        inert=OWN.union(SIZES),
        fixed=GIVEN,
        more=latent
        | _read_experts(hf_config)
        | {"first_dense_layers": first}
        | ({} if first else {"intermediate_size": None}),
        dtype=dtype,
    )


def _switch(hf: Mapping[str, object], name: str, default: bool | None = None) -> bool:
    value = default if hf.get(name) is None and default is not None else need(NAME, hf, name)
    if not isinstance(value, bool):
        raise refuse(NAME, name, value, "True or False")
    return value


def _read_experts(hf: Mapping[str, object]) -> dict[str, object]:
    width, shared = need(NAME, hf, "moe_intermediate_size"), need(NAME, hf, "n_shared_experts")
    if type(shared) is not int or shared < 1:
        raise refuse(NAME, "n_shared_experts", shared, "a positive integer")
    count, renormalise = need(NAME, hf, "n_routed_experts"), _switch(hf, "norm_topk_prob")
    if hf.get("num_local_experts") not in (None, count):
        raise refuse(NAME, "num_local_experts", hf["num_local_experts"], f"{count!r}, as n_routed_experts says")
    return {
        "num_experts": count,
        "num_experts_per_tok": need(NAME, hf, "num_experts_per_tok"),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": shared * width,
        "router_scoring": "sigmoid",
        "router_bias": True,
        "router_renormalise": renormalise,
        "router_scale": float(need(NAME, hf, "routed_scaling_factor")),
        "router_groups": need(NAME, hf, "n_group"),
        "router_groups_kept": need(NAME, hf, "topk_group"),
        "router_eps": ROUTER_EPS if renormalise else 0.0,
    }


def _first_dense_layers(hf: Mapping[str, object]) -> int:
    """Number of dense layers, which come first: 1 where nothing is said, as in transformers."""
    num_layers, kinds, first = need(NAME, hf, "num_hidden_layers"), hf.get("mlp_layer_types"), None
    if kinds is not None:
        first = sum(kind == KINDS[0] for kind in kinds)
        if list(kinds) != [KINDS[0]] * first + [KINDS[1]] * (num_layers - first) or first == num_layers:
            raise refuse(NAME, "mlp_layer_types", kinds, f"{num_layers} of {KINDS}, dense ones before all others")
    given = hf.get("first_k_dense_replace")
    if given is not None and (type(given) is not int or given < 0 or first not in (None, given)):
        said = "a count" if first is None else f"{first}, as mlp_layer_types says"
        raise refuse(NAME, "first_k_dense_replace", given, said)
    return 1 if first is None and given is None else given if first is None else first


FAMILY = Family(
    name=NAME,
    architectures=("Glm4MoeLiteForCausalLM",),
    model_types=("glm4_moe_lite",),
    from_hf=from_hf,
    ignored={r"model\.layers\.<num_layers>\..*": "multi-token prediction, not part of the model's probabilities"},
    pieces=PIECES,
    shared_expert="shared_experts",
)
