"""silu(gate) * up and x * sigmoid(gate) on Hopper (Triton): the bits of `reference.py`, the exponential included.

Notable: where a gate is shared by a token's elements, its gradient adds blocks of them in ascending order, element by
element, and the sums of a block by the balanced tree.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.numeric.sm90 import EXACT, exp, narrow, needs_grad, power_of_two, require_bf16, tree, widen
from skyrl_isoexec.kernels.swiglu import spec

__all__ = ["sigmoid_mul", "silu_mul"]

BLOCK, WARPS = 1024, 4
"""Elements and warps of a program: change no bit of a forward."""


@triton.jit
def _forward(gate, up, out, size, width, gate_stride, up_stride, APART: tl.constexpr, BLOCK: tl.constexpr):
    """APART: rows of `width` elements lie gate_stride and up_stride apart, else end to end."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    at_gate, at_up = at, at
    if APART:
        row, column = at // width, at % width
        at_gate, at_up = row * gate_stride + column, row * up_stride + column
    g = widen(tl.load(gate + at_gate, mask=there, other=0.0))
    u = widen(tl.load(up + at_up, mask=there, other=0.0))
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


@triton.jit
def _sigmoid(gate):
    return tl.div_rn(tl.zeros_like(gate) + 1.0, exp(-gate) + 1.0)


@triton.jit
def _sigmoid_forward(x, gate, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    value = widen(tl.load(x + at, mask=there, other=0.0))
    sigmoid = _sigmoid(widen(tl.load(gate + at, mask=there, other=0.0)))
    tl.store(out + at, narrow(value * sigmoid, out.dtype.element_ty), mask=there)


@triton.jit
def _sigmoid_backward(x, gate, dy, dx, dgate, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    value = widen(tl.load(x + at, mask=there, other=0.0))
    grad = widen(tl.load(dy + at, mask=there, other=0.0))
    sigmoid = _sigmoid(widen(tl.load(gate + at, mask=there, other=0.0)))
    dtype: tl.constexpr = dx.dtype.element_ty
    tl.store(dx + at, narrow(grad * sigmoid, dtype), mask=there)
    tl.store(dgate + at, narrow(grad * value * (sigmoid * (1.0 - sigmoid)), dtype), mask=there)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _shared_forward(x, gate, out, num_rows, width, num_blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A block of the elements of ROWS tokens; each token's share its gate."""
    row = (tl.program_id(0) // num_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    there = (row[:, None] < num_rows) & (column[None, :] < width)
    at = row[:, None] * width + column[None, :]
    sigmoid = _sigmoid(widen(tl.load(gate + row, mask=row < num_rows, other=0.0)))
    value = widen(tl.load(x + at, mask=there, other=0.0))
    tl.store(out + at, narrow(value * sigmoid[:, None], out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num_rows"])
def _shared_backward(x, gate, dy, dx, dgate, num_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """All elements of ROWS tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    sigmoid = _sigmoid(widen(tl.load(gate + row, mask=row < num_rows, other=0.0)))
    dtype: tl.constexpr = dx.dtype.element_ty
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        there = (row[:, None] < num_rows) & (column[None, :] < width)
        at = row[:, None] * width + column[None, :]
        value = widen(tl.load(x + at, mask=there, other=0.0))
        grad = widen(tl.load(dy + at, mask=there, other=0.0))
        sums += grad * value
        tl.store(dx + at, narrow(grad * sigmoid[:, None], dtype), mask=there)
    total = tree(sums, ROWS, BLOCK) * (sigmoid * (1.0 - sigmoid))
    tl.store(dgate + row, narrow(total, dtype), mask=row < num_rows)


def _blocks(width: int) -> tuple[int, int, int]:
    """(tokens, elements of one, blocks of a row) of a tile whose gates are shared; decides the order of a gradient."""
    block = min(BLOCK, power_of_two(width))
    return BLOCK // block, block, triton.cdiv(width, block)


def _run(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    gate_TF, up_TF = (x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous() for x in (gate_TF, up_TF))
    out, size = torch.empty(gate_TF.shape, dtype=gate_TF.dtype, device=gate_TF.device), gate_TF.numel()
    if size:
        _forward[(triton.cdiv(size, BLOCK),)](
            gate_TF, up_TF, out, size, gate_TF.shape[-1], gate_TF.stride(0), up_TF.stride(0),
            APART=not (gate_TF.is_contiguous() and up_TF.is_contiguous()), BLOCK=BLOCK, num_warps=WARPS, **EXACT,
        )  # fmt: skip
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


def _run_sigmoid(x_TF: Tensor, gate: Tensor) -> Tensor:
    out, size, width = torch.empty_like(x_TF), x_TF.numel(), spec.gate_width(x_TF, gate)
    if size and width == 1:
        _sigmoid_forward[(triton.cdiv(size, BLOCK),)](x_TF, gate, out, size, BLOCK=BLOCK, num_warps=WARPS, **EXACT)
    elif size:
        num_rows, (rows, block, num_blocks) = gate.numel(), _blocks(width)
        _shared_forward[(triton.cdiv(num_rows, rows) * num_blocks,)](
            x_TF, gate, out, num_rows, width, num_blocks, ROWS=rows, BLOCK=block, num_warps=WARPS, **EXACT
        )
    return out


class _SigmoidMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TF, gate):
        ctx.save_for_backward(x_TF, gate)
        return _run_sigmoid(x_TF, gate)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TF):
        x_TF, gate = ctx.saved_tensors
        dy_TF, width = dy_TF.contiguous(), spec.gate_width(x_TF, gate)
        dx, dgate, size = torch.empty_like(x_TF), torch.zeros_like(gate), x_TF.numel()
        if size and width == 1:
            _sigmoid_backward[(triton.cdiv(size, BLOCK),)](
                x_TF, gate, dy_TF, dx, dgate, size, BLOCK=BLOCK, num_warps=WARPS, **EXACT
            )
        elif size:
            num_rows, (rows, block, _) = gate.numel(), _blocks(width)
            _shared_backward[(triton.cdiv(num_rows, rows),)](
                x_TF, gate, dy_TF, dx, dgate, num_rows, width, ROWS=rows, BLOCK=block, num_warps=WARPS, **EXACT
            )
        return dx, dgate


def silu_mul(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) * up, of the operands' shape and dtype. Refuses what `spec` refuses, and fp32."""
    spec.check(gate_TF, up_TF)
    require_bf16("silu_mul", gate_TF, up_TF)
    if needs_grad(gate_TF, up_TF):
        return _SiluMul.apply(gate_TF.contiguous(), up_TF.contiguous())
    return _run(gate_TF, up_TF)


def sigmoid_mul(x_TF: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), of x's shape and dtype; gate is [T, F] or [T, 1]. Refuses what `spec` refuses, and fp32."""
    spec.check_sigmoid(x_TF, gate)
    require_bf16("sigmoid_mul", x_TF, gate)
    x_TF, gate = x_TF.contiguous(), gate.contiguous()
    if needs_grad(x_TF, gate):
        return _SigmoidMul.apply(x_TF, gate)
    return _run_sigmoid(x_TF, gate)
