"""silu(gate) * up on one core (numba): the same bits as `swiglu.reference`."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.numeric.cpu import ONE, compiled, exp, inlined, needs_grad, read, require_cpu, rounded, write
from skyrl_isoexec.kernels.swiglu import spec


@inlined
def _forward_loop(gate, up, bf16, size, out):
    for i in range(size):
        g = read(gate, bf16, i)
        write(out, bf16, i, rounded(g / (exp(-g) + ONE), bf16) * read(up, bf16, i))


@compiled
def _forward(gate, up, bf16, size, out):
    if bf16:  # a constant in each call, so that each loop is compiled for one dtype
        _forward_loop(gate, up, True, size, out)
    else:
        _forward_loop(gate, up, False, size, out)


@inlined
def _backward_loop(gate, up, dy, bf16, size, dgate, dup):
    for i in range(size):
        g, grad = read(gate, bf16, i), read(dy, bf16, i)
        sigmoid = ONE / (exp(-g) + ONE)
        write(dup, bf16, i, grad * rounded(g * sigmoid, bf16))
        write(dgate, bf16, i, grad * read(up, bf16, i) * (sigmoid * (ONE + g * (ONE - sigmoid))))


@compiled
def _backward(gate, up, dy, bf16, size, dgate, dup):
    if bf16:
        _backward_loop(gate, up, dy, True, size, dgate, dup)
    else:
        _backward_loop(gate, up, dy, False, size, dgate, dup)


def _run(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    require_cpu(gate_TF, up_TF)
    out = torch.empty_like(gate_TF)
    bf16 = int(gate_TF.dtype is torch.bfloat16)
    _forward(gate_TF.data_ptr(), up_TF.data_ptr(), bf16, gate_TF.numel(), out.data_ptr())
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
        dy_TF = dy_TF.contiguous()
        dgate, dup = torch.empty_like(gate_TF), torch.empty_like(up_TF)
        _backward(
            gate_TF.data_ptr(), up_TF.data_ptr(), dy_TF.data_ptr(), int(gate_TF.dtype is torch.bfloat16),
            gate_TF.numel(), dgate.data_ptr(), dup.data_ptr(),
        )  # fmt: skip
        return dgate, dup


def silu_mul(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) * up, of the operands' shape and dtype. Refuses what `spec` refuses."""
    spec.check(gate_TF, up_TF)
    gate_TF, up_TF = gate_TF.contiguous(), up_TF.contiguous()
    if needs_grad(gate_TF, up_TF):
        return _SiluMul.apply(gate_TF, up_TF)
    return _run(gate_TF, up_TF)
