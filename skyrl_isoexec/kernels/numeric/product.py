"""Matrix product in the order of `reference.dot` and `reference.dot_tree` (numba): the arithmetic of every linear.

Work is cut into groups of panels and blocks of rows, so that what a tile reads stays near it; sums go through memory as
fp32, which changes no bit. What must stay equal: the same element has the same bits for every M, N, stride and packing.
"""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.cpu import (
    ZERO,
    compiled,
    f32,
    inlined,
    read,
    require_cpu,
    rounded,
    scratch,
    u16,
    widen,
    write,
)
from skyrl_isoexec.kernels.numeric.panels import PANEL
from skyrl_isoexec.kernels.numeric.threads import spread
from skyrl_isoexec.kernels.numeric.tile import ROWS, row_f32, row_u16, rows_f32, rows_u16

_BF16 = torch.bfloat16
GROUP, BLOCK, DEPTH = 16, 64, 512
"""Panels of a group, rows of a block, and the k of a panel that one pass over a block reads."""
WORTH = 1 << 22
"""Multiplications that a thread must have to do, about 50 microseconds."""


@inlined
def _gather_panel(w, w_bf16, stride_n, stride_k, num_n, num_k, panel):
    """Copy `num_n` <= 16 columns into panel [num_k, 16], along memory in squares; columns past them become zero."""
    for first in range(0, num_k, PANEL):
        size_k = min(PANEL, num_k - first)
        across = stride_n < stride_k
        for i in range(size_k if across else PANEL):
            for j in range(PANEL if across else size_k):
                n, k = (j, first + i) if across else (i, first + j)
                at, to = n * stride_n + k * stride_k, k * PANEL + n
                if w_bf16:
                    u16(panel)[to] = u16(w)[at] if n < num_n else 0
                else:
                    f32(panel)[to] = f32(w)[at] if n < num_n else ZERO


@inlined
def _gather_rows(x, x_bf16, stride_m, stride_k, num_m, num_k, rows):
    """Copy to rows [num_m, num_k] in fp32; along memory in squares where k is not along it."""
    square = num_k if stride_k == 1 else PANEL
    for first in range(0, num_k, square):
        last = min(num_k, first + square)
        for m in range(num_m):
            for k in range(first, last):
                at, to = m * stride_m + k * stride_k, m * num_k + k
                f32(rows)[to] = widen(u16(x)[at]) if x_bf16 else f32(x)[at]


@inlined
def _accumulate(x, x_stride, num_rows, panel, w_bf16, num_k, sums):
    """Add rows [num_rows, num_k] times panel [num_k, 16] to sums [num_rows, 16]."""
    for k in range(0, num_k, DEPTH):
        depth = min(DEPTH, num_k - k)
        m = 0
        while m < num_rows:
            left, to = f32(x + 4 * (m * x_stride + k)), f32(sums + 4 * PANEL * m)
            step = ROWS if m + ROWS <= num_rows else 1
            if w_bf16:
                right = u16(panel + 2 * PANEL * k)
                if step == ROWS:
                    rows_u16(left, x_stride, right, depth, to)
                else:
                    row_u16(left, x_stride, right, depth, to)
            else:
                right = f32(panel + 4 * PANEL * k)
                if step == ROWS:
                    rows_f32(left, x_stride, right, depth, to)
                else:
                    row_f32(left, x_stride, right, depth, to)
            m += step


@inlined
def _store(sums, num_rows, num_columns, bias, bias_bf16, out, out_bf16, stride):
    """Round sums [num_rows, 16] to the result, then add the bias and round again."""
    for m in range(num_rows):
        for n in range(num_columns):
            value = f32(sums)[m * PANEL + n]
            if bias != 0:
                value = rounded(value, out_bf16) + read(bias, bias_bf16, n)
            write(out, out_bf16, m * stride + n, value)


