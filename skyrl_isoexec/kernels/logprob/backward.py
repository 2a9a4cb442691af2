"""Gradients of token log-probabilities and of the entropy: elementwise per row, so deterministic and batch-invariant.

Notable: probabilities are recomputed from the logits with the forward's maximum and total; nothing of size [T, V] is
saved but the logits themselves. An implementation passes its own forward and gradient functions.

Shapes: T rows (tokens), V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.logprob import spec
from skyrl_isoexec.kernels.logprob.spec import Temperature

Forward = Callable[..., tuple[Tensor, Tensor, Tensor]]


class _TokenLogprobs(torch.autograd.Function):
    """`forward(logits, ids, temperature, num_leaves) -> (logprob, row_max, total)`, each [T]."""

    @staticmethod
    def forward(ctx, logits_TV, ids_T, temperature, num_leaves, forward, grad_logits):  # noqa: D102
        out, m, total = forward(logits_TV, ids_T, temperature, num_leaves)
        ctx.save_for_backward(logits_TV, ids_T, m, total)
        ctx.temperature, ctx.grad_logits = temperature, grad_logits
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_T):  # noqa: D102
        return ctx.grad_logits(grad_T, *ctx.saved_tensors, ctx.temperature), None, None, None, None, None


class _Entropy(torch.autograd.Function):
    """`forward(logits, temperature, num_leaves) -> (entropy, row_max, total)`; gradient -p (log p + entropy)."""

    @staticmethod
    def forward(ctx, logits_TV, temperature, num_leaves, forward):  # noqa: D102
        out, m, total = forward(logits_TV, temperature, num_leaves)
        ctx.save_for_backward(logits_TV, out, m, total)
        ctx.temperature = temperature
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_T):  # noqa: D102
        logits, entropy, m, total = ctx.saved_tensors
        divisor = spec.temperatures(ctx.temperature, logits.shape[0])
        x = logits if divisor is None else logits / divisor[:, None]
        logp = (x - m[:, None]) - total.log()[:, None]
        p = logp.exp()
        grad = torch.where(p == 0, p, p * (logp + entropy[:, None])) * -grad_T[:, None]
        return grad if divisor is None else grad / divisor[:, None], None, None, None


def token_logprobs(
    forward: Forward,
    grad_logits: Callable[..., Tensor],
    logits_TV: Tensor,
    ids_T: Tensor,
    temperature: Temperature,
    num_leaves: int,
) -> Tensor:
    """Run `forward`; enters autograd only where a gradient is wanted."""
    if torch.is_grad_enabled() and logits_TV.requires_grad:
        return _TokenLogprobs.apply(logits_TV, ids_T, temperature, num_leaves, forward, grad_logits)
    return forward(logits_TV, ids_T, temperature, num_leaves)[0]


def entropy(forward: Forward, logits_TV: Tensor, temperature: Temperature, num_leaves: int) -> Tensor:
    """Run `forward`; enters autograd only where a gradient is wanted."""
    if torch.is_grad_enabled() and logits_TV.requires_grad:
        return _Entropy.apply(logits_TV, temperature, num_leaves, forward)
    return forward(logits_TV, temperature, num_leaves)[0]
