"""The compiled loops of causal attention: one routine for packed rows, prefill and decode, fp32 and bf16.

Notable: keys and values are read through strides and a table of page starts, so contiguous rows are one page per
sequence. A tile of positions is widened to fp32 once, in panels of 16, and serves every row of a chunk, four rows at a
time. The vector axis is the positions for scores and the head for the accumulator, never a sum, so that tiles, chunks
and groups of rows cannot change a bit. What must stay equal: the order stated in `reference.py`.

Shapes: T tokens, N query heads, K key-value heads, D head dimension, R requests; a row is a (token, head) pair. In
scratch memory: keys [tile / 16, D, 16], values [D / 16, tile, 16], of a group of 4 rows scores [tile / 16, 4, 16] and
accumulators [D / 16, 4, 16], with D rounded up to whole panels. What lies past a row's positions or past D is garbage.
"""

import numpy as np

from skyrl_isoexec.kernels.attention.vectors import copy_f32, copy_u16
from skyrl_isoexec.kernels.numeric.cpu import (
    ZERO,
    compiled,
    exp,
    f32,
    i32,
    inlined,
    lane_tree,
    read,
    u16,
    write,
)
from skyrl_isoexec.kernels.numeric.tile import ROWS, row_f32, rows_f32

TILE, CHUNK = 128, 32
"""Positions of a tile (at least one softmax block) and tokens that share it; neither changes a bit."""
GROUP = 16 * ROWS
"""Elements of a panel of a group of rows."""
NEG_INF, NAN = np.float32(-np.inf), np.float32(np.nan)

BAD_QUERY, BAD_LENGTH, BAD_PAGE = 1, 2, 3
"""What `attend` returns, plus 4 * request, where query rows, length or pages are out of bounds; 0 is success."""