@compiled
def _product(
    x, x_bf16, x_stride, x_inner, num_m, w, w_bf16, packed, stride_n, stride_k, num_n, num_k, leaves, bias,
    bias_bf16, out, out_bf16, out_stride, sums, rows, panels,
):  # fmt: skip
    """Addresses, sizes and strides (in elements); flags are 0 or 1; `sums`, `rows`, `panels` are scratch."""
    x_size, w_size, out_size, bias_size = 4 - 2 * x_bf16, 4 - 2 * w_bf16, 4 - 2 * out_bf16, 4 - 2 * bias_bf16
    leaf_k = num_k // leaves
    for first in range(0, num_n, GROUP * PANEL):
        last = min(num_n, first + GROUP * PANEL)
        base = w + w_size * first * num_k if packed else panels
        if not packed:
            for n in range(first, last, PANEL):
                panel = base + w_size * (n - first) * num_k
                columns = min(PANEL, num_n - n)
                _gather_panel(w + w_size * n * stride_n, w_bf16, stride_n, stride_k, columns, num_k, panel)
        for m in range(0, num_m, BLOCK):
            num_rows, left, left_stride = min(BLOCK, num_m - m), x + 4 * m * x_stride, x_stride
            leaf_sums = num_rows * PANEL
            if x_bf16 or x_inner != 1:
                left, left_stride = rows, num_k
                _gather_rows(x + x_size * m * x_stride, x_bf16, x_stride, x_inner, num_rows, num_k, rows)
            for n in range(first, last, PANEL):
                panel = base + w_size * (n - first) * num_k
                for i in range(leaves * leaf_sums):
                    f32(sums)[i] = ZERO
                for leaf in range(leaves):
                    k = leaf * leaf_k
                    to = sums + 4 * leaf * leaf_sums
                    _accumulate(left + 4 * k, left_stride, num_rows, panel + w_size * PANEL * k, w_bf16, leaf_k, to)
                step = 1
                while step < leaves:
                    for leaf in range(0, leaves, 2 * step):
                        a, b = f32(sums + 4 * leaf * leaf_sums), f32(sums + 4 * (leaf + step) * leaf_sums)
                        for i in range(leaf_sums):
                            a[i] = a[i] + b[i]
                    step *= 2
                to = out + out_size * (m * out_stride + n)
                bias_at = bias + bias_size * n if bias != 0 else 0
                _store(sums, num_rows, min(PANEL, num_n - n), bias_at, bias_bf16, to, out_bf16, out_stride)


def product(
    x_MK: Tensor,
    w_NK: Tensor,
    out_dtype: torch.dtype,
    *,
    packed: Tensor | None = None,
    bias_N: Tensor | None = None,
    num_leaves: int = 1,
) -> Tensor:
    """x w^T of fp32 or bf16 operands, which may be strided, rounded once to `out_dtype`; then + bias, rounded again.

    `num_leaves` cuts K into equal contiguous leaves that are added by a balanced tree before the rounding. With
    `packed` (see `panels`) the weight itself is not read. Columns are spread over torch's threads. The
    caller has checked shapes and dtypes.
    """
    require_cpu(x_MK, w_NK, packed, bias_N)
    num_m, num_k = x_MK.shape
    num_n = w_NK.shape[0]
    x_bf16 = x_MK.dtype is _BF16
    size_sums = num_leaves * BLOCK * PANEL
    size_rows = min(num_m, BLOCK) * num_k if x_bf16 or x_MK.stride(1) != 1 else 0
    if packed is None:
        w, w_bf16 = w_NK.data_ptr(), w_NK.dtype is _BF16
        stride_n, stride_k = w_NK.stride()
        size_panels = min(GROUP, -(-num_n // PANEL)) * PANEL * num_k
    else:
        w, w_bf16 = packed.data_ptr(), packed.dtype is _BF16
        stride_n = stride_k = size_panels = 0
    bias, bias_bf16 = 0, False
    if bias_N is not None:
        bias_N = bias_N.contiguous()
        bias, bias_bf16 = bias_N.data_ptr(), bias_N.dtype is _BF16
    out = torch.empty(num_m, num_n, dtype=out_dtype)
    x, to, element = x_MK.data_ptr(), out.data_ptr(), 2 if w_bf16 else 4

    def part(first: int, last: int) -> None:
        """Columns of panels first .. last."""
        first, last = first * PANEL, min(last * PANEL, num_n)
        sums = scratch(size_sums + size_rows + size_panels)
        _product(
            x, int(x_bf16), *x_MK.stride(), num_m, w + element * first * (num_k if packed is not None else stride_n),
            int(w_bf16), int(packed is not None), stride_n, stride_k, last - first, num_k, num_leaves,
            bias + first * bias_N.itemsize if bias else 0, int(bias_bf16), to + first * out.itemsize,
            int(out_dtype is _BF16), num_n, sums, sums + 4 * size_sums, sums + 4 * (size_sums + size_rows),
        )  # fmt: skip

    spread(-(-num_n // PANEL), WORTH // max(1, num_m * PANEL * num_k), part)
    return out


def product_gradients(
    dy_MN: Tensor, x_MK: Tensor, w_NK: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x w^T for x and for w, where needed: two more products, rounded once to the dtype of each."""
    dx = product(dy_MN, w_NK.t(), x_MK.dtype) if needs[0] else None
    dw = product(dy_MN.t(), x_MK.t(), w_NK.dtype) if needs[1] else None
    return dx, dw
