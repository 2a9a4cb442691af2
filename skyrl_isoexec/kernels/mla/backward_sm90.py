"""Gradients of latent attention on Hopper: two Triton kernels, fed with the saved output and log-sum-exp.

Notable: no bit contract with the engine, but deterministic: every element of a gradient has one program, or SPLITS of
them whose partial sums are added in one order, and no atomics. `grad_queries` walks the keys of a tile of rows and also
gives delta, the sum of a row's output times its gradient; `grad_keys` walks the rows that see a tile of keys. A key is
a value as well, so both of its gradients have one accumulator.

Shapes: T tokens, N query heads, L latent rank, R width of the rotated part, Q = L + R; a row is a (token, head) pair.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.mla.loops_sm90 import load_parts, request_of, scores
from skyrl_isoexec.kernels.numeric.sm90 import EXACT, LOG2_E, dot, narrow, needs_grad, power_of_two, widen
from skyrl_isoexec.schedule import Schedule

ROWS, KEYS = 32, 64
"""Rows and keys of a tile: its scores lie as [keys, rows], and the accumulators, as tall as the latent, transposed."""
PROGRAMS, SPLITS = 256, 8
"""Programs of `grad_keys` that are enough, and the most that share a tile of keys where there are fewer."""


@triton.jit
def _store_parts(x, row, there, a, b, L: tl.constexpr, R: tl.constexpr):
    """Store the latent and the rotated part, which lie transposed, of rows of x [., L + R]."""
    left, right = tl.arange(0, a.shape[0])[:, None], tl.arange(0, b.shape[0])[:, None]
    at = x + row[None, :] * (L + R)
    tl.store(at + left, narrow(a, x.dtype.element_ty), mask=there[None, :] & (left < L))
    tl.store(at + L + right, narrow(b, x.dtype.element_ty), mask=there[None, :] & (right < R))


@triton.jit
def _probabilities(s, scale, e):
    """Probabilities from scores that are not yet scaled, and the logarithms of their rows."""
    zero = tl.zeros(s.shape, tl.float32)
    return tl.exp2(tl.math.fma(s, zero + scale * LOG2_E, zero - e[None, :]))


@triton.jit
def grad_queries(
    q, c, out, grad, lse, delta, grad_q, query_start, num_requests, scale,
    N: tl.constexpr, L: tl.constexpr, R: tl.constexpr, LW: tl.constexpr, RW: tl.constexpr, BM: tl.constexpr,
    BKV: tl.constexpr,
):  # fmt: skip
    """grad_q and delta of a tile of rows of one sequence."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late tiles are long: they begin first
    request = request_of(query_start, tile, num_requests, N, BM)
    first = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - first
    first_row = (tile - first * N // BM - request) * BM
    end = tl.where(first_row < length * N, tl.minimum(length, (first_row + BM - 1) // N + 1), 0)
    row = first_row + tl.arange(0, BM)
    there, at = row < length * N, first.to(tl.int64) * N + row
    x, x_rotated = load_parts(q, at, there, L, R, LW, RW, True)
    column = tl.arange(0, LW)[None, :]
    values, inside = at[:, None] * L + column, there[:, None] & (column < L)
    g = tl.load(grad + values, mask=inside, other=0.0)
    d = tl.sum(widen(g) * widen(tl.load(out + values, mask=inside, other=0.0)), 1)
    tl.store(delta + at, d, mask=there)
    e = tl.load(lse + at, mask=there, other=0.0)
    position = tl.where(there, row // N, -1)
    a, b = tl.zeros((LW, BM), tl.float32), tl.zeros((RW, BM), tl.float32)
    for start in range(0, end, BKV):
        j = start + tl.arange(0, BKV)
        k, k_rotated = load_parts(c, first.to(tl.int64) + j, j < length, L, R, LW, RW, True)
        s = scores(k, k_rotated, x, x_rotated)
        seen = j[:, None] <= position[None, :]
        p = tl.where(seen, _probabilities(s, scale, e), 0.0)
        dp = dot(k, tl.trans(g), tl.zeros((BKV, BM), tl.float32))
        ds = narrow(p * (dp - d[None, :]) * scale, tl.bfloat16)
        a, b = dot(tl.trans(k), ds, a), dot(tl.trans(k_rotated), ds, b)
    _store_parts(grad_q, at, there, a, b, L, R)


@triton.jit
def grad_keys(
    q, c, grad, lse, delta, parts, query_start, num_requests, num_tokens, scale,
    N: tl.constexpr, L: tl.constexpr, R: tl.constexpr, LW: tl.constexpr, RW: tl.constexpr, BM: tl.constexpr,
    BKV: tl.constexpr,
):  # fmt: skip
    """A tile of keys' gradient from every num_programs(1)-th step of BM rows that see it, into parts [., T, L + R]."""
    request = request_of(query_start, tl.program_id(0), num_requests, 1, BKV)
    first = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - first
    first_key = (tl.program_id(0) - first // BKV - request) * BKV
    j = first_key + tl.arange(0, BKV)
    k, k_rotated = load_parts(c, first.to(tl.int64) + j, j < length, L, R, LW, RW, True)
    column = tl.arange(0, LW)[None, :]
    a, b = tl.zeros((LW, BKV), tl.float32), tl.zeros((RW, BKV), tl.float32)
    for start in range(first_key * N + tl.program_id(1) * BM, length * N, tl.num_programs(1) * BM):
        row = start + tl.arange(0, BM)
        there, at = row < length * N, first.to(tl.int64) * N + row
        x, x_rotated = load_parts(q, at, there, L, R, LW, RW, True)
        g = tl.load(grad + at[:, None] * L + column, mask=there[:, None] & (column < L), other=0.0)
        e, d = tl.load(lse + at, mask=there, other=0.0), tl.load(delta + at, mask=there, other=0.0)
        s = scores(k, k_rotated, x, x_rotated)
        seen = there[None, :] & (j[:, None] <= row[None, :] // N)
        p = tl.where(seen, _probabilities(s, scale, e), 0.0)
        dp = dot(k, tl.trans(g), tl.zeros((BKV, BM), tl.float32))
        ds = narrow(p * (dp - d[None, :]) * scale, tl.bfloat16)
        a = dot(tl.trans(g), tl.trans(narrow(p, tl.bfloat16)), a)
        a, b = dot(tl.trans(x), tl.trans(ds), a), dot(tl.trans(x_rotated), tl.trans(ds), b)
    parts += tl.program_id(1).to(tl.int64) * num_tokens * (L + R)
    _store_parts(parts, first.to(tl.int64) + j, j < length, a, b, L, R)


def gradients(
    grad_TNL: Tensor, q_TNQ: Tensor, c_TQ: Tensor, out_TNL: Tensor, lse_TN: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Gradients for q and c of packed sequences, in their dtype, from the logarithm to base 2 of the denominator."""
    q_TNQ, c_TQ, starts = q_TNQ.contiguous(), c_TQ.contiguous(), cu_seqlens.to(torch.int32).contiguous()
    grad_TNL = grad_TNL.contiguous()
    (num_tokens, num_heads, width), latent = q_TNQ.shape, grad_TNL.shape[2]
    num_requests, grad_q = starts.shape[0] - 1, torch.empty_like(q_TNQ)
    if not num_tokens:
        return grad_q, torch.empty_like(c_TQ)
    fixed = {
        "N": num_heads, "L": latent, "R": width - latent, "LW": max(16, power_of_two(latent)),
        "RW": max(16, power_of_two(width - latent)), "BM": ROWS, "BKV": KEYS, "num_stages": 2,
    }  # fmt: skip
    delta = torch.empty_like(lse_TN)
    grad_queries[(num_tokens * num_heads // ROWS + num_requests,)](
        q_TNQ, c_TQ, out_TNL, grad_TNL, lse_TN, delta, grad_q, starts, num_requests, scale,
        num_warps=4, **fixed, **EXACT,
    )  # fmt: skip
    tiles = num_tokens // KEYS + num_requests
    splits = max(1, min(SPLITS, PROGRAMS // tiles))
    parts = torch.empty(splits, num_tokens, width, dtype=torch.float32, device=q_TNQ.device)
    grad_keys[(tiles, splits)](
        q_TNQ, c_TQ, grad_TNL, lse_TN, delta, parts, starts, num_requests, num_tokens, scale,
        num_warps=8, **fixed, **EXACT,
    )  # fmt: skip
    return grad_q, parts.sum(0).to(c_TQ.dtype)


class _Mla(torch.autograd.Function):
    """`forward(q, c, cu_seqlens, scale, latent, schedule) -> (out [T, N, L], lse to base 2, fp32 [T, N])`."""

    @staticmethod
    def forward(ctx, q_TNQ, c_TQ, cu_seqlens, scale, latent, schedule, forward):  # noqa: D102
        out, lse = forward(q_TNQ, c_TQ, cu_seqlens, scale, latent, schedule)
        ctx.save_for_backward(q_TNQ, c_TQ, out, lse, cu_seqlens)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TNL):  # noqa: D102
        q, c, out, lse, cu_seqlens = ctx.saved_tensors
        return *gradients(grad_TNL, q, c, out, lse, cu_seqlens, ctx.scale), None, None, None, None, None


def differentiable(
    forward: Callable[..., tuple[Tensor, Tensor]],
    q_TNQ: Tensor,
    c_TQ: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    latent: int,
    schedule: Schedule,
) -> Tensor:
    """Run `forward` and return its output; enters autograd only where a gradient is wanted."""
    if needs_grad(q_TNQ, c_TQ):
        return _Mla.apply(q_TNQ, c_TQ, cu_seqlens, scale, latent, schedule, forward)
    return forward(q_TNQ, c_TQ, cu_seqlens, scale, latent, schedule)[0]
