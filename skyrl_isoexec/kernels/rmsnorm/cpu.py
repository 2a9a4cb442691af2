"""RMSNorm on one core: `loops.py` behind the functions that every implementation has, the bits of `reference.py`."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.numeric.cpu import NUM_LANES, needs_grad, require_cpu, scratch
from skyrl_isoexec.kernels.rmsnorm import loops, spec

__all__ = ["add_rmsnorm", "gated_rmsnorm", "rmsnorm"]


def _is_bf16(x: Tensor) -> int:
    return int(x.dtype is torch.bfloat16)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _run(x_TH: Tensor, residual_TH: Tensor | None, w_H: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """(normed, what was normed), from contiguous operands."""
    require_cpu(x_TH, residual_TH, w_H)
    width = x_TH.shape[-1]
    out = torch.empty_like(x_TH)
    total = x_TH if residual_TH is None else torch.empty_like(x_TH)
    loops.forward(
        x_TH.data_ptr(), _address(residual_TH), w_H.data_ptr(), _is_bf16(x_TH), x_TH.numel() // width, width,
        float(eps), int(offset), total.data_ptr(), out.data_ptr(), scratch(NUM_LANES),
    )  # fmt: skip
    return out, total


def _gradients(
    x_TH: Tensor, w_H: Tensor, eps: float, offset: float, dy_TH: Tensor, dtotal_TH: Tensor | None, wants_w: bool
) -> tuple[Tensor, Tensor | None]:
    """(gradient for x, gradient for w or None)."""
    width = x_TH.shape[-1]
    dy_TH = dy_TH.contiguous()
    dtotal_TH = None if dtotal_TH is None else dtotal_TH.contiguous()
    dx, dw = torch.empty_like(x_TH), torch.empty_like(w_H) if wants_w else None
    lanes = scratch(NUM_LANES + 2 * width)
    loops.backward(
        x_TH.data_ptr(), w_H.data_ptr(), dy_TH.data_ptr(), _address(dtotal_TH), _is_bf16(x_TH), x_TH.numel() // width,
        width, float(eps), int(offset), dx.data_ptr(), _address(dw), lanes + 4 * NUM_LANES, lanes,
    )  # fmt: skip
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
    require_cpu(x_RD, z_RD, w_D)
    width, out = x_RD.shape[-1], torch.empty_like(x_RD)
    loops.gated(
        x_RD.data_ptr(), z_RD.data_ptr(), w_D.data_ptr(), _is_bf16(x_RD), x_RD.numel() // width, width, float(eps),
        out.data_ptr(), scratch(NUM_LANES),
    )  # fmt: skip
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
        dy_RD, width = dy_RD.contiguous(), x_RD.shape[-1]
        dx, dz = torch.empty_like(x_RD), torch.empty_like(z_RD)
        dw = torch.empty_like(w_D) if ctx.needs_input_grad[2] else None
        lanes = scratch(NUM_LANES + 2 * width)
        loops.gated_backward(
            x_RD.data_ptr(), z_RD.data_ptr(), w_D.data_ptr(), dy_RD.data_ptr(), _is_bf16(x_RD), x_RD.numel() // width,
            width, float(ctx.eps), dx.data_ptr(), dz.data_ptr(), _address(dw), lanes + 4 * NUM_LANES, lanes,
        )  # fmt: skip
        return dx, dz, dw, None


def rmsnorm(x_TH: Tensor, w_H: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Normalised x, of its shape and dtype. Refuses what `spec` refuses."""
    spec.check(x_TH, w_H, None, offset)
    x_TH, w_H = x_TH.contiguous(), w_H.contiguous()
    if needs_grad(x_TH, w_H):
        return _Norm.apply(x_TH, w_H, eps, offset)
    return _run(x_TH, None, w_H, eps, offset)[0]


def add_rmsnorm(
    x_TH: Tensor, residual_TH: Tensor, w_H: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rmsnorm of s, s) with s = residual + x in fp32, rounded to x's dtype before it is normalised."""
    spec.check(x_TH, w_H, residual_TH, offset)
    x_TH, residual_TH, w_H = x_TH.contiguous(), residual_TH.contiguous(), w_H.contiguous()
    if needs_grad(x_TH, residual_TH, w_H):
        return _AddNorm.apply(x_TH, residual_TH, w_H, eps, offset)
    return _run(x_TH, residual_TH, w_H, eps, offset)


def gated_rmsnorm(x_RD: Tensor, z_RD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    """rmsnorm of x, times silu(z), of x's shape and dtype. Refuses what `spec` refuses."""
    spec.check_gated(x_RD, z_RD, w_D)
    x_RD, z_RD, w_D = x_RD.contiguous(), z_RD.contiguous(), w_D.contiguous()
    if needs_grad(x_RD, z_RD, w_D):
        return _GatedNorm.apply(x_RD, z_RD, w_D, eps)
    return _run_gated(x_RD, z_RD, w_D, eps)
