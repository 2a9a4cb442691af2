"""RMSNorm on Hopper: `triton_loops.py` behind the functions that every implementation has.

What must stay equal: the bits of `reference_sm90.py`.
"""

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.numeric.sm90 import EXACT, needs_grad, power_of_two, require_bf16
from skyrl_isoexec.kernels.numeric.sm90_strides import rows_apart
from skyrl_isoexec.kernels.rmsnorm import spec
from skyrl_isoexec.kernels.rmsnorm import triton_loops as loops

__all__ = ["add_rmsnorm", "gated_rmsnorm", "rmsnorm"]

MAX_WIDTH = 16384
"""Elements of a row that fit into one tile."""
STRIDES = 256
"""Partial sums over rows of a weight's gradient; part of the order of the backward."""


def _tile(num_rows: int, width: int) -> tuple[int, int, int]:
    """(rows, elements, warps) of a tile: changes no bit of a forward."""
    block = power_of_two(width)
    rows = max(1, min(1024 // block, power_of_two(num_rows)))
    return rows, block, max(1, min(16, rows * block // 512))


def _run(x_TH: Tensor, residual_TH: Tensor | None, w_H: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """(normed, what was normed), from contiguous operands but for x, whose rows may lie apart."""
    width = x_TH.shape[-1]
    num_rows = x_TH.numel() // width
    x_TH, *places = rows_apart(x_TH)
    out = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    total = x_TH if residual_TH is None else torch.empty_like(x_TH)
    rows, block, warps = _tile(num_rows, width)
    if num_rows:
        loops.forward[(triton.cdiv(num_rows, rows),)](
            x_TH, x_TH if residual_TH is None else residual_TH, w_H, out, total, num_rows, width, eps,
            *places, ADD=residual_TH is not None, CENTERED=offset == 1.0, ROWS=rows, BLOCK=block, num_warps=warps,
            **EXACT,
        )  # fmt: skip
    return out, total


def _add_shares(shares: Tensor, dw: Tensor) -> None:
    columns, (num, width) = 16, shares.shape
    loops.add_shares[(triton.cdiv(width, columns),)](shares, dw, width, NUM=num, BLOCK=columns, num_warps=4, **EXACT)


def _gradients(
    x_TH: Tensor, w_H: Tensor, eps: float, offset: float, dy_TH: Tensor, dtotal_TH: Tensor | None, wants_w: bool
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
    loops.backward[(programs,)](
        x_TH, w_H, dy_TH, dtotal_TH.contiguous() if has_total else dy_TH, dx, shares, num_rows, width, eps,
        ADD=has_total, WEIGHT=wants_w, CENTERED=offset == 1.0, BLOCK=block, num_warps=max(1, min(16, block // 256)),
        **EXACT,
    )  # fmt: skip
    if wants_w:
        _add_shares(shares, dw)
    return dx, dw


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, w_H, eps, offset):
        ctx.save_for_backward(x_TH, w_H)
        ctx.constants = eps, offset
        return _run(x_TH, None, w_H, eps, offset)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TH):
        dx, dw = _gradients(*ctx.saved_tensors, *ctx.constants, dy_TH, None, ctx.needs_input_grad[1])
        return dx, dw, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, residual_TH, w_H, eps, offset):
        out, total = _run(x_TH, residual_TH, w_H, eps, offset)
        ctx.save_for_backward(total, w_H)
        ctx.constants = eps, offset
        ctx.set_materialize_grads(False)
        return out, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TH, dtotal_TH):
        if dy_TH is None:
            return dtotal_TH, dtotal_TH, None, None, None
        dx, dw = _gradients(*ctx.saved_tensors, *ctx.constants, dy_TH, dtotal_TH, ctx.needs_input_grad[2])
        return dx, dx, dw, None, None


def _run_gated(x_RD: Tensor, z_RD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    width = x_RD.shape[-1]
    num_rows, out = x_RD.numel() // width, torch.empty_like(x_RD)
    rows, block, warps = _tile(num_rows, width)
    if num_rows:
        loops.gated[(triton.cdiv(num_rows, rows),)](
            x_RD, z_RD, w_D, out, num_rows, width, eps, ROWS=rows, BLOCK=block, num_warps=warps, **EXACT
        )
    return out


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RD, z_RD, w_D, eps):
        ctx.save_for_backward(x_RD, z_RD, w_D)
        ctx.eps = eps
        return _run_gated(x_RD, z_RD, w_D, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_RD):
        x_RD, z_RD, w_D = ctx.saved_tensors
        width, wants_w = x_RD.shape[-1], ctx.needs_input_grad[2]
        num_rows = x_RD.numel() // width
        dx, dz, dw = torch.empty_like(x_RD), torch.empty_like(z_RD), torch.zeros_like(w_D) if wants_w else None
        if not num_rows:
            return dx, dz, dw, None
        rows, block, warps = _tile(STRIDES, width)
        num_tiles = triton.cdiv(num_rows, rows)
        programs = min(STRIDES, power_of_two(num_tiles)) if wants_w else num_tiles
        shares = torch.empty(programs if wants_w else 1, width, dtype=torch.float32, device=x_RD.device)
        loops.gated_backward[(programs,)](
            x_RD, z_RD, w_D, dy_RD.contiguous(), dx, dz, shares, num_rows, width, ctx.eps,
            WEIGHT=wants_w, ROWS=rows, BLOCK=block, num_warps=warps, **EXACT,
        )  # fmt: skip
        if wants_w:
            _add_shares(shares, dw)
        return dx, dz, dw, None


def _check_width(name: str, w_H: Tensor) -> None:
    if w_H.shape[0] > MAX_WIDTH:
        raise ValueError(f"{name}: the sm90 implementation holds a row of {MAX_WIDTH}, not {w_H.shape[0]}")


def _check(x_TH: Tensor, w_H: Tensor, residual_TH: Tensor | None, offset: float) -> None:
    spec.check(x_TH, w_H, residual_TH, offset)
    require_bf16("rmsnorm", x_TH, w_H, residual_TH)
    _check_width("rmsnorm", w_H)


def rmsnorm(x_TH: Tensor, w_H: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Normalised x, of its shape and dtype. Refuses what `spec` refuses, fp32 and rows above `MAX_WIDTH`."""
    _check(x_TH, w_H, None, offset)
    w_H = w_H.contiguous()
    if needs_grad(x_TH, w_H):
        return _Norm.apply(x_TH.contiguous(), w_H, eps, offset)
    return _run(x_TH, None, w_H, eps, offset)[0]


def add_rmsnorm(
    x_TH: Tensor, residual_TH: Tensor, w_H: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rmsnorm of s, s) with s = residual + x in fp32, rounded to x's dtype before it is normalised."""
    _check(x_TH, w_H, residual_TH, offset)
    x_TH, residual_TH, w_H = x_TH.contiguous(), residual_TH.contiguous(), w_H.contiguous()
    if needs_grad(x_TH, residual_TH, w_H):
        return _AddNorm.apply(x_TH, residual_TH, w_H, eps, offset)
    return _run(x_TH, residual_TH, w_H, eps, offset)


def gated_rmsnorm(x_RD: Tensor, z_RD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    """rmsnorm of x, times silu(z), of x's shape and dtype. Refuses what `spec` refuses, fp32 and what is too wide."""
    spec.check_gated(x_RD, z_RD, w_D)
    require_bf16("gated_rmsnorm", x_RD, z_RD, w_D)
    _check_width("gated_rmsnorm", w_D)
    x_RD, z_RD, w_D = x_RD.contiguous(), z_RD.contiguous(), w_D.contiguous()
    if needs_grad(x_RD, z_RD, w_D):
        return _GatedNorm.apply(x_RD, z_RD, w_D, eps)
    return _run_gated(x_RD, z_RD, w_D, eps)
