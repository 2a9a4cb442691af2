"""Rows to their experts and back on Hopper (Triton): the bits of `reference.py`, nothing fused, no atomics.

Notable: a row's place is the number of slots that come before it, counted by every program for its own slots, so that a
small step sorts in one launch; a large one goes through PyTorch's stable sort. Both are exact integers, and the host
sees none of them, so nothing refuses what the CPU refuses: of a token whose experts do not ascend, the sum is by slots;
experts that there are not sort before or behind all rows of experts; a place outside the rows is held within them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.combine import spec
from skyrl_isoexec.kernels.numeric.sm90 import (
    EXACT,
    narrow,
    needs_grad,
    power_of_two,
    require,
    require_bf16,
    tree,
    widen,
)

__all__ = ["combine", "dispatch", "expand"]

COUNTED = 8192
"""Slots that are sorted by counting; above, sorting is quicker. Changes no result."""
MINE, BLOCK = 32, 1024
"""Keys that one program counts for; elements of a row that one program moves or adds."""


@triton.jit(do_not_specialize=["num_slots"])
def _count(experts, order, starts, num_slots, num_experts, MINE: tl.constexpr, OTHERS: tl.constexpr):
    """How many slots are before each key: keys are the slots, then experts 0 .. E, each before all slots of its own."""
    key = tl.program_id(0) * MINE + tl.arange(0, MINE)
    is_slot, border = key < num_slots, key - num_slots
    expert = tl.where(is_slot, tl.load(experts + key, mask=is_slot, other=0), border)
    slot = tl.where(is_slot, key, -1)
    before = tl.zeros((MINE,), tl.int32)
    for first in range(0, num_slots, OTHERS):
        other = first + tl.arange(0, OTHERS)
        there = other < num_slots
        theirs = tl.load(experts + other, mask=there, other=0)[None, :]
        is_before = (theirs < expert[:, None]) | ((theirs == expert[:, None]) & (other[None, :] < slot[:, None]))
        before += tl.sum((is_before & there[None, :]).to(tl.int32), 1)
    tl.store(order + before, key.to(tl.int64), mask=is_slot)
    tl.store(starts + border, before, mask=(border >= 0) & (border <= num_experts))


@triton.jit(do_not_specialize=["size"])
def _invert(order, rows, size, BLOCK: tl.constexpr):
    """rows[order[p]] = p."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(order + p, mask=p < size, other=-1)
    tl.store(rows + slot, p.to(tl.int32), mask=(slot >= 0) & (slot < size))


