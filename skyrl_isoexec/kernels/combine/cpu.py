"""Rows to their experts and back on one core (numba): the same bits as `combine.reference`.

The backward is compiled too: each row's gradient is one product, a weight's is a sum in 16 lanes, and the gradient of
`expand` is `combine` with weights of one.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.combine import spec
from skyrl_isoexec.kernels.numeric.cpu import (
    NUM_LANES,
    ZERO,
    compiled,
    f32,
    i32,
    i64,
    inlined,
    lane_tree,
    needs_grad,
    read,
    require_cpu,
    scratch,
    write,
)

_BF16 = torch.bfloat16


@compiled
def _dispatch(experts, num_tokens, top_k, num_experts, order, starts):
    """Sort by counting. The first token whose experts do not ascend within the experts, or -1."""
    e, first = i32(experts), i32(starts)
    for i in range(num_experts + 1):
        first[i] = 0
    for t in range(num_tokens):
        before = -1
        for k in range(top_k):
            now = e[t * top_k + k]
            if now <= before or now >= num_experts:
                return t
            first[now] += 1
            before = now
    total = num_tokens * top_k
    for i in range(num_experts, -1, -1):
        total -= first[i]
        first[i] = total
    for slot in range(num_tokens * top_k):
        i64(order)[first[e[slot]]] = slot
        first[e[slot]] += 1
    for i in range(num_experts, 0, -1):
        first[i] = first[i - 1]
    first[0] = 0
    return -1


@compiled
def _invert(order, size, rows):
    """rows[order[p]] = p. The first p at which order is no permutation, or -1."""
    for p in range(size):
        i64(rows)[p] = -1
    for p in range(size):
        slot = i64(order)[p]
        if slot < 0 or slot >= size or i64(rows)[slot] >= 0:
            return p
        i64(rows)[slot] = p
    return -1


@inlined
def _combine_rows(y, bf16, rows, weights, shared, num_tokens, top_k, width, out, sums_at):
    sums = f32(sums_at)
    for t in range(num_tokens):
        for k in range(top_k):
            row, weight = i64(rows)[t * top_k + k] * width, f32(weights)[t * top_k + k]
            if k == 0:
                for d in range(width):
                    sums[d] = weight * read(y, bf16, row + d)
            else:
                for d in range(width):
                    sums[d] = sums[d] + weight * read(y, bf16, row + d)
        if shared != 0:
            for d in range(width):
                sums[d] = sums[d] + read(shared, bf16, t * width + d)
        for d in range(width):
            write(out, bf16, t * width + d, sums[d])


@compiled
def _combine(y, bf16, rows, weights, shared, num_tokens, top_k, width, out, sums):
    if bf16:  # a constant in each call, so that each loop is compiled for one dtype
        _combine_rows(y, True, rows, weights, shared, num_tokens, top_k, width, out, sums)
    else:
        _combine_rows(y, False, rows, weights, shared, num_tokens, top_k, width, out, sums)


@inlined
def _gradient_rows(dout, y, bf16, order, weights, num_rows, top_k, width, dy, dweights, lanes_at):
    lanes = f32(lanes_at)
    for p in range(num_rows):
        slot = i64(order)[p]
        grad, weight = slot // top_k * width, f32(weights)[slot]
        if dy != 0:
            for d in range(width):
                write(dy, bf16, p * width + d, weight * read(dout, bf16, grad + d))
        if dweights != 0:
            for lane in range(NUM_LANES):
                lanes[lane] = ZERO
            for start in range(0, width, NUM_LANES):
                for lane in range(min(NUM_LANES, width - start)):
                    d = start + lane
                    lanes[lane] += read(dout, bf16, grad + d) * read(y, bf16, p * width + d)
            f32(dweights)[slot] = lane_tree(lanes)


@compiled
def _gradients(dout, y, bf16, order, weights, num_rows, top_k, width, dy, dweights, lanes):
    if bf16:
        _gradient_rows(dout, y, True, order, weights, num_rows, top_k, width, dy, dweights, lanes)
    else:
        _gradient_rows(dout, y, False, order, weights, num_rows, top_k, width, dy, dweights, lanes)


def dispatch(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(int64 order [S], int32 starts [E + 1]): the slot of each row, and where each expert's rows begin.

    Refuses what `spec` refuses, and (ValueError) experts of a token that do not ascend strictly or that there are not.
    """
    spec.check_experts(experts_TK, num_experts)
    require_cpu(experts_TK)
    experts_TK = experts_TK.contiguous()
    num_tokens, top_k = experts_TK.shape
    order, starts = torch.empty(num_tokens * top_k, dtype=torch.int64), torch.empty(num_experts + 1, dtype=torch.int32)
    operands = (experts_TK.data_ptr(), num_tokens, top_k, num_experts, order.data_ptr(), starts.data_ptr())
    if (bad := _dispatch(*operands)) >= 0:
        spec.refuse_token(bad, experts_TK[bad].tolist(), num_experts)
    return order, starts


