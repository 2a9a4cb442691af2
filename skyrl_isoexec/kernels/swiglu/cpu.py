"""silu(gate) * up and x * sigmoid(gate) on one core (numba): the same bits as `swiglu.reference`.

Where a gate is shared by a token's elements, its gradient adds them in 16 lanes, ascending, then by the tree.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.numeric.cpu import (
    NUM_LANES,
    ONE,
    ZERO,
    compiled,
    exp,
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


@inlined
def _sigmoid(gate):
    return ONE / (exp(-gate) + ONE)


@inlined
def _sigmoid_loop(x, gate, bf16, num_gates, width, out):
    if width == 1:
        for i in range(num_gates):
            write(out, bf16, i, read(x, bf16, i) * _sigmoid(read(gate, bf16, i)))
    else:
        for t in range(num_gates):
            sigmoid = _sigmoid(read(gate, bf16, t))
            for i in range(t * width, (t + 1) * width):
                write(out, bf16, i, read(x, bf16, i) * sigmoid)


@compiled
def _sigmoid_forward(x, gate, bf16, num_gates, width, out):
    """Each gate for `width` neighbouring elements."""
    if bf16:
        _sigmoid_loop(x, gate, True, num_gates, width, out)
    else:
        _sigmoid_loop(x, gate, False, num_gates, width, out)


@inlined
def _sigmoid_backward_loop(x, gate, dy, bf16, num_gates, width, dx, dgate, lanes_at):
    if width == 1:
        for i in range(num_gates):
            grad, sigmoid = read(dy, bf16, i), _sigmoid(read(gate, bf16, i))
            write(dx, bf16, i, grad * sigmoid)
            write(dgate, bf16, i, grad * read(x, bf16, i) * (sigmoid * (ONE - sigmoid)))
    else:
        lanes = f32(lanes_at)
        for t in range(num_gates):
            sigmoid, first = _sigmoid(read(gate, bf16, t)), t * width
            for lane in range(NUM_LANES):
                lanes[lane] = ZERO
            for start in range(0, width, NUM_LANES):
                for lane in range(min(NUM_LANES, width - start)):
                    i = first + start + lane
                    grad = read(dy, bf16, i)
                    lanes[lane] += grad * read(x, bf16, i)
                    write(dx, bf16, i, grad * sigmoid)
            write(dgate, bf16, t, lane_tree(lanes) * (sigmoid * (ONE - sigmoid)))


@compiled
def _sigmoid_backward(x, gate, dy, bf16, num_gates, width, dx, dgate, lanes_at):
    if bf16:
        _sigmoid_backward_loop(x, gate, dy, True, num_gates, width, dx, dgate, lanes_at)
    else:
        _sigmoid_backward_loop(x, gate, dy, False, num_gates, width, dx, dgate, lanes_at)


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


def _run_sigmoid(x_TF: Tensor, gate: Tensor) -> Tensor:
    require_cpu(x_TF, gate)
    out, width = torch.empty_like(x_TF), spec.gate_width(x_TF, gate)
    bf16 = int(x_TF.dtype is torch.bfloat16)
    _sigmoid_forward(x_TF.data_ptr(), gate.data_ptr(), bf16, gate.numel(), width, out.data_ptr())
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
        dx, dgate = torch.empty_like(x_TF), torch.empty_like(gate)
        _sigmoid_backward(
            x_TF.data_ptr(), gate.data_ptr(), dy_TF.data_ptr(), int(x_TF.dtype is torch.bfloat16), gate.numel(), width,
            dx.data_ptr(), dgate.data_ptr(), scratch(NUM_LANES),
        )  # fmt: skip
        return dx, dgate


def silu_mul(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) * up, of the operands' shape and dtype. Refuses what `spec` refuses."""
    spec.check(gate_TF, up_TF)
    gate_TF, up_TF = gate_TF.contiguous(), up_TF.contiguous()
    if needs_grad(gate_TF, up_TF):
        return _SiluMul.apply(gate_TF, up_TF)
    return _run(gate_TF, up_TF)


def sigmoid_mul(x_TF: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), of x's shape and dtype; gate is [T, F] or [T, 1]. Refuses what `spec` refuses."""
    spec.check_sigmoid(x_TF, gate)
    x_TF, gate = x_TF.contiguous(), gate.contiguous()
    if needs_grad(x_TF, gate):
        return _SigmoidMul.apply(x_TF, gate)
    return _run_sigmoid(x_TF, gate)
