"""The compiled loops of causal attention: one routine for packed rows, prefill and decode, fp32 and bf16.

Notable: keys and values are read through strides and a table of page starts, so contiguous rows are one page per
sequence. A tile of positions is widened to fp32 once and serves every query row of a chunk. Loops vectorise over
positions (scores, keys lie transposed in a tile) and over the head (accumulator), never across a sum, so that neither
tile nor chunk lengths can change a bit. What must stay equal: the order stated in `reference.py`.

Shapes: T tokens, N query heads, K key-value heads, D head dimension, R requests; rows are (token, head) pairs.
"""

import numpy as np

from skyrl_isoexec.kernels.numeric.cpu import (
    NUM_LANES,
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
    write,
)

TILE = 128
"""Positions of a tile, at least one softmax block; changes no bit."""
CHUNK = 32
"""Query tokens that share a tile; changes no bit."""
NEG_INF, NAN = np.float32(-np.inf), np.float32(np.nan)

BAD_QUERY, BAD_LENGTH, BAD_PAGE = 1, 2, 3
"""What `attend` returns, plus 4 * request, where query rows, length or pages are out of bounds; 0 is success."""


@inlined
def _copy(address, start, count, row, at, is_bf16):
    """row[at : at + count] = the fp32 values of count elements from `start`."""
    for i in range(count):
        row[at + i] = read(address, is_bf16, start + i)


@inlined
def _add_products(y, width, a, at, count, x, first):
    """y[:width] += a[at + i] * x[first + i, :width] for i ascending below count, each product and sum rounded."""
    whole = count & ~7
    for i in range(0, whole, 8):
        o, b = first + i, at + i
        x0, x1, x2, x3, x4, x5, x6, x7 = x[o], x[o + 1], x[o + 2], x[o + 3], x[o + 4], x[o + 5], x[o + 6], x[o + 7]
        a0, a1, a2, a3, a4, a5, a6, a7 = a[b], a[b + 1], a[b + 2], a[b + 3], a[b + 4], a[b + 5], a[b + 6], a[b + 7]
        for j in range(width):
            s = y[j]
            s += a0 * x0[j]
            s += a1 * x1[j]
            s += a2 * x2[j]
            s += a3 * x3[j]
            s += a4 * x4[j]
            s += a5 * x5[j]
            s += a6 * x6[j]
            s += a7 * x7[j]
            y[j] = s
    for i in range(whole, count):
        ai, xi = a[at + i], x[first + i]
        for j in range(width):
            y[j] += ai * xi[j]


@inlined
def _load(k, v, pages, layout, head, first, count, kt, vt, is_bf16):
    """Widen positions first .. first + count of one head into kt [D, >= tile] and vt [tile, D]."""
    page_size, page_stride, head_stride, k_position, k_dim, v_position = layout
    head_dim = kt.shape[0]
    done = 0
    while done < count:
        page = (first + done) // page_size
        offset = first + done - page * page_size
        run = min(page_size - offset, count - done)
        base = np.int64(i32(pages)[page]) * page_stride + head * head_stride
        if k_position == 1:
            for d in range(head_dim):
                _copy(k, base + offset + d * k_dim, run, kt[d], done, is_bf16)
        else:
            for j in range(run):
                row = vt[done + j]  # its own values follow below
                _copy(k, base + (offset + j) * k_position, head_dim, row, 0, is_bf16)
                for d in range(head_dim):
                    kt[d, done + j] = row[d]
        for j in range(run):
            _copy(v, base + (offset + j) * v_position, head_dim, vt[done + j], 0, is_bf16)
        done += run


@inlined
def _base(m):
    """What is subtracted in exponents for a maximum m."""
    return ZERO if m == NEG_INF else m


@inlined
def _maxima(s, seen, kv_block, m, maxima):
    """maxima[j] = the running maximum after position j's block; a NaN is missed here, its exponential brings it in."""
    for start in range(0, seen, kv_block):
        stop = min(start + kv_block, seen)
        for j in range(start, stop):
            m = s[j] if s[j] > m else m
        for j in range(start, stop):
            maxima[j] = m


@inlined
def _row_tile(q, kt, vt, seen, scale, kv_block, s, maxima, m, lanes, acc):
    """Advance one row over the first `seen` positions of a tile; returns its new maximum."""
    head_dim = kt.shape[0]
    width = (seen + 15) & ~15  # whole vectors; what lies beyond `seen` is never used
    for j in range(width):
        s[j] = ZERO
    _add_products(s, width, q, 0, head_dim, kt, 0)
    for j in range(seen):
        s[j] = s[j] * scale
    _maxima(s, seen, kv_block, m, maxima)
    for j in range(seen):
        s[j] = exp(s[j] - _base(maxima[j]))
    for start in range(0, seen, kv_block):
        stop = min(start + kv_block, seen)
        new = maxima[start]
        if new != m:
            alpha = exp(m - _base(new))
            for l in range(NUM_LANES):
                lanes[l] *= alpha
            for d in range(head_dim):
                acc[d] *= alpha
            m = new
        for b in range(start, stop, NUM_LANES):
            for j in range(b, min(b + NUM_LANES, stop)):
                lanes[j - b] += s[j]
        _add_products(acc, head_dim, s, start, stop - start, vt, start)
    return m


@inlined
def _reset(count, m, lanes, acc):
    """Start a partition for the first `count` rows."""
    for i in range(count):
        m[i] = NEG_INF
        for l in range(NUM_LANES):
            lanes[i, l] = ZERO
        for d in range(acc.shape[1]):
            acc[i, d] = ZERO


