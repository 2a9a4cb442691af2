"""The Triton kernels of a grouped linear: one launch for any spread of rows over experts, and its two gradients.

Notable: the host knows the number of rows and of experts, never which rows are whose. A fixed number of programs walks
over all tiles there are; the tile's expert is found from `starts` on the device. The product of a tile is the one every
linear is made of, so a row has the linear's bits. What must stay equal: the bits, under every tile.

Group 0 and group E + 1 are the rows of nobody: their depth is 0, so their sum is +0.

Shapes: S rows, E experts, N columns, K depth.
"""

import triton
import triton.language as tl

from skyrl_isoexec.kernels.numeric.sm90 import SUM_TYPE, dot, narrow
from skyrl_isoexec.kernels.numeric.sm90_product import leaf_sum


@triton.jit
def _bound(starts, at, num_rows):
    """starts[at], held within the rows: whatever stands there, nothing outside is touched."""
    return tl.minimum(tl.maximum(tl.load(starts + at), 0), num_rows)


@triton.jit
def _ends(starts, num_rows, num_experts, num_columns, BM: tl.constexpr, GROUPS: tl.constexpr):
    """int32 [GROUPS]: the number of tiles up to the end of each group; it stays the same after the last."""
    group = tl.arange(0, GROUPS)
    first = tl.where(group == 0, 0, _bound(starts, tl.minimum(tl.maximum(group - 1, 0), num_experts), num_rows))
    last = tl.where(group > num_experts, num_rows, _bound(starts, tl.minimum(group, num_experts), num_rows))
    tiles = tl.cdiv(tl.maximum(last - first, 0), BM) * num_columns
    return tl.cumsum(tl.where(group <= num_experts + 1, tiles, 0), 0)


@triton.jit
def _place(tile, ends, starts, num_rows, num_experts, BM: tl.constexpr):
    """(expert, whether it is one, first row, end of its rows, tile column) of a tile: rows fastest, then columns."""
    group = tl.sum((ends <= tile).to(tl.int32), 0)
    tile -= tl.max(tl.where(ends <= tile, ends, 0), 0)
    first, last = tile * 0, tile * 0 + num_rows
    if group > 0:
        first = _bound(starts, group - 1, num_rows)
    if group <= num_experts:
        last = _bound(starts, group, num_rows)
    height = tl.cdiv(last - first, BM)
    is_expert = (group > 0) & (group <= num_experts)
    expert = tl.where(is_expert, group - 1, 0)
    return expert, is_expert, first + tile % height * BM, last, tile // height


@triton.jit
def _across(x, w, rows, columns, num_n, stride_x, stride_w, depth, BK: tl.constexpr, WHOLE: tl.constexpr):
    """fp32 [rows, columns] sum over k < depth of x[row, k] w[k, column]: w is read along its columns."""
    k, inside = tl.arange(0, BK), columns[None, :] < num_n  # a mask: a bound on the index would part its neighbours
    acc = tl.zeros((rows.shape[0], columns.shape[0]), SUM_TYPE)
    for start in range(0, depth, BK):
        at = start + k
        left = x + rows[:, None] * stride_x + at[None, :]
        right = w + at.to(tl.int64)[:, None] * stride_w + columns[None, :]
        if WHOLE:
            acc = dot(tl.load(left), tl.load(right, inside, other=0.0), acc)
        else:
            there = at < depth
            right = tl.load(right, there[:, None] & inside, other=0.0)
            acc = dot(tl.load(left, there[None, :], other=0.0), right, acc)
    return acc.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])  # one program for every number of rows
def grouped(
    x, w, starts, out, num_rows, num_experts, num_n, depth, stride_x, stride_e, stride_w,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, ACROSS: tl.constexpr,
    WHOLE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """out [S, N] = x w[e]^T for w [E, N, K], or, where ACROSS, x w[e] for w [E, K, N]; loads through pointers."""
    ends = _ends(starts, num_rows, num_experts, tl.cdiv(num_n, BN), BM, GROUPS)
    for tile in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        expert, is_expert, row, last, column = _place(tile, ends, starts, num_rows, num_experts, BM)
        rows, columns = (row + tl.arange(0, BM)).to(tl.int64), (column * BN + tl.arange(0, BN)).to(tl.int64)
        at_rows, at_columns = tl.minimum(rows, last - 1), tl.minimum(columns, num_n - 1)
        mine = w + expert.to(tl.int64) * stride_e
        here = tl.where(is_expert, depth, 0)
        if ACROSS:
            node = _across(x, mine, at_rows, columns, num_n, stride_x, stride_w, here, BK, WHOLE)
        else:
            node = leaf_sum(x, mine, at_rows, at_columns, stride_x, stride_w, tile * 0, here, BK, SWAP, WHOLE)
        y = narrow(node, out.dtype.element_ty)
        if SWAP:
            there = (columns[:, None] < num_n) & (rows[None, :] < last)
            tl.store(out + rows[None, :] * num_n + columns[:, None], y, mask=there)
        else:
            there = (rows[:, None] < last) & (columns[None, :] < num_n)
            tl.store(out + rows[:, None] * num_n + columns[None, :], y, mask=there)


@triton.jit(do_not_specialize=["num_rows"])
def grouped_tma(
    x, w, starts, out, num_rows, num_experts, num_n, depth,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """As `grouped`, loads through the copy engine, from w as [E * N, K]; what is loaded of a neighbour is dropped."""
    ends = _ends(starts, num_rows, num_experts, tl.cdiv(num_n, BN), BM, GROUPS)
    for tile in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        expert, is_expert, row, last, column = _place(tile, ends, starts, num_rows, num_experts, BM)
        acc = tl.zeros((BM, BN), SUM_TYPE)
        for k in range(0, tl.where(is_expert, depth, 0), BK):
            acc = dot(x.load([row, k]), w.load([expert * num_n + column * BN, k]).T, acc)
        rows, columns = (row + tl.arange(0, BM)).to(tl.int64)[:, None], (column * BN + tl.arange(0, BN))[None, :]
        y = narrow(acc.to(tl.float32), out.dtype.element_ty)
        tl.store(out + rows * num_n + columns, y, mask=(rows < last) & (columns < num_n))


@triton.jit(do_not_specialize=["num_rows"])
def weight_gradient(
    dy, x, starts, dw, num_rows, num_n, num_k, stride_dy, stride_x, BN: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr
):
    """dw [E, N, K] = dy^T x over the rows of each expert, ascending in one accumulator; a tile and an expert each."""
    tile, expert = tl.program_id(0), tl.program_id(1)
    across = tl.cdiv(num_k, BK)
    n, k = (tile // across * BN + tl.arange(0, BN))[:, None], (tile % across * BK + tl.arange(0, BK))[None, :]
    first, last = _bound(starts, expert, num_rows), _bound(starts, expert + 1, num_rows)
    acc = tl.zeros((BN, BK), SUM_TYPE)
    for start in range(first, last, BM):
        rows = (start + tl.arange(0, BM)).to(tl.int64)
        left = tl.load(dy + rows[None, :] * stride_dy + n, mask=(rows[None, :] < last) & (n < num_n), other=0.0)
        right = tl.load(x + rows[:, None] * stride_x + k, mask=(rows[:, None] < last) & (k < num_k), other=0.0)
        acc = dot(left, right, acc)
    to = (expert.to(tl.int64) * num_n + n) * num_k + k
    tl.store(dw + to, narrow(acc.to(tl.float32), dw.dtype.element_ty), mask=(n < num_n) & (k < num_k))
