"""The backward of every form of a gated delta rule on Hopper: launches, and the function that records a graph.

Notable: it keeps q, k, the gates, T, e and the snapshots of the forward by slot, which together are about as large as
what the stock chunk kernels keep, and makes the convolution again from x.

Shapes: T tokens, N slots, C rows of a chunk, V value heads, Dk and Dv head widths, W taps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.kernels.numeric.sm90 import EXACT, needs_grad, power_of_two
from skyrl_isoexec.kernels.numeric.sm90_gdn_gradients import gradients, turn, walk_back
from skyrl_isoexec.kernels.numeric.sm90_gdn_rows_back import conv_back, rows_back
from skyrl_isoexec.kernels.numeric.sm90_gdn_slots import Slots, columns_of, shape_constants

ROWS, COLUMNS = 32, 128
"""Rows of a tile of rows, and columns of one of the convolution's gradient."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the backward needs of the forward, by slot."""

    q_NKCD: Tensor
    k_NKCD: Tensor
    decay_NVC: Tensor
    beta_NVC: Tensor
    inverse_NVCC: Tensor
    """T."""
    errors_NVCD: Tensor
    """e."""
    snapshots_NVDD: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of the fields."""
        return tuple(self.__dict__.values())


Forward = Callable[[tuple[Tensor, ...], Tensor, GdnHeads, int], tuple[Tensor, Kept | None, Slots | None]]
"""(rows, cu_seqlens, heads, chunk) -> (out, what is kept, slots); None for the last two without rows."""


def _chunks_back(
    kept: Kept, slots: Slots, grad_TVD: Tensor, heads: GdnHeads, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk [N, V, C, Dk], dv [N, V, C, Dv], dg, db fp32 [N, V, C])."""
    num, value, deep, width = slots.num, heads.num_value_heads, heads.key_width, heads.value_width
    like, constants = kept.k_NKCD, shape_constants(heads, chunk)
    batch = (slots.base, slots.owner, slots.query_start, slots.seq_lens)
    rows = (kept.q_NKCD, kept.k_NKCD, kept.decay_NVC, kept.beta_NVC, kept.inverse_NVCC)
    scale = deep**-0.5
    local = like.new_empty(num, value, chunk, width)
    reads = like.new_empty(num, value, chunk, deep)
    turns, ends = (like.new_empty(num, value, deep, width) for _ in range(2))
    turn[(value, num)](
        *rows, grad_TVD, *batch, local, reads, turns, scale, slots.num_requests,
        BV=width, num_warps=8, **constants, **EXACT,
    )  # fmt: skip
    columns = columns_of(slots.num_requests * value, width, like.device.index)
    walk_back[(value * (width // columns), slots.num_requests)](
        kept.k_NKCD, kept.decay_NVC, reads, turns, slots.base, ends,
        BV=columns, STAGES=3, num_warps=4, **constants, **EXACT,
    )  # fmt: skip
    dq, dk = (like.new_empty(num, value, chunk, deep) for _ in range(2))
    dv = like.new_empty(num, value, chunk, width)
    dg, db = torch.empty_like(kept.decay_NVC), torch.empty_like(kept.decay_NVC)
    gradients[(value, num)](
        *rows, kept.errors_NVCD, kept.snapshots_NVDD, local, ends, grad_TVD, *batch, dq, dk, dv, dg, db, scale,
        slots.num_requests, BV=min(32, width), STAGES=2, num_warps=8, **constants, **EXACT,
    )  # fmt: skip
    return dq, dk, dv, dg, db


def backward(
    rows: tuple[Tensor, ...], kept: Kept, slots: Slots, grad_TVD: Tensor, heads: GdnHeads, chunk: int
) -> tuple[Tensor, ...]:
    """Gradients of x, a, b, conv, a_log and dt_bias, of their shapes and dtype."""
    x, a, b, conv, a_log, dt_bias = rows
    num, value, taps, device = slots.num, heads.num_value_heads, conv.shape[1], x.device
    found = _chunks_back(kept, slots, grad_TVD.contiguous(), heads, chunk)
    tile = min(ROWS, chunk)
    batch = (slots.base, slots.owner, slots.query_start, slots.seq_lens)
    dy, dx, da, db = torch.empty_like(x), torch.empty_like(x), torch.empty_like(a), torch.empty_like(b)
    rates, shifts = (torch.zeros(num, value, dtype=torch.float32, device=device) for _ in range(2))
    turned = conv.t().float().contiguous()
    rows_back[(num * (chunk // tile), 1 + 2 * heads.num_key_heads + value)](
        x, a, b, turned, a_log, dt_bias, *batch, *found, dy, da, db, rates, shifts, slots.num_requests,
        HB=power_of_two(value), W=taps, ROWS=tile, num_warps=4, **shape_constants(heads, chunk), **EXACT,
    )  # fmt: skip
    weights = torch.empty(num * (chunk // tile), taps, heads.channels, dtype=torch.float32, device=device)
    conv_back[(num * (chunk // tile), -(-heads.channels // COLUMNS))](
        x, turned, dy, *batch, dx, weights, slots.num_requests, heads.channels,
        C=chunk, W=taps, ROWS=tile, COLUMNS=COLUMNS, num_warps=4, **EXACT,
    )  # fmt: skip
    dconv = weights.sum(0).t().to(conv.dtype)
    return dx, da, db, dconv, rates.sum(0).to(a_log.dtype), shifts.sum(0).to(dt_bias.dtype)


class _Gdn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, b, conv, a_log, dt_bias, cu_seqlens, heads, chunk, forward):
        rows = (x, a, b, conv, a_log, dt_bias)
        out, kept, slots = forward(rows, cu_seqlens, heads, chunk)
        ctx.save_for_backward(*rows, *(kept.tensors() if kept else ()))
        ctx.slots, ctx.heads, ctx.chunk = slots, heads, chunk
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TVD):
        saved = ctx.saved_tensors  # once: where a layer is recomputed, each may be taken only once
        rows, kept = saved[:6], saved[6:]
        if not kept:
            return *(torch.zeros_like(x) for x in rows), None, None, None, None
        kept = Kept(**dict(zip(Kept.__dataclass_fields__, kept, strict=True)))
        return *backward(rows, kept, ctx.slots, grad_TVD, ctx.heads, ctx.chunk), None, None, None, None


def differentiable(
    forward: Forward, rows: tuple[Tensor, ...], cu_seqlens: Tensor, heads: GdnHeads, chunk: int
) -> Tensor:
    """Run `forward` and return its output; enters autograd only where a gradient is wanted."""
    if needs_grad(*rows):
        return _Gdn.apply(*rows, cu_seqlens, heads, chunk, forward)
    return forward(rows, cu_seqlens, heads, chunk)[0]
