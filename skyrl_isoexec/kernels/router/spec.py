"""What a router accepts: the checks every implementation runs first.

Shapes: T tokens, E experts, K chosen experts of a token.
"""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.router_rule import RouterRule


def check(logits_TE: Tensor, top_k: int, rule: RouterRule, bias_E: Tensor | None) -> None:
    """Refuse (ValueError, TypeError) operands that do not fit, and a choice that the rule does not leave."""
    if type(rule) is not RouterRule:
        raise TypeError(f"router: rule is a {type(rule).__name__}, not a RouterRule")
    if logits_TE.dtype != torch.float32:
        raise TypeError(f"router: logits are {logits_TE.dtype}, not float32: a choice is made before any rounding")
    if logits_TE.dim() != 2 or not logits_TE.shape[1]:
        raise ValueError(f"router: logits {tuple(logits_TE.shape)} are not [T, E] of at least one expert")
    num_experts = logits_TE.shape[1]
    if bias_E is not None and (bias_E.shape != (num_experts,) or bias_E.dtype != torch.float32):
        raise ValueError(f"router: bias {tuple(bias_E.shape)} {bias_E.dtype} is not [{num_experts}] float32")
    width, rest = divmod(num_experts, rule.num_groups)
    if rest or (rule.num_groups > 1 and width < 2):
        raise ValueError(
            f"router: {num_experts} experts are not num_groups = {rule.num_groups} equal groups of at least two"
        )
    if type(top_k) is not int or not 1 <= top_k <= rule.groups_kept * width:
        raise ValueError(
            f"router: top_k = {top_k!r} is not between 1 and the {rule.groups_kept * width} experts that may be chosen"
        )


def refuse_row(row: int, count: int | None = None) -> None:
    """ValueError for scores that cannot be compared: a NaN, or two infinities that cancel."""
    also = "" if count is None or count == 1 else f" and {count - 1} more rows"
    raise ValueError(
        f"router: the scores of row {row}{also} hold a NaN: a logit or bias is NaN, or a softmax is over infinities; "
        "look for where it arose before this layer"
    )
