"""Gradients of causal attention as compiled loops (numba), from the saved output and log-sum-exp, fp32 and bf16.

Notable: no bit contract with the engine; deterministic by a stated order. A score is one accumulator over the head, a
query's gradient one over positions, a key's and a value's one over the group's heads and then the query rows, each
ascending; so nothing depends on the batch, on threads or on where memory lies.

Shapes: T tokens, N query heads, K key-value heads, D head dimension, S sequences; L positions of a sequence in whole
panels, R = `BLOCK` query rows. In scratch memory, in panels of 16 columns, of a sequence and one head: keys and values
by positions [L / 16, D, 16], keys and the two sums by dimension [D / 16, L, 16]; of a block of rows: queries and output
gradients as rows [R, D] and by dimension [D / 16, R, 16], probabilities and gradients of scores by positions
[L / 16, R, 16] and as columns [L, R], and the queries' gradients [D / 16, R, 16]. D is rounded up to whole panels.
"""

import numpy as np

from skyrl_isoexec.kernels.attention.vectors import copy_f32, copy_u16
from skyrl_isoexec.kernels.numeric.cpu import ZERO, compiled, exp, f32, i32, inlined, lane_tree, read, u16, write
from skyrl_isoexec.kernels.numeric.tile import ROWS, rows_f32

BLOCK = 32
"""Query rows that share a pass over the keys, a multiple of `ROWS`."""