def tile_length(kv_block: int) -> int:
    """Positions of a tile: whole softmax blocks."""
    return max(kv_block, TILE // kv_block * kv_block)


def scratch_size(num_tokens: int, group: int, head_dim: int, tile: int) -> int:
    """fp32 numbers that `attend` needs: the parts in the order in which it lays them out."""
    num_rows, width = -(-min(CHUNK, num_tokens) * group // ROWS) * ROWS, -(-head_dim // 16) * 16
    return tile * (head_dim + width + 2 * ROWS) + num_rows * (head_dim + 2 * width + 16 + 3)


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


@inlined
def _base(m):
    """What is subtracted in exponents for a maximum m."""
    return ZERO if m == NEG_INF else m


@inlined
def _maxima(s, maxima, r, seen, kv_block, m):
    """maxima[r, j] = row r's running maximum after j's block; a NaN is missed here, its exponential brings it in."""
    for start in range(0, seen, kv_block):
        stop = min(start + kv_block, seen)
        for b in range(start, stop, 16):
            row = f32(s + 4 * ROWS * b + 64 * r)
            for l in range(min(16, stop - b)):
                m = row[l] if row[l] > m else m
        for b in range(start, stop, 16):
            row = f32(maxima + 4 * ROWS * b + 64 * r)
            for l in range(16):
                row[l] = m


@inlined
def _rescale(r, alpha, acc, lanes, head_dim):
    """Multiply row r's sums by alpha."""
    for l in range(16):
        lanes[16 * r + l] *= alpha
    for d in range(0, head_dim, 16):
        panel = f32(acc + 4 * ROWS * d + 64 * r)
        for l in range(16):
            panel[l] *= alpha


@inlined
def _group_tile(rows, num_rows, seen, keys, values, s, maxima, m, lanes, acc, head_dim, tile, scale, kv_block):
    """Advance a group of rows over a tile, of which row r sees the first seen[r] positions, ascending in r."""
    least, most = seen[0], seen[num_rows - 1]
    panels = (most + 15) // 16
    p, top = f32(s), f32(maxima)
    for i in range(panels * GROUP):
        p[i] = ZERO
    for n in range(panels):
        if num_rows > 1:
            rows_f32(f32(rows), head_dim, f32(keys + 64 * head_dim * n), head_dim, f32(s + 4 * GROUP * n))
        else:
            row_f32(f32(rows), head_dim, f32(keys + 64 * head_dim * n), head_dim, f32(s + 4 * GROUP * n))
    for i in range(panels * GROUP):
        p[i] = p[i] * scale
    for r in range(num_rows):
        _maxima(s, maxima, r, seen[r], kv_block, m[r])
    for i in range(panels * GROUP):
        p[i] = exp(p[i] - _base(top[i]))
    for start in range(0, most, kv_block):
        stop = min(start + kv_block, most)
        for r in range(num_rows):
            if seen[r] <= start:
                continue
            new = top[ROWS * start + 16 * r]
            if new != m[r]:
                _rescale(r, exp(m[r] - _base(new)), acc, lanes, head_dim)
                m[r] = new
            for b in range(start, min(stop, seen[r]), 16):
                for l in range(min(16, seen[r] - b)):
                    lanes[16 * r + l] += p[ROWS * b + 16 * r + l]
        for b in range(start, stop, 16):
            shared = min(16, least - b)
            if num_rows > 1 and shared == min(16, most - b):
                for d in range(0, head_dim, 16):
                    panel = f32(values + 64 * b + 4 * tile * d)
                    rows_f32(f32(s + 4 * ROWS * b), 16, panel, shared, f32(acc + 4 * ROWS * d))
                continue
            for r in range(num_rows):
                if seen[r] > b:
                    for d in range(0, head_dim, 16):
                        panel, to = f32(values + 64 * b + 4 * tile * d), f32(acc + 4 * ROWS * d + 64 * r)
                        row_f32(f32(s + 4 * ROWS * b + 64 * r), 16, panel, min(16, seen[r] - b), to)


@inlined
def _merge(is_first, r, m, l, acc, M, L, total, head_dim):
    """Merge row r's partition (m, l, acc) into its running result; the first partition is taken as it is."""
    new = M[r] if M[r] > m[r] else m[r]
    x, y = exp(M[r] - _base(new)), exp(m[r] - _base(new))
    for d in range(0, head_dim, 16):
        part, whole = f32(acc + 4 * ROWS * d + 64 * r), f32(total + 4 * ROWS * d + 64 * r)
        for i in range(16):
            whole[i] = part[i] if is_first else whole[i] * x + part[i] * y
    L[r] = l if is_first else L[r] * x + l * y
    M[r] = m[r] if is_first else new


@inlined
def _check(table, table_stride, num_pages_each, num_pages, page_size, starts, lengths, num_requests, num_tokens):
    """Code of the first request whose rows or pages lie outside what was given, or 0."""
    for r in range(num_requests):
        lo, hi, length = np.int64(starts[r]), np.int64(starts[r + 1]), np.int64(lengths[r])
        if lo < 0 or hi < lo or hi > num_tokens or hi - lo > length:
            return BAD_QUERY + 4 * r
        used = (length + page_size - 1) // page_size if hi > lo else 0
        if used > num_pages_each:
            return BAD_LENGTH + 4 * r
        for b in range(used):
            if table[r * table_stride + b] < 0 or table[r * table_stride + b] >= num_pages:
                return BAD_PAGE + 4 * r
    return 0


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
    bad = _check(pages, table_stride, num_pages_each, num_pages, page_size, starts, lengths, num_requests, num_tokens)
    if bad:
        return bad
    layout = (page_size, page_stride, head_stride, k_position, k_dim, v_position)
    scale = np.float32(scale)
    group, width = num_heads // num_kv_heads, (head_dim + 15) // 16 * 16
    num_rows = (min(CHUNK, num_tokens) * group + ROWS - 1) // ROWS * ROWS
    keys, values = scratch, scratch + 4 * tile * head_dim
    s = values + 4 * tile * width
    maxima = s + 4 * tile * ROWS
    rows = maxima + 4 * tile * ROWS
    acc = rows + 4 * num_rows * head_dim
    total = acc + 4 * num_rows * width
    lanes = total + 4 * num_rows * width
    m = lanes + 4 * num_rows * 16
    M, L = m + 4 * num_rows, m + 8 * num_rows
    seen = np.empty(ROWS, np.int64)
    for r in range(num_requests):
        last = np.int64(starts[r + 1])
        shift = np.int64(lengths[r]) - last  # from a token's row to its position
        for head in range(first_head, last_head):
            for lo in range(np.int64(starts[r]), last, CHUNK):
                hi = min(lo + CHUNK, last)
                count = (hi - lo) * group
                for i in range(count):
                    t, h = lo + i // group, head * group + i % group
                    for d in range(head_dim):
                        f32(rows)[i * head_dim + d] = read(q, is_bf16, (t * num_heads + h) * head_dim + d)
                for start in range(0, hi + shift, kv_partition):
                    stop = min(start + kv_partition, hi + shift)
                    for i in range(count):
                        f32(m)[i] = NEG_INF
                    for i in range(num_rows * 16):
                        f32(lanes)[i] = ZERO
                    for i in range(num_rows * width):
                        f32(acc)[i] = ZERO
                    for t0 in range(start, stop, tile):
                        t1 = min(t0 + tile, stop)
                        page_row = table + 4 * r * table_stride
                        _load(k, v, page_row, layout, head, t0, t1 - t0, keys, values, head_dim, tile, is_bf16)
                        for i in range(0, count, ROWS):
                            num = min(ROWS, count - i)
                            for j in range(num):
                                seen[j] = min(t1, lo + (i + j) // group + shift + 1) - t0
                            if seen[num - 1] > 0:
                                _group_tile(
                                    rows + 4 * i * head_dim, num, seen, keys, values, s, maxima, f32(m + 4 * i),
                                    f32(lanes + 64 * i), acc + 4 * i * width, head_dim, tile, scale, kv_block,
                                )  # fmt: skip
                    for i in range(count):
                        if start <= lo + i // group + shift:
                            g, j = i // ROWS * ROWS, i % ROWS
                            _merge(
                                start == 0, j, f32(m + 4 * g), lane_tree(f32(lanes + 64 * i)), acc + 4 * g * width,
                                f32(M + 4 * g), f32(L + 4 * g), total + 4 * g * width, head_dim,
                            )  # fmt: skip
                for i in range(count):
                    row = (lo + i // group) * num_heads + head * group + i % group
                    source = f32(total + 4 * (i // ROWS * ROWS * width + 16 * (i % ROWS)))
                    for d in range(head_dim):
                        o = source[d // 16 * GROUP + d % 16] / f32(L)[i]
                        write(out, is_bf16, row * head_dim + d, NAN if o != o else o)
                    if lse:
                        f32(lse)[row] = np.float32(f32(M)[i] + np.log(f32(L)[i]))
    return 0
