"""What the families with experts share: the fields that they read, and the names of one expert's tensors.

Fields are those of Qwen3MoeConfig and Qwen3_5MoeTextConfig (transformers 5.8.0). The auxiliary loss that balances
experts is added to their loss only where `output_router_logits` is true, which is refused; without it the coefficient
has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping

from skyrl_isoexec.model.families.base import Unsupported, need, refuse

COUNTS = ("num_experts", "num_local_experts")
"""Spellings of the number of experts: as published, and as transformers writes it for some families."""
FIELDS = frozenset({*COUNTS, "num_experts_per_tok", "moe_intermediate_size", "router_aux_loss_coef"})
FIXED = {"output_router_logits": (False, None)}
LAYER = r"(model\.layers\.\d+\.mlp\.experts)"
PIECES = {
    rf"{LAYER}\.gate_up_proj": (r"\1.{expert}.gate_proj.weight", r"\1.{expert}.up_proj.weight"),
    rf"{LAYER}\.down_proj": (r"\1.{expert}.down_proj.weight",),
}
"""Matrices of one expert, as transformers writes them and many checkpoints are published."""


def read_experts(family: str, hf: Mapping[str, object], *, renormalise: bool) -> dict[str, object]:
    """Fields of a DecoderConfig whose router is a softmax over all experts."""
    return {
        "num_experts": _count(family, hf),
        "num_experts_per_tok": need(family, hf, "num_experts_per_tok"),
        "moe_intermediate_size": need(family, hf, "moe_intermediate_size"),
        "router_scoring": "softmax",
        "router_renormalise": renormalise,
    }


def _count(family: str, hf: Mapping[str, object]) -> object:
    given = {name: hf[name] for name in COUNTS if hf.get(name) is not None}
    if not given:
        raise Unsupported(f"{family}: configuration field {COUNTS[0]} is missing; it has no default here")
    if len(set(given.values())) == 2:
        raise refuse(family, COUNTS[1], given[COUNTS[1]], f"{given[COUNTS[0]]!r}, as {COUNTS[0]} says")
    return next(iter(given.values()))