def _rows_of(order_S: Tensor) -> Tensor:
    """int64 [S]: the row of each slot. ValueError for an order that is no permutation."""
    rows = torch.empty_like(order_S)
    if (bad := _invert(order_S.data_ptr(), order_S.shape[0], rows.data_ptr())) >= 0:
        spec.refuse_order(bad)
    return rows


def _run(y_SH: Tensor, rows_S: Tensor, weights_TK: Tensor, shared_TH: Tensor | None) -> Tensor:
    """The sum over a token's rows, from contiguous operands."""
    (num_tokens, top_k), width = weights_TK.shape, y_SH.shape[1]
    out = torch.empty(num_tokens, width, dtype=y_SH.dtype)
    _combine(
        y_SH.data_ptr(), int(y_SH.dtype is _BF16), rows_S.data_ptr(), weights_TK.data_ptr(),
        0 if shared_TH is None else shared_TH.data_ptr(), num_tokens, top_k, width, out.data_ptr(), scratch(width),
    )  # fmt: skip
    return out


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_SH, order_S, weights_TK, shared_TH):
        ctx.save_for_backward(y_SH, order_S, weights_TK)
        return _run(y_SH, _rows_of(order_S), weights_TK, shared_TH)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_TH):
        y_SH, order_S, weights_TK = ctx.saved_tensors
        dout_TH, (num_rows, width) = dout_TH.contiguous(), y_SH.shape
        dy = torch.empty_like(y_SH) if ctx.needs_input_grad[0] else None
        dweights = torch.empty_like(weights_TK) if ctx.needs_input_grad[2] else None
        _gradients(
            dout_TH.data_ptr(), y_SH.data_ptr(), int(y_SH.dtype is _BF16), order_S.data_ptr(), weights_TK.data_ptr(),
            num_rows, weights_TK.shape[1], width, 0 if dy is None else dy.data_ptr(),
            0 if dweights is None else dweights.data_ptr(), scratch(NUM_LANES),
        )  # fmt: skip
        return dy, None, dweights, dout_TH if ctx.needs_input_grad[3] else None


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, order_S, rows_S, top_k):
        ctx.save_for_backward(rows_S)
        ctx.top_k = top_k
        return torch.index_select(x_TH, 0, order_S // top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_SH):
        (rows_S,) = ctx.saved_tensors
        return _run(dx_SH.contiguous(), rows_S, torch.ones(dx_SH.shape[0] // ctx.top_k, ctx.top_k), None), *(None,) * 3


def expand(x_TH: Tensor, order_S: Tensor) -> Tensor:
    """x_SH: each token's row for each of its experts, bit for bit, in the order of rows. Refuses as `combine` does."""
    top_k = spec.check_expand(x_TH, order_S)
    require_cpu(x_TH, order_S)
    order_S = order_S.contiguous()
    rows_S = _rows_of(order_S)
    if needs_grad(x_TH):
        return _Expand.apply(x_TH, order_S, rows_S, top_k)
    return torch.index_select(x_TH, 0, order_S // top_k)


def combine(y_SH: Tensor, order_S: Tensor, weights_TK: Tensor, shared_TH: Tensor | None = None) -> Tensor:
    """out_TH in y's dtype. Refuses what `spec` refuses, and an order that is no permutation."""
    spec.check(y_SH, order_S, weights_TK, shared_TH)
    require_cpu(y_SH, order_S, weights_TK, shared_TH)
    y_SH, order_S, weights_TK = y_SH.contiguous(), order_S.contiguous(), weights_TK.contiguous()
    shared_TH = None if shared_TH is None else shared_TH.contiguous()
    if needs_grad(y_SH, weights_TK, shared_TH):
        return _Combine.apply(y_SH, order_S, weights_TK, shared_TH)
    return _run(y_SH, _rows_of(order_S), weights_TK, shared_TH)
