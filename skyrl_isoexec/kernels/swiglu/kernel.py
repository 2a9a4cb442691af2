"""silu(gate) * up on Hopper (Triton): the bits of `reference.py`, the exponential included."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.numeric.sm90 import EXACT, exp, narrow, needs_grad, require_bf16, widen
from skyrl_isoexec.kernels.swiglu import spec

__all__ = ["silu_mul"]

BLOCK, WARPS = 1024, 4
"""Elements and warps of a program: change no bit."""


@triton.jit
def _forward(gate, up, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    g = widen(tl.load(gate + at, mask=there, other=0.0))
    u = widen(tl.load(up + at, mask=there, other=0.0))
    dtype: tl.constexpr = out.dtype.element_ty
    silu = narrow(tl.div_rn(g, exp(-g) + 1.0), dtype)
    tl.store(out + at, narrow(widen(silu) * u, dtype), mask=there)


@triton.jit
def _backward(gate, up, dy, dgate, dup, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    g = widen(tl.load(gate + at, mask=there, other=0.0))
    u = widen(tl.load(up + at, mask=there, other=0.0))
    grad = widen(tl.load(dy + at, mask=there, other=0.0))
    dtype: tl.constexpr = dgate.dtype.element_ty
    sigmoid = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), exp(-g) + 1.0)
    tl.store(dup + at, narrow(grad * widen(narrow(g * sigmoid, dtype)), dtype), mask=there)
    tl.store(dgate + at, narrow(grad * u * (sigmoid * (1.0 + g * (1.0 - sigmoid))), dtype), mask=there)


def _run(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    out, size = torch.empty_like(gate_TF), gate_TF.numel()
    if size:
        _forward[(triton.cdiv(size, BLOCK),)](gate_TF, up_TF, out, size, BLOCK=BLOCK, num_warps=WARPS, **EXACT)
    return out


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_TF, up_TF):
        ctx.save_for_backward(gate_TF, up_TF)
        return _run(gate_TF, up_TF)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TF):
        gate_TF, up_TF = ctx.saved_tensors
        dgate, dup, size = torch.empty_like(gate_TF), torch.empty_like(up_TF), gate_TF.numel()
        if size:
            _backward[(triton.cdiv(size, BLOCK),)](
                gate_TF, up_TF, dy_TF.contiguous(), dgate, dup, size, BLOCK=BLOCK, num_warps=WARPS, **EXACT
            )
        return dgate, dup


def silu_mul(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) * up, of the operands' shape and dtype. Refuses what `spec` refuses, and fp32."""
    spec.check(gate_TF, up_TF)
    require_bf16("silu_mul", gate_TF, up_TF)
    gate_TF, up_TF = gate_TF.contiguous(), up_TF.contiguous()
    if needs_grad(gate_TF, up_TF):
        return _SiluMul.apply(gate_TF, up_TF)
    return _run(gate_TF, up_TF)
