"""Rotation on one core (numba): the same bits as `rope.reference`. The backward rotates by the negative angle."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.numeric.cpu import compiled, f32, i32, i64, needs_grad, read, require_cpu, u16, write
from skyrl_isoexec.kernels.rope import spec


@compiled
def _rotate(x, bf16, positions, table, num_positions, num_tokens, num_heads, width, rotated, backward, out):
    """Returns the first token whose position lies outside the table, or -1."""
    half = rotated // 2
    for t in range(num_tokens):
        position = i64(positions)[t]
        if position < 0 or position >= num_positions:
            return t
        row = f32(table + 4 * position * rotated)
        for head in range(num_heads):
            first = (t * num_heads + head) * width
            for d in range(half):
                c, s = row[d], row[half + d]
                s = -s if backward else s
                a, b = read(x, bf16, first + d), read(x, bf16, first + half + d)
                write(out, bf16, first + d, a * c - b * s)
                write(out, bf16, first + half + d, b * c + a * s)
            for d in range(first + rotated, first + width):
                if bf16:
                    u16(out)[d] = u16(x)[d]
                else:
                    i32(out)[d] = i32(x)[d]
    return -1


def _run(x_TND: Tensor, positions_T: Tensor, cos_sin_PR: Tensor, backward: bool) -> Tensor:
    require_cpu(x_TND, positions_T, cos_sin_PR)
    x_TND, positions_T, cos_sin_PR = x_TND.contiguous(), positions_T.contiguous(), cos_sin_PR.contiguous()
    num_tokens, num_heads, width = x_TND.shape
    out = torch.empty_like(x_TND)
    refused = _rotate(
        x_TND.data_ptr(), int(x_TND.dtype is torch.bfloat16), positions_T.data_ptr(), cos_sin_PR.data_ptr(),
        cos_sin_PR.shape[0], num_tokens, num_heads, width, cos_sin_PR.shape[1], int(backward), out.data_ptr(),
    )  # fmt: skip
    if refused >= 0:
        spec.refuse_position(positions_T, refused, cos_sin_PR.shape[0])
    return out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TND, positions_T, cos_sin_PR):
        ctx.save_for_backward(positions_T, cos_sin_PR)
        return _run(x_TND, positions_T, cos_sin_PR, False)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TND):
        return _run(dy_TND, *ctx.saved_tensors, True), None, None


def rope(x_TND: Tensor, positions_T: Tensor, cos_sin_PR: Tensor) -> Tensor:
    """x with its first R dimensions rotated, of its shape and dtype. Refuses what `spec` refuses.

    IndexError for a position outside the table.
    """
    spec.check(x_TND, positions_T, cos_sin_PR)
    if needs_grad(x_TND):
        return _Rope.apply(x_TND, positions_T, cos_sin_PR)
    return _run(x_TND, positions_T, cos_sin_PR, False)
