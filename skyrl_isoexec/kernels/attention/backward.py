"""Gradients of causal attention: plain matrix products per sequence, from the saved output and log-sum-exp.

Notable: no bit contract with the engine, but deterministic: one fixed sequence of products per sequence, no atomics, so
equal inputs give equal bits, and a sequence's gradients do not depend on its neighbours in the packed batch.

Shapes: T tokens, N query heads = K key-value heads x G, D head dimension; Q a slice of query rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.schedule import Schedule

QUERY_ROWS = 256
"""Query rows a product covers; bounds the memory of the score matrix."""
Forward = Callable[[Tensor, Tensor, Tensor, Tensor, float, Schedule], tuple[Tensor, Tensor]]


def _sequence(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one sequence, fp32: grad, q, out [K, G, T, D]; k, v [K, 1, T, D]; lse [K, G, T, 1]."""
    length = q.shape[2]
    delta = (grad * out).sum(-1, keepdim=True)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for lo in range(0, length, QUERY_ROWS):
        hi = min(lo + QUERY_ROWS, length)
        rows = (slice(None), slice(None), slice(lo, hi))
        seen = torch.ones(hi - lo, hi, dtype=torch.bool).tril(lo)
        p = torch.matmul(q[rows], k[:, :, :hi].mT).mul_(scale).sub_(lse[rows]).exp_()
        p = torch.where(seen, p, torch.zeros(()))
        grad_s = torch.matmul(grad[rows], v[:, :, :hi].mT).sub_(delta[rows]).mul_(p).mul_(scale)
        grad_q[rows] = torch.matmul(grad_s, k[:, :, :hi])
        grad_k[:, :, :hi] += torch.matmul(grad_s.mT, q[rows]).sum(1, keepdim=True)
        grad_v[:, :, :hi] += torch.matmul(p.mT, grad[rows]).sum(1, keepdim=True)
    return grad_q, grad_k, grad_v


class _Attention(torch.autograd.Function):
    """`forward(q, k, v, cu_seqlens, scale, schedule) -> (out [T, N, D], lse fp32 [T, N])` with the gradients above."""

    @staticmethod
    def forward(ctx, q_TND, k_TKD, v_TKD, cu_seqlens, scale, schedule, forward):  # noqa: D102
        out, lse = forward(q_TND, k_TKD, v_TKD, cu_seqlens, scale, schedule)
        ctx.save_for_backward(q_TND, k_TKD, v_TKD, out, lse)
        ctx.bounds, ctx.scale = cu_seqlens.tolist(), scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TND):  # noqa: D102
        q, k, v, out, lse = ctx.saved_tensors
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        num_kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        for lo, hi in zip(ctx.bounds[:-1], ctx.bounds[1:], strict=True):
            heads = [
                x[lo:hi].float().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).contiguous()
                for x in (grad_TND, q, k, v, out)
            ]
            lse_KGT1 = lse[lo:hi].unflatten(1, (num_kv_heads, group)).permute(1, 2, 0)[..., None]
            for grad, g in zip(grads, _sequence(*heads, lse_KGT1, ctx.scale), strict=True):
                grad[lo:hi] = g.permute(2, 0, 1, 3).flatten(1, 2)
        return *grads, None, None, None, None


def differentiable(
    forward: Forward, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, scale: float, schedule: Schedule
) -> Tensor:
    """Run `forward` and return its output; enters autograd only where a gradient is wanted."""
    if torch.is_grad_enabled() and (q_TND.requires_grad or k_TKD.requires_grad or v_TKD.requires_grad):
        return _Attention.apply(q_TND, k_TKD, v_TKD, cu_seqlens, scale, schedule, forward)
    return forward(q_TND, k_TKD, v_TKD, cu_seqlens, scale, schedule)[0]
