"""The compiled loops of latent attention: one routine for packed rows, prefill and decode, fp32 and bf16.

Notable: keys are read through a table of page starts, so packed rows are one page per sequence. A tile of positions is
widened to fp32 once, as keys and as values into the panels of `softmax_loops`, and serves every row of a chunk. What
must stay equal: the order stated in `reference.py`.

Shapes: T tokens, N query heads, L latent rank, Q width of a key, R requests; a row is a (token, head) pair.
"""

import numpy as np

from skyrl_isoexec.kernels.numeric.cpu import compiled, f32, i32, i64, inlined, read, u16, widen
from skyrl_isoexec.kernels.numeric.softmax_loops import advance, begin, check, finish, merge, parts, parts_size
from skyrl_isoexec.kernels.numeric.tile import ROWS

TILE, CHUNK = 64, 64
"""Positions of a tile (at least a softmax block) and rows that share it (at least a token's); they change no bit."""


def tile_length(kv_block: int) -> int:
    """Positions of a tile: whole softmax blocks."""
    return max(kv_block, TILE // kv_block * kv_block)


def chunk_length(num_heads: int) -> int:
    """Tokens of a chunk."""
    return max(1, CHUNK // num_heads)


def scratch_size(num_heads: int, width: int, latent: int, tile: int) -> int:
    """fp32 numbers that `attend` needs."""
    num_rows = -(-chunk_length(num_heads) * num_heads // ROWS) * ROWS
    return parts_size(num_rows, width, latent, tile)


@inlined
def _load(c, pages, page_size, page_stride, first, count, keys, values, width, latent, tile, is_bf16):
    """Widen positions first .. first + count into the panels of a tile, as keys and as values."""
    for j in range(count):
        page = (first + j) // page_size
        at = np.int64(i32(pages)[page]) * page_stride + (first + j - page * page_size) * width
        column, row = f32(keys + 64 * width * (j >> 4) + 4 * (j & 15)), f32(values + 64 * j)
        if is_bf16:
            for i in range(width):
                column[16 * i] = widen(u16(c)[at + i])
        else:
            for i in range(width):
                column[16 * i] = f32(c)[at + i]
        for i in range(latent):
            row[16 * tile * (i >> 4) + (i & 15)] = column[16 * i]


@compiled
def attend(
    q, c, table, query_start, seq_lens, out, lse, scratch,
    num_tokens, num_heads, width, latent, num_requests, num_pages, num_pages_each, table_stride, page_size, page_stride,
    scale, kv_block, kv_partition, tile, chunk, is_bf16,
):  # fmt: skip
    """Rows query_start[r] .. query_start[r + 1] of q [T, N, Q], at the last positions of request r; writes out and lse.

    The first eight are addresses; table, query_start and seq_lens hold int32; lse [T, N] may be 0. A position's key is
    row position % page_size of the page that begins at table[r, position // page_size] * page_stride of c.
    """
    starts, lengths, pages = i32(query_start), i32(seq_lens), i32(table)
    bad = check(pages, table_stride, num_pages_each, num_pages, page_size, starts, lengths, num_requests, num_tokens)
    if bad:
        return bad
    scale = np.float32(scale)
    sizes = (num_heads, width, latent, tile)
    num_rows = (chunk * num_heads + ROWS - 1) // ROWS * ROWS
    made = parts(scratch, num_rows, sizes)
    keys, values, _, _, rows, _, _, _, _, _, _ = made
    seen = np.empty(ROWS, np.int64)
    for r in range(num_requests):
        last = np.int64(starts[r + 1])
        shift = np.int64(lengths[r]) - last  # from a token's row to its position
        page_row = table + 4 * r * table_stride
        for lo in range(np.int64(starts[r]), last, chunk):
            hi = min(lo + chunk, last)
            first, count = lo + shift, (hi - lo) * num_heads
            for i in range(count * width):
                f32(rows)[i] = read(q, is_bf16, lo * num_heads * width + i)
            for start in range(0, hi + shift, kv_partition):
                stop = min(start + kv_partition, hi + shift)
                begin(made, sizes, count, num_rows)
                for t0 in range(start, stop, tile):
                    t1 = min(t0 + tile, stop)
                    _load(c, page_row, page_size, page_stride, t0, t1 - t0, keys, values, width, latent, tile, is_bf16)
                    advance(made, sizes, first, count, t0, t1, seen, scale, kv_block)
                merge(made, sizes, first, count, start)
            for i in range(count):
                finish(made, sizes, i, lo * num_heads + i, out, lse, is_bf16)
    return 0


@compiled
def store(c, cache, slots, num_rows, num_slots, width, is_bf16):
    """Put rows of c [T, Q] at int64 slots of the cache, addresses first; returns a slot that is too large, or -1."""
    targets = i64(slots)
    for t in range(num_rows):
        if targets[t] >= num_slots:
            return targets[t]
    for t in range(num_rows):
        if targets[t] >= 0:
            for i in range(width):
                if is_bf16:
                    u16(cache)[targets[t] * width + i] = u16(c)[t * width + i]
                else:
                    f32(cache)[targets[t] * width + i] = f32(c)[t * width + i]
    return -1
