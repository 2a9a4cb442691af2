"""Softmax over tiles of positions, as compiled loops (numba): what every kind of attention does with keys and values.

Notable: a tile of positions lies in scratch memory in panels of 16 and serves every row of a chunk, four rows at a
time. The vector axis is the positions for scores and the value for the accumulator, never a sum, so that tiles, chunks
and groups of rows cannot change a bit. What must stay equal: the order stated in the operators' `reference.py`.

Shapes: Q width of a key, L width of a value, N heads that share a tile; a row is a (token, head) pair. In `parts`: keys
[tile / 16, Q, 16], values [L / 16, tile, 16], of a group of 4 rows scores [tile / 16, 4, 16] and accumulators
[L / 16, 4, 16], with L rounded up to whole panels. What lies past a row's positions or past L is garbage. `sizes` is
(N, Q, L, tile).
"""

import numpy as np

from skyrl_isoexec.kernels.numeric.cpu import ZERO, exp, f32, inlined, lane_tree, write
from skyrl_isoexec.kernels.numeric.tile import ROWS, row_f32, rows_f32

GROUP = 16 * ROWS
"""Elements of a panel of a group of rows."""
NEG_INF, NAN = np.float32(-np.inf), np.float32(np.nan)

BAD_QUERY, BAD_LENGTH, BAD_PAGE = 1, 2, 3
"""What `check` finds, plus 4 * request, where query rows, length or pages are out of bounds; 0 is nothing."""


def raise_for(op: str, code: int | None) -> None:
    """Say (ValueError) what `check` found, if anything."""
    if code:
        reasons = {
            BAD_QUERY: "query_start and seq_lens do not place its query rows",
            BAD_LENGTH: "block_table has too few pages for its length",
            BAD_PAGE: "block_table names a page outside the cache",
        }
        raise ValueError(f"{op}: request {code >> 2}: {reasons[code & 3]}")


