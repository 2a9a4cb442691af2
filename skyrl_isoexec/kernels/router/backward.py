"""Gradient of a router's weights for its logits: elementwise and row sums, so deterministic.

Notable: the choice has no derivative, nor has the bias, which only chooses. The scores are saved, not the logits. An
implementation passes its own forward.

Shapes: T tokens, E experts, K chosen experts of a token.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.numeric.router_rule import RouterRule

Forward = Callable[[Tensor, int, RouterRule, Tensor | None, bool], tuple[Tensor, Tensor, Tensor | None]]
"""(logits, top_k, rule, bias, whether scores are wanted) -> (weights, experts, scores or None)."""


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TE, bias_E, top_k, rule, forward):
        weights_TK, experts_TK, scores_TE = forward(logits_TE, top_k, rule, bias_E, True)
        ctx.save_for_backward(scores_TE, experts_TK)
        ctx.rule = rule
        ctx.mark_non_differentiable(experts_TK)
        return weights_TK, experts_TK

    @staticmethod
    @once_differentiable
    def backward(ctx, dweights_TK, _dexperts_TK):
        return gradient(dweights_TK, *ctx.saved_tensors, ctx.rule), None, None, None, None


def gradient(dweights_TK: Tensor, scores_TE: Tensor, experts_TK: Tensor, rule: RouterRule) -> Tensor:
    """fp32 [T, E] gradient for the logits."""
    experts_TK = experts_TK.long()
    chosen_TK = scores_TE.gather(1, experts_TK)
    grad_TK = dweights_TK * rule.scale
    if rule.renormalise:
        total = chosen_TK.sum(1, keepdim=True) + rule.eps
        grad_TK = (grad_TK - (grad_TK * chosen_TK).sum(1, keepdim=True) / total) / total
    grad_TE = torch.zeros_like(scores_TE).scatter_(1, experts_TK, grad_TK)
    if rule.scoring == "sigmoid":
        return grad_TE * (scores_TE * (1.0 - scores_TE))
    return scores_TE * (grad_TE - (grad_TK * chosen_TK).sum(1, keepdim=True))


def route(
    forward: Forward, logits_TE: Tensor, top_k: int, rule: RouterRule, bias_E: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run `forward`; enters autograd only where a gradient is wanted."""
    if torch.is_grad_enabled() and logits_TE.requires_grad:
        return _Route.apply(logits_TE, bias_E, top_k, rule, forward)
    return forward(logits_TE, top_k, rule, bias_E, False)[:2]
