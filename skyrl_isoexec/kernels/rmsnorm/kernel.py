"""RMSNorm on Hopper (Triton), alone and after adding to the residual stream: the bits of `reference_sm90.py`.

Notable: a row is one tile, its squares are added by the balanced tree, and nothing is fused, so that eager PyTorch
states every bit. The backward adds the rows of a weight's gradient in a fixed number of ascending strides, then by the
same tree.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.numeric.sm90 import EXACT, narrow, needs_grad, power_of_two, require_bf16, tree, widen
from skyrl_isoexec.kernels.rmsnorm import spec

__all__ = ["add_rmsnorm", "rmsnorm"]

MAX_WIDTH = 16384
"""Elements of a row that fit into one tile."""
STRIDES = 256
"""Partial sums over rows of a weight's gradient; part of the order of the backward."""


@triton.jit
def _inverse(x, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS] 1 / sqrt(mean of squares + eps)."""
    mean = tl.div_rn(tree(x * x, ROWS, BLOCK), tl.zeros((ROWS,), tl.float32) + width)
    return tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit(do_not_specialize=["num_rows"])  # one program for every number of rows
def _forward(
    x, residual, w, out, total, num_rows, width, eps, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = (row[:, None] < num_rows) & (column[None, :] < width)
    at = row[:, None] * width + column[None, :]
    value = widen(tl.load(x + at, mask=there, other=0.0))
    weight = widen(tl.load(w + column, mask=column < width, other=0.0))
    dtype: tl.constexpr = out.dtype.element_ty
    if ADD:
        rounded = narrow(widen(tl.load(residual + at, mask=there, other=0.0)) + value, dtype)
        tl.store(total + at, rounded, mask=there)
        value = widen(rounded)
    inverse = _inverse(value, width, eps, ROWS, BLOCK)
    y = widen(narrow(value * inverse[:, None], dtype))
    tl.store(out + at, narrow(y * weight[None, :], dtype), mask=there)


@triton.jit(do_not_specialize=["num_rows"])
def _backward(
    x, w, dy, dtotal, dx, dw, num_rows, width, eps, ADD: tl.constexpr, WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """dx of rows program, program + programs, ...; `dw` [programs, width] gets their share of the weight's gradient."""
    column = tl.arange(0, BLOCK)[None, :]
    there = column < width
    weight = widen(tl.load(w + column, mask=there, other=0.0))
    share = tl.zeros((1, BLOCK), tl.float32)
    dtype: tl.constexpr = dx.dtype.element_ty
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        at = (row + tl.zeros((1, 1), tl.int64)) * width + column
        value = widen(tl.load(x + at, mask=there, other=0.0))
        grad = widen(tl.load(dy + at, mask=there, other=0.0))
        inverse = _inverse(value, width, eps, 1, BLOCK)
        along = tree(grad * weight * value, 1, BLOCK) * inverse * inverse * inverse
        along = tl.div_rn(along, tl.zeros((1,), tl.float32) + width)
        share += grad * widen(narrow(value * inverse[:, None], dtype))
        result = grad * weight * inverse[:, None] - value * along[:, None]
        if ADD:
            result += widen(tl.load(dtotal + at, mask=there, other=0.0))
        tl.store(dx + at, narrow(result, dtype), mask=there)
    if WEIGHT:
        tl.store(dw + tl.program_id(0) * width + column, share, mask=there)


@triton.jit
def _add_shares(shares, dw, width, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """dw = balanced tree over the NUM rows of `shares`, rounded once."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.arange(0, NUM)[None, :] * width + column[:, None]
    total = tree(tl.load(shares + at, mask=column[:, None] < width, other=0.0), BLOCK, NUM)
    tl.store(dw + column, narrow(total, dw.dtype.element_ty), mask=column < width)


def _tile(num_rows: int, width: int) -> tuple[int, int, int]:
    """(rows, elements, warps) of a tile: changes no bit."""
    block = power_of_two(width)
    rows = max(1, min(1024 // block, power_of_two(num_rows)))
    return rows, block, max(1, min(16, rows * block // 512))


def _run(x_TH: Tensor, residual_TH: Tensor | None, w_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, what was normed), from contiguous operands."""
    width = x_TH.shape[-1]
    num_rows = x_TH.numel() // width
    out = torch.empty_like(x_TH)
    total = x_TH if residual_TH is None else torch.empty_like(x_TH)
    rows, block, warps = _tile(num_rows, width)
    if num_rows:
        _forward[(triton.cdiv(num_rows, rows),)](
            x_TH, x_TH if residual_TH is None else residual_TH, w_H, out, total, num_rows, width, eps,
            ADD=residual_TH is not None, ROWS=rows, BLOCK=block, num_warps=warps, **EXACT,
        )  # fmt: skip
    return out, total


def _gradients(
    x_TH: Tensor, w_H: Tensor, eps: float, dy_TH: Tensor, dtotal_TH: Tensor | None, wants_w: bool
) -> tuple[Tensor, Tensor | None]:
    """(gradient for x, gradient for w or None)."""
    width = x_TH.shape[-1]
    num_rows = x_TH.numel() // width
    dy_TH, has_total = dy_TH.contiguous(), dtotal_TH is not None
    dx, dw = torch.empty_like(x_TH), torch.zeros_like(w_H) if wants_w else None
    if not num_rows:
        return dx, dw
    programs = min(STRIDES, power_of_two(num_rows)) if wants_w else num_rows
    shares = torch.empty(programs if wants_w else 1, width, dtype=torch.float32, device=x_TH.device)
    block = power_of_two(width)
    _backward[(programs,)](
        x_TH, w_H, dy_TH, dtotal_TH.contiguous() if has_total else dy_TH, dx, shares, num_rows, width, eps,
        ADD=has_total, WEIGHT=wants_w, BLOCK=block, num_warps=max(1, min(16, block // 256)), **EXACT,
    )  # fmt: skip
    if wants_w:
        columns = 16
        _add_shares[(triton.cdiv(width, columns),)](shares, dw, width, NUM=programs, BLOCK=columns, num_warps=4)
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


def _check(x_TH: Tensor, w_H: Tensor, residual_TH: Tensor | None, zero_centered: bool) -> None:
    spec.check(x_TH, w_H, residual_TH, zero_centered)
    require_bf16("rmsnorm", x_TH, w_H, residual_TH)
    if w_H.shape[0] > MAX_WIDTH:
        raise ValueError(f"rmsnorm: the sm90 implementation holds a row of {MAX_WIDTH}, not {w_H.shape[0]}")


def rmsnorm(x_TH: Tensor, w_H: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Normalised x, of its shape and dtype. Refuses what `spec` refuses, fp32 and rows above `MAX_WIDTH`."""
    _check(x_TH, w_H, None, zero_centered)
    x_TH, w_H = x_TH.contiguous(), w_H.contiguous()
    if needs_grad(x_TH, w_H):
        return _Norm.apply(x_TH, w_H, eps)
    return _run(x_TH, None, w_H, eps)[0]


def add_rmsnorm(
    x_TH: Tensor, residual_TH: Tensor, w_H: Tensor, eps: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """(rmsnorm of s, s) with s = residual + x in fp32, rounded to x's dtype before it is normalised."""
    _check(x_TH, w_H, residual_TH, zero_centered)
    x_TH, residual_TH, w_H = x_TH.contiguous(), residual_TH.contiguous(), w_H.contiguous()
    if needs_grad(x_TH, residual_TH, w_H):
        return _AddNorm.apply(x_TH, residual_TH, w_H, eps)
    return _run(x_TH, residual_TH, w_H, eps)