def parts_size(num_rows: int, width: int, value_width: int, tile: int) -> int:
    """fp32 numbers of scratch that `parts` lays out for a chunk of so many rows, which are whole groups."""
    padded = -(-value_width // 16) * 16
    return tile * (width + padded + 2 * ROWS) + num_rows * (width + 2 * padded + 16 + 3)


@inlined
def check(table, table_stride, num_pages_each, num_pages, page_size, starts, lengths, num_requests, num_tokens):
    """Code of the first request whose rows or pages lie outside what was given, or 0; typed pointers."""
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


@inlined
def _padded(width):
    """In whole panels."""
    return (width + 15) // 16 * 16


@inlined
def parts(scratch, num_rows, sizes):
    """Addresses of keys, values, scores, their maxima, queries, a partition's accumulators and the running results.

    Then those of the denominators' lanes, of the partition's maxima, and of the running maxima and denominators.
    """
    _, width, value_width, tile = sizes
    padded = _padded(value_width)
    values = scratch + 4 * tile * width
    s = values + 4 * tile * padded
    maxima = s + 4 * tile * ROWS
    rows = maxima + 4 * tile * ROWS
    acc = rows + 4 * num_rows * width
    total = acc + 4 * num_rows * padded
    lanes = total + 4 * num_rows * padded
    m = lanes + 4 * num_rows * 16
    return scratch, values, s, maxima, rows, acc, total, lanes, m, m + 4 * num_rows, m + 8 * num_rows


@inlined
def begin(made, sizes, count, num_rows):
    """Clear what a partition adds up, for the `count` rows of a chunk."""
    _, _, _, _, _, acc, _, lanes, m, _, _ = made
    for i in range(count):
        f32(m)[i] = NEG_INF
    for i in range(num_rows * 16):
        f32(lanes)[i] = ZERO
    for i in range(num_rows * _padded(sizes[2])):
        f32(acc)[i] = ZERO


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
def _rescale(r, alpha, acc, lanes, value_width):
    """Multiply row r's sums by alpha."""
    for l in range(16):
        lanes[16 * r + l] *= alpha
    for d in range(0, value_width, 16):
        panel = f32(acc + 4 * ROWS * d + 64 * r)
        for l in range(16):
            panel[l] *= alpha


@inlined
def _group_tile(rows, num_rows, seen, keys, values, s, maxima, m, lanes, acc, sizes, scale, kv_block):
    """Advance a group of rows over a tile, of which row r sees the first seen[r] positions, ascending in r."""
    _, width, value_width, tile = sizes
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
                _rescale(r, exp(m[r] - _base(new)), acc, lanes, value_width)
                m[r] = new
            for b in range(start, min(stop, seen[r]), 16):
                for l in range(min(16, seen[r] - b)):
                    lanes[16 * r + l] += p[ROWS * b + 16 * r + l]
        for b in range(start, stop, 16):
            shared = min(16, least - b)
            if num_rows > 1 and shared == min(16, most - b):
                for d in range(0, value_width, 16):
                    panel = f32(values + 64 * b + 4 * tile * d)
                    rows_f32(f32(s + 4 * ROWS * b), 16, panel, shared, f32(acc + 4 * ROWS * d))
                continue
            for r in range(num_rows):
                if seen[r] > b:
                    for d in range(0, value_width, 16):
                        panel, to = f32(values + 64 * b + 4 * tile * d), f32(acc + 4 * ROWS * d + 64 * r)
                        row_f32(f32(s + 4 * ROWS * b + 64 * r), 16, panel, min(16, seen[r] - b), to)


@inlined
def advance(made, sizes, first, count, t0, t1, seen, scale, kv_block):
    """Advance a chunk's `count` rows, from position `first`, over the tile of t0 .. t1.

    `seen` holds ROWS int64 of any content.
    """
    keys, values, s, maxima, rows, acc, _, lanes, m, _, _ = made
    heads, width, value_width, _ = sizes
    padded = _padded(value_width)
    for i in range(0, count, ROWS):
        num = min(ROWS, count - i)
        for j in range(num):
            seen[j] = min(t1, first + (i + j) // heads + 1) - t0
        if seen[num - 1] > 0:
            _group_tile(
                rows + 4 * i * width, num, seen, keys, values, s, maxima, f32(m + 4 * i),
                f32(lanes + 64 * i), acc + 4 * i * padded, sizes, scale, kv_block,
            )  # fmt: skip


@inlined
def _merge(is_first, r, m, l, acc, M, L, total, value_width):
    """Merge row r's partition (m, l, acc) into its running result; the first partition is taken as it is."""
    new = M[r] if M[r] > m[r] else m[r]
    x, y = exp(M[r] - _base(new)), exp(m[r] - _base(new))
    for d in range(0, value_width, 16):
        part, whole = f32(acc + 4 * ROWS * d + 64 * r), f32(total + 4 * ROWS * d + 64 * r)
        for i in range(16):
            whole[i] = part[i] if is_first else whole[i] * x + part[i] * y
    L[r] = l if is_first else L[r] * x + l * y
    M[r] = m[r] if is_first else new


@inlined
def merge(made, sizes, first, count, start):
    """Merge the partition from position `start` into the results of those rows of a chunk that see any of it."""
    _, _, _, _, _, acc, total, lanes, m, M, L = made
    heads, _, value_width, _ = sizes
    padded = _padded(value_width)
    for i in range(count):
        if start <= first + i // heads:
            g, j = i // ROWS * ROWS, i % ROWS
            _merge(
                start == 0, j, f32(m + 4 * g), lane_tree(f32(lanes + 64 * i)), acc + 4 * g * padded,
                f32(M + 4 * g), f32(L + 4 * g), total + 4 * g * padded, value_width,
            )  # fmt: skip


@inlined
def finish(made, sizes, i, row, out, lse, is_bf16):
    """Write row i of a chunk, divided by its denominator, to row `row` of out [.., L], and of lse unless that is 0."""
    _, _, _, _, _, _, total, _, _, M, L = made
    value_width = sizes[2]
    source = f32(total + 4 * (i // ROWS * ROWS * _padded(value_width) + 16 * (i % ROWS)))
    for d in range(value_width):
        o = source[d // 16 * GROUP + d % 16] / f32(L)[i]
        write(out, is_bf16, row * value_width + d, NAN if o != o else o)
    if lse:
        f32(lse)[row] = np.float32(f32(M)[i] + np.log(f32(L)[i]))
