"""RMSNorm on one core (numba): the same bits as `rmsnorm.reference`.

The backward is compiled too: rows ascending for the weight, the same 16 lanes within a row, one rounding at the end.
"""

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.numeric.cpu import (
    NUM_LANES,
    ONE,
    ZERO,
    compiled,
    f32,
    inlined,
    lane_tree,
    needs_grad,
    read,
    require_cpu,
    rounded,
    scratch,
    write,
)
from skyrl_isoexec.kernels.rmsnorm import spec

_BF16 = torch.bfloat16


@inlined
def _inverse(x, bf16, first, width, eps, lanes):
    """1 / sqrt(mean of squares + eps) of the row that starts at element `first`."""
    for lane in range(NUM_LANES):
        lanes[lane] = ZERO
    for start in range(0, width, NUM_LANES):
        for lane in range(min(NUM_LANES, width - start)):
            value = read(x, bf16, first + start + lane)
            lanes[lane] += value * value
    return ONE / np.sqrt(lane_tree(lanes) / np.float32(width) + np.float32(eps))


@compiled
def _forward(x, residual, w, bf16, num_rows, width, eps, total, out, lanes_at):
    """`residual` is 0 for a plain norm; otherwise residual + x goes to `total` and is normalised."""
    lanes = f32(lanes_at)
    for t in range(num_rows):
        first = t * width
        if residual != 0:
            for d in range(first, first + width):
                write(total, bf16, d, read(residual, bf16, d) + read(x, bf16, d))
        source = total if residual != 0 else x
        inv = _inverse(source, bf16, first, width, eps, lanes)
        for d in range(width):
            y = rounded(read(source, bf16, first + d) * inv, bf16)
            write(out, bf16, first + d, y * read(w, bf16, d))


@inlined
def _backward_rows(x, w, dy, dtotal, bf16, num_rows, width, eps, dx, dw, sums_at, lanes_at):
    """Gradients for what was normalised, plus `dtotal` (0: none), and for the weight (`dw` 0: not wanted)."""
    lanes, sums = f32(lanes_at), f32(sums_at)
    for d in range(width):
        sums[d] = ZERO
    for t in range(num_rows):
        first = t * width
        inv = _inverse(x, bf16, first, width, eps, lanes)
        for lane in range(NUM_LANES):
            lanes[lane] = ZERO
        for start in range(0, width, NUM_LANES):
            for lane in range(min(NUM_LANES, width - start)):
                d = start + lane
                lanes[lane] += read(dy, bf16, first + d) * read(w, bf16, d) * read(x, bf16, first + d)
        along = lane_tree(lanes) * inv * inv * inv / np.float32(width)
        for d in range(width):
            value, grad = read(x, bf16, first + d), read(dy, bf16, first + d)
            sums[d] += grad * rounded(value * inv, bf16)
            grad = grad * read(w, bf16, d) * inv - value * along
            if dtotal != 0:
                grad += read(dtotal, bf16, first + d)
            write(dx, bf16, first + d, grad)
    if dw != 0:
        for d in range(width):
            write(dw, bf16, d, sums[d])


@compiled
def _backward(x, w, dy, dtotal, bf16, num_rows, width, eps, dx, dw, sums_at, lanes_at):
    if bf16:  # a constant in each call, so that each loop is compiled for one dtype
        _backward_rows(x, w, dy, dtotal, True, num_rows, width, eps, dx, dw, sums_at, lanes_at)
    else:
        _backward_rows(x, w, dy, dtotal, False, num_rows, width, eps, dx, dw, sums_at, lanes_at)


def _run(x_TH: Tensor, residual_TH: Tensor | None, w_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, what was normed), from contiguous operands."""
    require_cpu(x_TH, residual_TH, w_H)
    width = x_TH.shape[-1]
    out = torch.empty_like(x_TH)
    total = x_TH if residual_TH is None else torch.empty_like(x_TH)
    _forward(
        x_TH.data_ptr(), 0 if residual_TH is None else residual_TH.data_ptr(), w_H.data_ptr(), int(x_TH.dtype is _BF16),
        x_TH.numel() // width, width, float(eps), total.data_ptr(), out.data_ptr(), scratch(NUM_LANES),
    )  # fmt: skip
    return out, total


def _gradients(
    x_TH: Tensor, w_H: Tensor, eps: float, dy_TH: Tensor, dtotal_TH: Tensor | None, wants_w: bool
) -> tuple[Tensor, Tensor | None]:
    """(gradient for x, gradient for w or None)."""
    width = x_TH.shape[-1]
    dy_TH = dy_TH.contiguous()
    dtotal_TH = None if dtotal_TH is None else dtotal_TH.contiguous()
    dx, dw = torch.empty_like(x_TH), torch.empty_like(w_H) if wants_w else None
    lanes = scratch(NUM_LANES + width)
    _backward(
        x_TH.data_ptr(), w_H.data_ptr(), dy_TH.data_ptr(), 0 if dtotal_TH is None else dtotal_TH.data_ptr(),
        int(x_TH.dtype is _BF16), x_TH.numel() // width, width, float(eps), dx.data_ptr(),
        0 if dw is None else dw.data_ptr(), lanes + 4 * NUM_LANES, lanes,
    )  # fmt: skip
    return dx, dw


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, w_H, eps):
        ctx.save_for_backward(x_TH, w_H)
        ctx.eps = eps
        return _run(x_TH, None, w_H, eps)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TH):
        dx, dw = _gradients(*ctx.saved_tensors, ctx.eps, dy_TH, None, ctx.needs_input_grad[1])
        return dx, dw, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, residual_TH, w_H, eps):
        out, total = _run(x_TH, residual_TH, w_H, eps)
        ctx.save_for_backward(total, w_H)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return out, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TH, dtotal_TH):
        if dy_TH is None:
            return dtotal_TH, dtotal_TH, None, None
        dx, dw = _gradients(*ctx.saved_tensors, ctx.eps, dy_TH, dtotal_TH, ctx.needs_input_grad[2])
        return dx, dx, dw, None


def rmsnorm(x_TH: Tensor, w_H: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Normalised x, of its shape and dtype. Refuses what `spec` refuses."""
    spec.check(x_TH, w_H, None, zero_centered)
    x_TH, w_H = x_TH.contiguous(), w_H.contiguous()
    if needs_grad(x_TH, w_H):
        return _Norm.apply(x_TH, w_H, eps)
    return _run(x_TH, None, w_H, eps)[0]


def add_rmsnorm(
    x_TH: Tensor, residual_TH: Tensor, w_H: Tensor, eps: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """(rmsnorm of s, s) with s = residual + x in fp32, rounded to x's dtype before it is normalised."""
    spec.check(x_TH, w_H, residual_TH, zero_centered)
    x_TH, residual_TH, w_H = x_TH.contiguous(), residual_TH.contiguous(), w_H.contiguous()
    if needs_grad(x_TH, residual_TH, w_H):
        return _AddNorm.apply(x_TH, residual_TH, w_H, eps)
    return _run(x_TH, residual_TH, w_H, eps)
