"""The compiled loops of latent attention: one routine for packed rows, prefill and decode, fp32 and bf16.

Notable: keys are read through a table of page starts, so packed rows are one page per sequence. A tile of positions is
widened to fp32 once, as keys and as values in panels of 16, and serves every row of a chunk, four rows at a time. The
vector axis is the positions for scores and the latent for the accumulator, never a sum, so that tiles, chunks and
groups of rows cannot change a bit. What must stay equal: the order stated in `reference.py`.

Shapes: T tokens, N query heads, L latent rank, Q width of a key, R requests; a row is a (token, head) pair. In scratch
memory: keys [tile / 16, Q, 16], values [L / 16, tile, 16], of a group of 4 rows scores [tile / 16, 4, 16] and
accumulators [L / 16, 4, 16], with L rounded up to whole panels. What lies past a row's positions or past L is garbage.
"""

import numpy as np

from skyrl_isoexec.kernels.numeric.cpu import (
    ZERO,
    compiled,
    exp,
    f32,
    i32,
    i64,
    inlined,
    lane_tree,
    read,
    u16,
    widen,
    write,
)
from skyrl_isoexec.kernels.numeric.tile import ROWS, row_f32, rows_f32

TILE, CHUNK = 64, 64
"""Positions of a tile (at least a softmax block) and rows that share it (at least a token's); they change no bit."""
GROUP = 16 * ROWS
"""Elements of a panel of a group of rows."""
NEG_INF, NAN = np.float32(-np.inf), np.float32(np.nan)

BAD_QUERY, BAD_LENGTH, BAD_PAGE = 1, 2, 3
"""What `attend` returns, plus 4 * request, where query rows, length or pages are out of bounds; 0 is success."""


