"""Gradients of a gated delta rule: autograd through its chunk form, which plain products make again from the inputs.

Notable: no bit contract with the engine and no rounding to bf16 inside, but deterministic: one fixed sequence of
products per sequence, so equal inputs give equal bits, and a sequence's gradients do not depend on its neighbours in
the packed batch. Gradients of parameters are added over sequences in ascending order, in fp32, and rounded once.

Shapes: n tokens, C channels, V value heads, D their widths, N chunks, L rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.numeric.gdn_checks import Operands
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.kernels.numeric.gdn_rows import NORM_EPS
from skyrl_isoexec.schedule import Schedule

Forward = Callable[[Operands, Tensor, GdnHeads, Schedule], Tensor]
NUM_ROWS = 3
"""The first operands have a row for each token, the others are parameters."""


def _heads(x_nC: Tensor, num_heads: int, repeats: int) -> Tensor:
    """[V, n, D] of channels, each head repeated."""
    return x_nC.unflatten(1, (num_heads, -1)).transpose(0, 1).repeat_interleave(repeats, 0)


def _chunks(x_VnD: Tensor, length: int) -> Tensor:
    """[V, N, L, D], filled up with rows of zeros."""
    return F.pad(x_VnD, (0, 0, 0, -x_VnD.shape[1] % length)).unflatten(1, (-1, length))


def sequence(rows: Operands, heads: GdnHeads, length: int) -> Tensor:
    """o [n, V, D] of one sequence from its start, in the dtype of its operands (fp32 or float64)."""
    x_nC, a_nV, b_nV, conv_CW, a_log_V, dt_bias_V = rows
    taps, count = conv_CW.shape[1], x_nC.shape[0]
    window = F.pad(x_nC, (0, 0, taps - 1, 0))
    mixed = F.silu(sum(window[i : i + count] * conv_CW[:, i] for i in range(taps)))
    q, k, v = mixed.split(heads.widths, dim=1)
    q, k = (_heads(t, heads.num_key_heads, heads.group) for t in (q, k))
    q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + NORM_EPS) for t in (q, k))
    g = -a_log_V.exp() * F.softplus(a_nV + dt_bias_V)
    v, g, beta = _heads(v, heads.num_value_heads, 1), g.T[..., None], b_nV.sigmoid().T[..., None]
    q, k, v, g, beta = (_chunks(t, length) for t in (q * heads.key_width**-0.5, k, v, g, beta))
    total = g.cumsum(2)
    lower = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    decay = (total - total.mT).masked_fill(~lower, float("-inf")).exp()
    system = (beta * decay * (k @ k.mT)).tril(-1)
    made = torch.linalg.solve_triangular(  # the diagonal is taken as 1
        system, torch.cat([beta * v, beta * total.exp() * k], -1), upper=False, unitriangular=True
    )
    u, w = made.split([heads.value_width, heads.key_width], -1)
    scores, grown, last = q @ k.mT * decay, q * total.exp(), total[:, :, -1:]
    kept = (k * (last - total).exp()).mT
    state, outs = q.new_zeros(q.shape[0], heads.key_width, heads.value_width), []
    for i in range(q.shape[1]):
        fresh = u[:, i] - w[:, i] @ state
        outs.append(grown[:, i] @ state + scores[:, i] @ fresh)
        state = last[:, i].exp() * state + kept[:, i] @ fresh
    return torch.cat(outs, 1)[:, :count].transpose(0, 1)


class _Gdn(torch.autograd.Function):
    """`forward(rows, cu_seqlens, heads, schedule) -> o [T, V, D]` with the gradients of `sequence`."""

    @staticmethod
    def forward(ctx, forward, cu_seqlens, heads, schedule, *rows):  # noqa: D102
        ctx.save_for_backward(*rows)
        ctx.bounds, ctx.heads, ctx.length = cu_seqlens.tolist(), heads, schedule.gdn_chunk
        return forward(rows, cu_seqlens, heads, schedule)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TVD):  # noqa: D102
        rows = ctx.saved_tensors
        grads = [torch.zeros_like(t, dtype=torch.float32) for t in rows]
        for lo, hi in zip(ctx.bounds[:-1], ctx.bounds[1:], strict=True):
            if hi == lo:
                continue
            leaves = [t[lo:hi] if i < NUM_ROWS else t for i, t in enumerate(rows)]
            leaves = [t.detach().float().requires_grad_() for t in leaves]
            with torch.enable_grad():
                out = sequence(tuple(leaves), ctx.heads, ctx.length)
            found = torch.autograd.grad(out, leaves, grad_TVD[lo:hi].float())
            for i, (grad, new) in enumerate(zip(grads, found, strict=True)):
                (grad[lo:hi] if i < NUM_ROWS else grad).add_(new)
        return None, None, None, None, *(grad.to(t.dtype) for grad, t in zip(grads, rows, strict=True))


def differentiable(forward: Forward, rows: Operands, cu_seqlens: Tensor, heads: GdnHeads, schedule: Schedule) -> Tensor:
    """Run `forward` and return its output; enters autograd only where a gradient is wanted."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in rows):
        return _Gdn.apply(forward, cu_seqlens, heads, schedule, *rows)
    return forward(rows, cu_seqlens, heads, schedule)
