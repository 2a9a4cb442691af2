"""Gradients of latent attention: plain matrix products per sequence, from the saved output and log-sum-exp.

Notable: no bit contract with the engine, but deterministic: one fixed sequence of products per sequence, no atomics, so
equal inputs give equal bits, and a sequence's gradients do not depend on its neighbours in the packed batch. A key is
a value as well, so both of its gradients add up in one tensor.

Shapes: T tokens, N query heads, L latent rank, Q = L + width of the rotated part.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.schedule import Schedule

QUERY_TOKENS = 64
"""Tokens a product covers with all of their heads; bounds the memory of the score matrix."""
Forward = Callable[[Tensor, Tensor, Tensor, float, int, Schedule], tuple[Tensor, Tensor]]


def _sequence(
    grad_TNL: Tensor, q_TNQ: Tensor, c_TQ: Tensor, out_TNL: Tensor, lse_TN: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """fp32 gradients of one sequence for q and c, from fp32 tensors."""
    length, num_heads, latent = grad_TNL.shape
    delta_TN = (grad_TNL * out_TNL).sum(-1)
    grad_q, grad_c = torch.empty_like(q_TNQ), torch.zeros_like(c_TQ)
    for lo in range(0, length, QUERY_TOKENS):
        hi = min(lo + QUERY_TOKENS, length)
        grad, q = grad_TNL[lo:hi].flatten(0, 1), q_TNQ[lo:hi].flatten(0, 1)
        lse, delta = lse_TN[lo:hi].flatten()[:, None], delta_TN[lo:hi].flatten()[:, None]
        seen = torch.ones(hi - lo, hi, dtype=torch.bool).tril(lo).repeat_interleave(num_heads, 0)
        p = (q @ c_TQ[:hi].T).mul_(scale).sub_(lse).exp_()
        p = torch.where(seen, p, torch.zeros(()))
        grad_s = (grad @ c_TQ[:hi, :latent].T).sub_(delta).mul_(p).mul_(scale)
        grad_q[lo:hi] = (grad_s @ c_TQ[:hi]).unflatten(0, (hi - lo, num_heads))
        grad_c[:hi] += grad_s.T @ q
        grad_c[:hi, :latent] += p.T @ grad
    return grad_q, grad_c


class _Mla(torch.autograd.Function):
    """`forward(q, c, cu_seqlens, scale, latent, schedule) -> (out [T, N, L], lse fp32 [T, N])` with these gradients."""

    @staticmethod
    def forward(ctx, q_TNQ, c_TQ, cu_seqlens, scale, latent, schedule, forward):  # noqa: D102
        out, lse = forward(q_TNQ, c_TQ, cu_seqlens, scale, latent, schedule)
        ctx.save_for_backward(q_TNQ, c_TQ, out, lse)
        ctx.bounds, ctx.scale = cu_seqlens.tolist(), scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TNL):  # noqa: D102
        q, c, out, lse = ctx.saved_tensors
        grads = torch.empty_like(q), torch.empty_like(c)
        for lo, hi in zip(ctx.bounds[:-1], ctx.bounds[1:], strict=True):
            rows = (x[lo:hi].float() for x in (grad_TNL, q, c, out, lse))
            for grad, g in zip(grads, _sequence(*rows, ctx.scale), strict=True):
                grad[lo:hi] = g
        return *grads, None, None, None, None, None


def differentiable(
    forward: Forward, q_TNQ: Tensor, c_TQ: Tensor, cu_seqlens: Tensor, scale: float, latent: int, schedule: Schedule
) -> Tensor:
    """Run `forward` and return its output; enters autograd only where a gradient is wanted."""
    if torch.is_grad_enabled() and (q_TNQ.requires_grad or c_TQ.requires_grad):
        return _Mla.apply(q_TNQ, c_TQ, cu_seqlens, scale, latent, schedule, forward)
    return forward(q_TNQ, c_TQ, cu_seqlens, scale, latent, schedule)[0]
