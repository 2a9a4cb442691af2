"""What Megatron's and SkyRL's settings ask of a router: what is not computed here is refused, by name.

Names are the fields of Megatron's TransformerConfig (megatron-core 0.16.1) and of SkyRL's MegatronConfig (0.3.0). The
model's own router follows from its checkpoint: scoring, groups, scale, and the bias of its choice, which nothing
updates. There is no auxiliary loss, no replay of an engine's choice (it is the same choice), no frozen router.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...model.config import DecoderConfig

ALLOWED: Mapping[str, tuple[object, ...]] = {
    "moe_token_dispatcher_type": ("alltoall", None),
    "moe_grouped_gemm": (True, None),
    "moe_router_load_balancing_type": ("none", None),
    "moe_aux_loss_coeff": (0, None),
    "moe_z_loss_coeff": (0, None),
    "moe_input_jitter_eps": (0, None),
    "moe_expert_capacity_factor": (None,),
    "moe_router_force_load_balancing": (False, None),
    "moe_router_dtype": ("fp32", None),
    "moe_enable_routing_replay": (False, None),
    "moe_per_layer_logging": (False, None),
    "freeze_moe_router": (False, None),
    "mtp_num_layers": (0, None),
}
"""Setting -> the values that ask for what is computed."""


def check_router(model: DecoderConfig, asked: Mapping[str, object]) -> None:
    """ValueError for the first of the settings `asked`, some of them of other things, that this model cannot follow."""
    scoring = (model.router_scoring,) if model.has_experts else ()
    bias = () if model.router_bias else (False,)
    allowed = {
        **ALLOWED,
        "moe_router_score_function": (None, *scoring),
        "moe_router_enable_expert_bias": (None, *bias),
    }
    for name, values in allowed.items():
        if name in asked and asked[name] not in values:
            kept = " or ".join(map(repr, values))
            why = "the checkpoint's bias chooses experts and is never updated" if name.endswith("bias") else ""
            raise ValueError(
                f"{name} = {asked[name]!r} is not supported by the unified model{why and f': {why}'}; leave it {kept}"
            )
