"""Rotation on Hopper (Triton): the bits of `reference.py`. The backward rotates by the negative angle.

Notable: a position outside the table gives NaN in the rotated dimensions, because a kernel in a captured graph cannot
raise.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.numeric.sm90 import EXACT, narrow, needs_grad, power_of_two, require, require_bf16, widen
from skyrl_isoexec.kernels.numeric.sm90_strides import rows_apart
from skyrl_isoexec.kernels.rope import spec

__all__ = ["rope"]


@triton.jit(do_not_specialize=["num_rows", "num_positions"])
def _rotate(
    x, positions, table, out, num_rows, num_heads, num_positions, width, half, heads, stride, step,
    BACKWARD: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """ROWS heads of any tokens; row = token * num_heads + head. REST, if not 0, holds what is copied of a head.

    Row r of x lies at r // heads * stride + r % heads * step.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)[None, :]
    there = (row[:, None] < num_rows) & (column < half)
    position = tl.load(positions + row // num_heads, mask=row < num_rows, other=0)
    inside = ((position >= 0) & (position < num_positions))[:, None] & there
    at_table = table + position[:, None] * 2 * half + column
    c = tl.load(at_table, mask=inside, other=float("nan"))
    s = tl.load(at_table + half, mask=inside, other=float("nan"))
    if BACKWARD:
        s = -s
    begin = (row // heads * stride + row % heads * step)[:, None]
    at = row[:, None] * width + column
    a = widen(tl.load(x + begin + column, mask=there, other=0.0))
    b = widen(tl.load(x + begin + column + half, mask=there, other=0.0))
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + at, narrow(a * c - b * s, dtype), mask=there)
    tl.store(out + at + half, narrow(b * c + a * s, dtype), mask=there)
    if REST:
        beside = 2 * half + tl.arange(0, REST)[None, :]
        is_copied = (row[:, None] < num_rows) & (beside < width)
        copied = tl.load(x + begin + beside, mask=is_copied)
        tl.store(out + row[:, None] * width + beside, copied, mask=is_copied)


def _run(x_TND: Tensor, positions_T: Tensor, cos_sin_PR: Tensor, backward: bool) -> Tensor:
    positions_T, cos_sin_PR = positions_T.contiguous(), cos_sin_PR.contiguous()
    num_tokens, num_heads, width = x_TND.shape
    x_TND, *places = rows_apart(x_TND)
    out = torch.empty(x_TND.shape, dtype=x_TND.dtype, device=x_TND.device)
    num_positions, rotated = cos_sin_PR.shape
    half, rest = power_of_two(rotated // 2), power_of_two(width - rotated) if width > rotated else 0
    rows = max(1, 1024 // max(half, rest))
    if out.numel():
        _rotate[(triton.cdiv(num_tokens * num_heads, rows),)](
            x_TND, positions_T, cos_sin_PR, out, num_tokens * num_heads, num_heads, num_positions, width, rotated // 2,
            *places, BACKWARD=backward, ROWS=rows, HALF=half, REST=rest, num_warps=4, **EXACT,
        )  # fmt: skip
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
    """x with its first R dimensions rotated, of its shape and dtype. Refuses what `spec` refuses, and fp32.

    A position off the table makes those dimensions NaN.
    """
    spec.check(x_TND, positions_T, cos_sin_PR)
    require_bf16("rope", x_TND)
    require("rope", positions_T, cos_sin_PR)
    if needs_grad(x_TND):
        return _Rope.apply(x_TND, positions_T, cos_sin_PR)
    return _run(x_TND, positions_T, cos_sin_PR, False)