def scratch_size(length: int, head_dim: int) -> int:
    """fp32 numbers that `gradients` needs for sequences of up to `length` tokens."""
    positions, width = -(-length // 16) * 16, -(-head_dim // 16) * 16
    return 5 * positions * width + 5 * BLOCK * width + 4 * BLOCK * positions + 2 * BLOCK


@inlined
def _row(x, bf16, first, head_dim, out, step):
    """Row of x from element `first` as fp32, 16 numbers to out, to out + step, ...; what lies past D is left."""
    for d in range(0, head_dim, 16):
        to = out + step * (d // 16)
        if d + 16 > head_dim:
            for j in range(head_dim - d):
                f32(to)[j] = read(x, bf16, first + d + j)
        elif bf16:
            copy_u16(u16(x + 2 * (first + d)), f32(to))
        else:
            copy_f32(f32(x + 4 * (first + d)), f32(to))


@inlined
def _clear(x, count):
    for i in range(count):
        f32(x)[i] = ZERO


@inlined
def _load(x, bf16, first, stride, count, head_dim, width, length, along):
    """Rows first, first + stride, ... of x by dimension [D / 16, L, 16], filled up with zeros."""
    if count < length or head_dim < width:
        _clear(along, width * length)
    for t in range(count):
        _row(x, bf16, first + t * stride, head_dim, along + 64 * t, 64 * length)


@inlined
def _across(along, width, length, out):
    """out [L / 16, D, 16] of along [D / 16, L, 16]."""
    for n in range(0, length, 16):
        for d in range(width):
            source, to = f32(along + 4 * (d // 16 * length * 16 + d % 16)), f32(out + 4 * (n * width + 16 * d))
            for j in range(16):
                to[j] = source[16 * (n + j)]


@inlined
def _rows(along, width, out):
    """out [R, D] of along [D / 16, R, 16]."""
    for i in range(BLOCK):
        for d in range(0, width, 16):
            copy_f32(f32(along + 4 * (d * BLOCK + 16 * i)), f32(out + 4 * (i * width + d)))


@inlined
def _products(rows, width, panels, num_panels, out):
    """out [n, R, 16] = rows [R, D] times panels [n, D, 16]."""
    _clear(out, num_panels * BLOCK * 16)
    for n in range(num_panels):
        for i in range(0, BLOCK, ROWS):
            to = f32(out + 64 * (n * BLOCK + i))
            rows_f32(f32(rows + 4 * i * width), width, f32(panels + 64 * n * width), width, to)


@inlined
def _scores(p, s, delta, bases, lo, count, num_panels, scale):
    """p [n, R, 16]: scores, then probabilities; s: gradients of probabilities, then of products of q and k."""
    for n in range(num_panels):
        for i in range(BLOCK):
            x, base = f32(p + 64 * (n * BLOCK + i)), f32(bases)[i]
            for j in range(16):
                x[j] = x[j] * scale - base
    for i in range(num_panels * BLOCK * 16):
        f32(p)[i] = exp(f32(p)[i])
    for n in range(num_panels):
        for i in range(BLOCK):
            x, y, drop = f32(p + 64 * (n * BLOCK + i)), f32(s + 64 * (n * BLOCK + i)), f32(delta)[i]
            seen = max(lo + i - 16 * n, -1) if i < count else -1
            for j in range(16):
                y[j] = (y[j] - drop) * x[j] * scale
            for j in range(seen + 1, 16):
                x[j] = y[j] = ZERO


@inlined
def _columns(x, num_panels, out):
    """out [L, R] of x [n, R, 16]."""
    for n in range(num_panels):
        for j in range(16):
            source, to = f32(x + 4 * (n * BLOCK * 16 + j)), f32(out + 4 * (16 * n + j) * BLOCK)
            for i in range(BLOCK):
                to[i] = source[16 * i]


@inlined
def _add_columns(columns, num_positions, along, width, length, sums):
    """sums [D / 16, L, 16] += columns [L, R] times along [D / 16, R, 16]."""
    for c in range(width // 16):
        for t in range(0, num_positions, ROWS):
            to = f32(sums + 64 * (c * length + t))
            rows_f32(f32(columns + 4 * t * BLOCK), BLOCK, f32(along + 64 * c * BLOCK), BLOCK, to)


@inlined
def _store(sums, length, count, head_dim, out, bf16, first, stride):
    """Rows of sums [D / 16, L, 16] to out."""
    for t in range(count):
        for d in range(0, head_dim, 16):
            source = f32(sums + 64 * (d // 16 * length + t))
            for j in range(min(16, head_dim - d)):
                write(out, bf16, first + t * stride + d + j, source[j])


@inlined
def _along_output(g_rows, out, bf16, first, stride, count, head_dim, width, lanes_at, delta):
    """delta [R]: each row's gradient times its output, in 16 lanes."""
    lanes = f32(lanes_at)
    for i in range(count):
        row = f32(g_rows + 4 * i * width)
        for j in range(16):
            lanes[j] = ZERO
        for d in range(0, head_dim, 16):
            for j in range(min(16, head_dim - d)):
                lanes[j] += row[d + j] * read(out, bf16, first + i * stride + d + j)
        f32(delta)[i] = lane_tree(lanes)


@compiled
def gradients(
    grad, q, k, v, out, lse, starts, dq, dk, dv, scratch, num_heads, num_kv_heads, head_dim, num_sequences, scale, bf16,
    first_head, last_head,
):  # fmt: skip
    """Addresses of grad, q, out, dq [T, N, D], of k, v, dk, dv [T, K, D], of lse fp32 [T, N] and starts int32 [S + 1].

    `starts` ascend from 0 to T, which the caller has checked. Only for key-value heads first_head .. last_head.
    """
    bounds, scale, group = i32(starts), np.float32(scale), num_heads // num_kv_heads
    width = (head_dim + 15) // 16 * 16
    q_stride, k_stride = num_heads * head_dim, num_kv_heads * head_dim
    for r in range(num_sequences):
        start, size = np.int64(bounds[r]), np.int64(bounds[r + 1]) - np.int64(bounds[r])
        length = (size + 15) // 16 * 16
        keys = scratch
        values, key_rows = keys + 4 * length * width, keys + 8 * length * width
        key_sums, value_sums = keys + 12 * length * width, keys + 16 * length * width
        q_rows = keys + 20 * length * width
        q_along, g_rows = q_rows + 4 * BLOCK * width, q_rows + 8 * BLOCK * width
        g_along, q_sums = q_rows + 12 * BLOCK * width, q_rows + 16 * BLOCK * width
        p = q_rows + 20 * BLOCK * width
        s, p_columns = p + 4 * BLOCK * length, p + 8 * BLOCK * length
        s_columns, delta = p + 12 * BLOCK * length, p + 16 * BLOCK * length
        bases = delta + 4 * BLOCK
        for head in range(first_head, last_head):
            at = start * k_stride + head * head_dim
            _load(v, bf16, at, k_stride, size, head_dim, width, length, key_rows)
            _across(key_rows, width, length, values)
            _load(k, bf16, at, k_stride, size, head_dim, width, length, key_rows)
            _across(key_rows, width, length, keys)
            _clear(key_sums, length * width)
            _clear(value_sums, length * width)
            for h in range(head * group, (head + 1) * group):
                for lo in range(0, size, BLOCK):
                    count = min(BLOCK, size - lo)
                    num_panels = (lo + count + 15) // 16
                    first = (start + lo) * q_stride + h * head_dim
                    _load(q, bf16, first, q_stride, count, head_dim, width, BLOCK, q_along)
                    _load(grad, bf16, first, q_stride, count, head_dim, width, BLOCK, g_along)
                    _rows(q_along, width, q_rows)
                    _rows(g_along, width, g_rows)
                    _along_output(g_rows, out, bf16, first, q_stride, count, head_dim, width, s, delta)
                    for i in range(count):
                        f32(bases)[i] = f32(lse)[(start + lo + i) * num_heads + h]
                    _products(q_rows, width, keys, num_panels, p)
                    _products(g_rows, width, values, num_panels, s)
                    _scores(p, s, delta, bases, lo, count, num_panels, scale)
                    _columns(p, num_panels, p_columns)
                    _columns(s, num_panels, s_columns)
                    _add_columns(p_columns, 16 * num_panels, g_along, width, length, value_sums)
                    _add_columns(s_columns, 16 * num_panels, q_along, width, length, key_sums)
                    _clear(q_sums, BLOCK * width)
                    for c in range(width // 16):
                        for n in range(num_panels):
                            for i in range(0, BLOCK, ROWS):
                                x, to = f32(s + 64 * (n * BLOCK + i)), f32(q_sums + 64 * (c * BLOCK + i))
                                rows_f32(x, 16, f32(key_rows + 64 * (c * length + 16 * n)), 16, to)
                    _store(q_sums, BLOCK, count, head_dim, dq, bf16, first, q_stride)
            _store(key_sums, length, size, head_dim, dk, bf16, at, k_stride)
            _store(value_sums, length, size, head_dim, dv, bf16, at, k_stride)