def tile_length(kv_block: int) -> int:
    """Positions of a tile: whole softmax blocks."""
    return max(kv_block, TILE // kv_block * kv_block)


def chunk_length(num_heads: int) -> int:
    """Tokens of a chunk."""
    return max(1, CHUNK // num_heads)


def scratch_size(num_heads: int, width: int, latent: int, tile: int) -> int:
    """fp32 numbers that `attend` needs: the parts in the order in which it lays them out."""
    num_rows, panels = -(-chunk_length(num_heads) * num_heads // ROWS) * ROWS, -(-latent // 16) * 16
    return tile * (width + panels + 2 * ROWS) + num_rows * (width + 2 * panels + 16 + 3)


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
def _rescale(r, alpha, acc, lanes, latent):
    """Multiply row r's sums by alpha."""
    for l in range(16):
        lanes[16 * r + l] *= alpha
    for d in range(0, latent, 16):
        panel = f32(acc + 4 * ROWS * d + 64 * r)
        for l in range(16):
            panel[l] *= alpha


@inlined
def _group_tile(rows, num_rows, seen, keys, values, s, maxima, m, lanes, acc, width, latent, tile, scale, kv_block):
    """Advance a group of rows over a tile, of which row r sees the first seen[r] positions, ascending in r."""
    least, most = seen[0], seen[num_rows - 1]
    panels = (most + 15) // 16
    p, top = f32(s), f32(maxima)
    for i in range(panels * GROUP):
        p[i] = ZERO
    for n in range(panels):
        if num_rows > 1:
            rows_f32(f32(rows), width, f32(keys + 64 * width * n), width, f32(s + 4 * GROUP * n))
        else:
            row_f32(f32(rows), width, f32(keys + 64 * width * n), width, f32(s + 4 * GROUP * n))
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
                _rescale(r, exp(m[r] - _base(new)), acc, lanes, latent)
                m[r] = new
            for b in range(start, min(stop, seen[r]), 16):
                for l in range(min(16, seen[r] - b)):
                    lanes[16 * r + l] += p[ROWS * b + 16 * r + l]
        for b in range(start, stop, 16):
            shared = min(16, least - b)
            if num_rows > 1 and shared == min(16, most - b):
                for d in range(0, latent, 16):
                    panel = f32(values + 64 * b + 4 * tile * d)
                    rows_f32(f32(s + 4 * ROWS * b), 16, panel, shared, f32(acc + 4 * ROWS * d))
                continue
            for r in range(num_rows):
                if seen[r] > b:
                    for d in range(0, latent, 16):
                        panel, to = f32(values + 64 * b + 4 * tile * d), f32(acc + 4 * ROWS * d + 64 * r)
                        row_f32(f32(s + 4 * ROWS * b + 64 * r), 16, panel, min(16, seen[r] - b), to)


@inlined
def _merge(is_first, r, m, d, acc, M, D, total, latent):
    """Merge row r's partition (m, d, acc) into its running result; the first partition is taken as it is."""
    new = M[r] if M[r] > m[r] else m[r]
    x, y = exp(M[r] - _base(new)), exp(m[r] - _base(new))
    for i in range(0, latent, 16):
        part, whole = f32(acc + 4 * ROWS * i + 64 * r), f32(total + 4 * ROWS * i + 64 * r)
        for l in range(16):
            whole[l] = part[l] if is_first else whole[l] * x + part[l] * y
    D[r] = d if is_first else D[r] * x + d * y
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
    q, c, table, query_start, seq_lens, out, lse, scratch,
    num_tokens, num_heads, width, latent, num_requests, num_pages, num_pages_each, table_stride, page_size, page_stride,
    scale, kv_block, kv_partition, tile, chunk, is_bf16,
):  # fmt: skip
    """Rows query_start[r] .. query_start[r + 1] of q [T, N, Q], at the last positions of request r; writes out and lse.

    The first eight are addresses; table, query_start and seq_lens hold int32; lse [T, N] may be 0. A position's key is
    row position % page_size of the page that begins at table[r, position // page_size] * page_stride of c.
    """
    starts, lengths = i32(query_start), i32(seq_lens)
    bad = _check(
        i32(table), table_stride, num_pages_each, num_pages, page_size, starts, lengths, num_requests, num_tokens
    )
    if bad:
        return bad
    scale = np.float32(scale)
    panels = (latent + 15) // 16 * 16
    num_rows = (chunk * num_heads + ROWS - 1) // ROWS * ROWS
    keys, values = scratch, scratch + 4 * tile * width
    s = values + 4 * tile * panels
    maxima = s + 4 * tile * ROWS
    rows = maxima + 4 * tile * ROWS
    acc = rows + 4 * num_rows * width
    total = acc + 4 * num_rows * panels
    lanes = total + 4 * num_rows * panels
    m = lanes + 4 * num_rows * 16
    M, D = m + 4 * num_rows, m + 8 * num_rows
    seen = np.empty(ROWS, np.int64)
    for r in range(num_requests):
        last = np.int64(starts[r + 1])
        shift = np.int64(lengths[r]) - last  # from a token's row to its position
        for lo in range(np.int64(starts[r]), last, chunk):
            hi = min(lo + chunk, last)
            count = (hi - lo) * num_heads
            for i in range(count * width):
                f32(rows)[i] = read(q, is_bf16, lo * num_heads * width + i)
            for start in range(0, hi + shift, kv_partition):
                stop = min(start + kv_partition, hi + shift)
                for i in range(count):
                    f32(m)[i] = NEG_INF
                for i in range(num_rows * 16):
                    f32(lanes)[i] = ZERO
                for i in range(num_rows * panels):
                    f32(acc)[i] = ZERO
                for t0 in range(start, stop, tile):
                    t1 = min(t0 + tile, stop)
                    page_row = table + 4 * r * table_stride
                    _load(c, page_row, page_size, page_stride, t0, t1 - t0, keys, values, width, latent, tile, is_bf16)
                    for i in range(0, count, ROWS):
                        num = min(ROWS, count - i)
                        for j in range(num):
                            seen[j] = min(t1, lo + (i + j) // num_heads + shift + 1) - t0
                        if seen[num - 1] > 0:
                            _group_tile(
                                rows + 4 * i * width, num, seen, keys, values, s, maxima, f32(m + 4 * i),
                                f32(lanes + 64 * i), acc + 4 * i * panels, width, latent, tile, scale, kv_block,
                            )  # fmt: skip
                for i in range(count):
                    if start <= lo + i // num_heads + shift:
                        g, j = i // ROWS * ROWS, i % ROWS
                        _merge(
                            start == 0, j, f32(m + 4 * g), lane_tree(f32(lanes + 64 * i)), acc + 4 * g * panels,
                            f32(M + 4 * g), f32(D + 4 * g), total + 4 * g * panels, latent,
                        )  # fmt: skip
            for i in range(count):
                row = lo * num_heads + i
                source = f32(total + 4 * (i // ROWS * ROWS * panels + 16 * (i % ROWS)))
                for d in range(latent):
                    o = source[d // 16 * GROUP + d % 16] / f32(D)[i]
                    write(out, is_bf16, row * latent + d, NAN if o != o else o)
                if lse:
                    f32(lse)[row] = np.float32(f32(M)[i] + np.log(f32(D)[i]))
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