@inlined
def _merge(i, first, m, l, acc, M, L, total):
    """Merge row i's partition (m, l, acc) into its running result; the first partition is taken as it is."""
    if first:
        M[i], L[i] = m, l
        for d in range(acc.shape[1]):
            total[i, d] = acc[i, d]
        return
    new = M[i] if M[i] > m else m
    x, y = exp(M[i] - _base(new)), exp(m - _base(new))
    M[i], L[i] = new, L[i] * x + l * y
    for d in range(acc.shape[1]):
        total[i, d] = total[i, d] * x + acc[i, d] * y


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
    q, k, v, table, query_start, seq_lens, out, lse,
    num_tokens, num_heads, num_kv_heads, head_dim, num_requests, num_pages, num_pages_each, table_stride,
    page_size, page_stride, head_stride, k_position, k_dim, v_position,
    scale, kv_block, kv_partition, is_bf16,
):  # fmt: skip
    """Rows query_start[r] .. query_start[r + 1] of q [T, N, D], at the last positions of request r; writes out and lse.

    The first eight are addresses; table, query_start and seq_lens hold int32; lse [T, N] may be 0. In k, element d of
    a head at a position lies at table[r, position // page_size] * page_stride + head * head_stride
    + (position % page_size) * k_position + d * k_dim, and in v the same with v_position and 1.
    """
    starts, lengths, pages = i32(query_start), i32(seq_lens), i32(table)
    bad = _check(pages, table_stride, num_pages_each, num_pages, page_size, starts, lengths, num_requests, num_tokens)
    if bad:
        return bad
    layout = (page_size, page_stride, head_stride, k_position, k_dim, v_position)
    scale = np.float32(scale)
    group = num_heads // num_kv_heads
    tile = max(kv_block, TILE // kv_block * kv_block)
    kt, vt = np.zeros((head_dim, tile + 15), np.float32), np.zeros((tile, head_dim), np.float32)
    s, maxima = np.zeros(tile + 15, np.float32), np.zeros(tile, np.float32)
    num_rows = min(CHUNK, num_tokens) * group
    rows, acc = np.empty((num_rows, head_dim), np.float32), np.empty((num_rows, head_dim), np.float32)
    total, lanes = np.empty((num_rows, head_dim), np.float32), np.empty((num_rows, NUM_LANES), np.float32)
    m, M, L = np.empty(num_rows, np.float32), np.empty(num_rows, np.float32), np.empty(num_rows, np.float32)
    for r in range(num_requests):
        last = np.int64(starts[r + 1])
        shift = np.int64(lengths[r]) - last  # from a token's row to its position
        row_table = table + 4 * r * table_stride
        for head in range(num_kv_heads):
            for lo in range(np.int64(starts[r]), last, CHUNK):
                hi = min(lo + CHUNK, last)
                count = (hi - lo) * group
                for i in range(count):
                    t, h = lo + i // group, head * group + i % group
                    _copy(q, (t * num_heads + h) * head_dim, head_dim, rows[i], 0, is_bf16)
                for start in range(0, hi + shift, kv_partition):
                    stop = min(start + kv_partition, hi + shift)
                    _reset(count, m, lanes, acc)
                    for t0 in range(start, stop, tile):
                        t1 = min(t0 + tile, stop)
                        _load(k, v, row_table, layout, head, t0, t1 - t0, kt, vt, is_bf16)
                        for i in range(count):
                            seen = min(t1, lo + i // group + shift + 1) - t0
                            if seen > 0:
                                m[i] = _row_tile(
                                    rows[i], kt, vt, seen, scale, kv_block, s, maxima, m[i], lanes[i], acc[i]
                                )
                    for i in range(count):
                        if start <= lo + i // group + shift:
                            _merge(i, start == 0, m[i], lane_tree(lanes[i]), acc, M, L, total)
                for i in range(count):
                    row = (lo + i // group) * num_heads + head * group + i % group
                    for d in range(head_dim):
                        o = total[i, d] / L[i]
                        o = NAN if o != o else o
                        write(out, is_bf16, row * head_dim + d, o)
                    if lse:
                        f32(lse)[row] = np.float32(M[i] + np.log(L[i]))
    return 0


@inlined
def _store(pages, page, offset, head, t, num_kv_heads, head_dim, page_size, k, v):
    """One head of one row into both planes of its page; typed pointers `pages`, k, v."""
    source = (t * num_kv_heads + head) * head_dim
    plane = num_kv_heads * head_dim * page_size
    base = 2 * page * plane + head * head_dim * page_size
    for d in range(head_dim):
        pages[base + d * page_size + offset] = k[source + d]
        pages[base + plane + offset * head_dim + d] = v[source + d]


@compiled
def store(k, v, cache, slots, num_rows, num_pages, num_kv_heads, head_dim, page_size, is_bf16):
    """Put rows k, v [T, K, D] at int64 slots of the cache, addresses first; returns a slot that is too large, or -1."""
    targets = i64(slots)
    for t in range(num_rows):
        if targets[t] >= num_pages * page_size:
            return targets[t]
    for t in range(num_rows):
        if targets[t] < 0:
            continue
        page, offset = targets[t] // page_size, targets[t] % page_size
        for head in range(num_kv_heads):
            if is_bf16:
                _store(u16(cache), page, offset, head, t, num_kv_heads, head_dim, page_size, u16(k), u16(v))
            else:
                _store(f32(cache), page, offset, head, t, num_kv_heads, head_dim, page_size, f32(k), f32(v))
    return -1