@triton.jit(do_not_specialize=["num_tokens"])
def _expand(x, order, out, num_tokens, top_k, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.minimum(tl.maximum(tl.load(order + row) // top_k, 0), num_tokens - 1)
    there = column < width
    tl.store(out + row * width + column, tl.load(x + token * width + column, mask=there), mask=there)


@triton.jit
def _combine(
    y, rows, weights, shared, out, width,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a token's sum, its rows in the order of slots."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there, last = column < width, tl.num_programs(0) * TOP_K - 1
    for k in tl.static_range(TOP_K):
        row = tl.minimum(tl.maximum(tl.load(rows + token * TOP_K + k), 0), last).to(tl.int64)
        part = widen(tl.load(y + row * width + column, mask=there, other=0.0))
        if WEIGHTED:
            part = tl.load(weights + token * TOP_K + k) * part
        if k == 0:
            total = part
        else:
            total += part
    if SHARED:
        total += widen(tl.load(shared + token * width + column, mask=there, other=0.0))
    tl.store(out + token * width + column, narrow(total, out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num_rows"])
def _gradients(
    dout, y, order, weights, dy, dweights, num_rows, top_k, width,
    Y: tl.constexpr, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dy of a row; its weight's gradient is a tree over each block of BLOCK elements, blocks added ascending."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.minimum(tl.maximum(tl.load(order + row), 0), num_rows - 1)
    token, weight = slot // top_k, tl.load(weights + slot)
    total = tl.zeros((1,), tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        there = column < width
        grad = widen(tl.load(dout + token * width + column, mask=there, other=0.0))
        if Y:
            tl.store(dy + row * width + column, narrow(weight * grad, dy.dtype.element_ty), mask=there)
        if WEIGHTS:
            value = widen(tl.load(y + row * width + column, mask=there, other=0.0))
            total += tree(tl.reshape(grad * value, (1, BLOCK)), 1, BLOCK)
    if WEIGHTS:
        tl.store(dweights + slot + tl.arange(0, 1), total)


def dispatch(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(int64 order [S], int32 starts [E + 1]): the slot of each row, and where each expert's rows begin.

    Refuses what `spec` refuses; see above for experts that the CPU refuses.
    """
    spec.check_experts(experts_TK, num_experts)
    require("dispatch", experts_TK)
    flat, device = experts_TK.flatten(), experts_TK.device
    size = flat.shape[0]
    if size > COUNTED:
        ascending, order = flat.sort(stable=True)
        borders = torch.arange(num_experts + 1, dtype=torch.int32, device=device)
        return order, torch.searchsorted(ascending, borders, out_int32=True)
    order = torch.empty(size, dtype=torch.int64, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    programs = triton.cdiv(size + num_experts + 1, MINE)
    _count[(programs,)](flat, order, starts, size, num_experts, MINE=MINE, OTHERS=128, num_warps=4, **EXACT)
    return order, starts


def _rows_of(order_S: Tensor) -> Tensor:
    """int32 [S]: the row of each slot."""
    size = order_S.shape[0]
    rows = torch.empty(size, dtype=torch.int32, device=order_S.device)
    if size:
        _invert[(triton.cdiv(size, BLOCK),)](order_S, rows, size, BLOCK=BLOCK, num_warps=4, **EXACT)
    return rows


def _run(
    y_SH: Tensor, rows_S: Tensor, top_k: int, weights_TK: Tensor | None = None, shared_TH: Tensor | None = None
) -> Tensor:
    """The sum over a token's rows, from contiguous operands; without weights each counts once."""
    num_tokens, width = rows_S.shape[0] // top_k, y_SH.shape[1]
    out = torch.empty(num_tokens, width, dtype=y_SH.dtype, device=y_SH.device)
    if out.numel():
        block = min(BLOCK, power_of_two(width))
        _combine[(num_tokens, triton.cdiv(width, block))](
            y_SH, rows_S, rows_S if weights_TK is None else weights_TK, y_SH if shared_TH is None else shared_TH, out,
            width, TOP_K=top_k, WEIGHTED=weights_TK is not None, SHARED=shared_TH is not None, BLOCK=block,
            num_warps=4, **EXACT,
        )  # fmt: skip
    return out


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_SH, order_S, weights_TK, shared_TH):
        ctx.save_for_backward(y_SH, order_S, weights_TK)
        return _run(y_SH, _rows_of(order_S), weights_TK.shape[1], weights_TK, shared_TH)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_TH):
        y_SH, order_S, weights_TK = ctx.saved_tensors
        dout_TH, (num_rows, width) = dout_TH.contiguous(), y_SH.shape
        wants_y, _, wants_weights, wants_shared = ctx.needs_input_grad
        dy = torch.empty_like(y_SH) if wants_y else None
        dweights = torch.zeros_like(weights_TK) if wants_weights else None
        if y_SH.numel() and (wants_y or wants_weights):
            _gradients[(num_rows,)](
                dout_TH, y_SH, order_S, weights_TK, dy if wants_y else y_SH, dweights if wants_weights else weights_TK,
                num_rows, weights_TK.shape[1], width, Y=wants_y, WEIGHTS=wants_weights,
                BLOCK=min(BLOCK, power_of_two(width)), num_warps=4, **EXACT,
            )  # fmt: skip
        return dy, None, dweights, dout_TH if wants_shared else None


def _gathered(x_TH: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    (num_tokens, width), num_rows = x_TH.shape, order_S.shape[0]
    out = torch.empty(num_rows, width, dtype=x_TH.dtype, device=x_TH.device)
    if out.numel():
        grid = (num_rows, triton.cdiv(width, BLOCK))
        _expand[grid](x_TH, order_S, out, num_tokens, top_k, width, BLOCK=BLOCK, num_warps=4, **EXACT)
    return out


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, order_S, top_k):
        ctx.save_for_backward(order_S)
        ctx.top_k = top_k
        return _gathered(x_TH, order_S, top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_SH):
        (order_S,) = ctx.saved_tensors
        return _run(dx_SH.contiguous(), _rows_of(order_S), ctx.top_k), None, None


def expand(x_TH: Tensor, order_S: Tensor) -> Tensor:
    """x_SH: each token's row for each of its experts, bit for bit, in the order of rows. Refuses fp32."""
    top_k = spec.check_expand(x_TH, order_S)
    require_bf16("expand", x_TH)
    require("expand", order_S)
    x_TH, order_S = x_TH.contiguous(), order_S.contiguous()
    return _Expand.apply(x_TH, order_S, top_k) if needs_grad(x_TH) else _gathered(x_TH, order_S, top_k)


def combine(y_SH: Tensor, order_S: Tensor, weights_TK: Tensor, shared_TH: Tensor | None = None) -> Tensor:
    """out_TH in y's dtype. Refuses what `spec` refuses, and fp32."""
    spec.check(y_SH, order_S, weights_TK, shared_TH)
    require_bf16("combine", y_SH, shared_TH)
    require("combine", order_S, weights_TK)
    y_SH, order_S, weights_TK = y_SH.contiguous(), order_S.contiguous(), weights_TK.contiguous()
    shared_TH = None if shared_TH is None else shared_TH.contiguous()
    if needs_grad(y_SH, weights_TK, shared_TH):
        return _Combine.apply(y_SH, order_S, weights_TK, shared_TH)
    return _run(y_SH, _rows_of(order_S), weights_TK.shape[1], weights_TK, shared_TH)
