"""The compiled loops of causal attention: one routine for packed rows, prefill and decode, fp32 and bf16.

Notable: keys and values are read through strides and a table of page starts, so contiguous rows are one page per
sequence. A tile of positions is widened to fp32 once, into the panels of `softmax_loops`, and serves every row of a
chunk. What must stay equal: the order stated in `reference.py`.

Shapes: T tokens, N query heads, K key-value heads, D head dimension, R requests; a row is a (token, head) pair.
"""

import numpy as np

from skyrl_isoexec.kernels.attention.vectors import copy_f32, copy_u16
from skyrl_isoexec.kernels.numeric.cpu import compiled, f32, i32, inlined, read, u16
from skyrl_isoexec.kernels.numeric.softmax_loops import advance, begin, check, finish, merge, parts, parts_size
from skyrl_isoexec.kernels.numeric.tile import ROWS

TILE, CHUNK = 128, 32
"""Positions of a tile (at least one softmax block) and tokens that share it; neither changes a bit."""


def tile_length(kv_block: int) -> int:
    """Positions of a tile: whole softmax blocks."""
    return max(kv_block, TILE // kv_block * kv_block)


def scratch_size(num_tokens: int, group: int, head_dim: int, tile: int) -> int:
    """fp32 numbers that `attend` needs."""
    num_rows = -(-min(CHUNK, num_tokens) * group // ROWS) * ROWS
    return parts_size(num_rows, head_dim, head_dim, tile)


@inlined
def _load(k, v, pages, layout, head, first, count, keys, values, head_dim, tile, is_bf16):
    """Widen positions first .. first + count of one head into the panels of a tile."""
    page_size, page_stride, head_stride, k_position, k_dim, v_position = layout
    size = 4 - 2 * is_bf16
    done = 0
    while done < count:
        page = (first + done) // page_size
        offset = first + done - page * page_size
        column = done & 15
        run = min(page_size - offset, count - done, 16 - column)
        base = np.int64(i32(pages)[page]) * page_stride + head * head_stride
        panel, start = keys + 64 * head_dim * (done >> 4), base + offset * k_position
        if k_position == 1 and column == 0 and offset + 16 <= page_size:
            for d in range(head_dim):
                if is_bf16:
                    copy_u16(u16(k + 2 * (start + d * k_dim)), f32(panel + 64 * d))
                else:
                    copy_f32(f32(k + 4 * (start + d * k_dim)), f32(panel + 64 * d))
        else:
            for j in range(run):
                for d in range(head_dim):
                    f32(panel)[16 * d + column + j] = read(k, is_bf16, start + j * k_position + d * k_dim)
        for j in range(run):
            source, target = v + size * (base + (offset + j) * v_position), values + 64 * (done + j)
            for d in range(0, head_dim, 16):
                if d + 16 > head_dim:
                    for l in range(head_dim - d):
                        f32(target + 4 * tile * d)[l] = read(source, is_bf16, d + l)
                elif is_bf16:
                    copy_u16(u16(source + 2 * d), f32(target + 4 * tile * d))
                else:
                    copy_f32(f32(source + 4 * d), f32(target + 4 * tile * d))
        done += run


@compiled
def attend(
    q, k, v, table, query_start, seq_lens, out, lse, scratch,
    num_tokens, num_heads, num_kv_heads, head_dim, num_requests, num_pages, num_pages_each, table_stride,
    page_size, page_stride, head_stride, k_position, k_dim, v_position,
    scale, kv_block, kv_partition, tile, is_bf16, first_head, last_head,
):  # fmt: skip
    """Rows query_start[r] .. query_start[r + 1] of q [T, N, D], at the last positions of request r; writes out and lse.

    Only for key-value heads first_head .. last_head. The first nine are addresses; table, query_start and seq_lens
    hold int32; lse [T, N] may be 0. In k, element d of a head at a position lies at table[r, position // page_size]
    * page_stride + head * head_stride + (position % page_size) * k_position + d * k_dim, and in v the same with
    v_position and 1.
    """
    starts, lengths, pages = i32(query_start), i32(seq_lens), i32(table)
    bad = check(pages, table_stride, num_pages_each, num_pages, page_size, starts, lengths, num_requests, num_tokens)
    if bad:
        return bad
    layout = (page_size, page_stride, head_stride, k_position, k_dim, v_position)
    scale, group = np.float32(scale), num_heads // num_kv_heads
    sizes = (group, head_dim, head_dim, tile)
    num_rows = (min(CHUNK, num_tokens) * group + ROWS - 1) // ROWS * ROWS
    made = parts(scratch, num_rows, sizes)
    keys, values, _, _, rows, _, _, _, _, _, _ = made
    seen = np.empty(ROWS, np.int64)
    for r in range(num_requests):
        last = np.int64(starts[r + 1])
        shift = np.int64(lengths[r]) - last  # from a token's row to its position
        page_row = table + 4 * r * table_stride
        for head in range(first_head, last_head):
            for lo in range(np.int64(starts[r]), last, CHUNK):
                hi = min(lo + CHUNK, last)
                first, count = lo + shift, (hi - lo) * group
                for i in range(count):
                    t, h = lo + i // group, head * group + i % group
                    for d in range(head_dim):
                        f32(rows)[i * head_dim + d] = read(q, is_bf16, (t * num_heads + h) * head_dim + d)
                for start in range(0, hi + shift, kv_partition):
                    stop = min(start + kv_partition, hi + shift)
                    begin(made, sizes, count, num_rows)
                    for t0 in range(start, stop, tile):
                        t1 = min(t0 + tile, stop)
                        _load(k, v, page_row, layout, head, t0, t1 - t0, keys, values, head_dim, tile, is_bf16)
                        advance(made, sizes, first, count, t0, t1, seen, scale, kv_block)
                    merge(made, sizes, first, count, start)
                for i in range(count):
                    row = (lo + i // group) * num_heads + head * group + i % group
                    finish(made, sizes, i, row, out, lse, is_bf16)
    return 0
