"""What the forms of the gated delta rule share, as compiled loops (numba): rows, pages, and a chunk's v_new and chain.

What must stay equal: the bits of `gdn_rows`, `gdn_chunk` and `gdn_walk`, which state the order. All arguments are
addresses and sizes; all memory but the operands is fp32.

Shapes: n rows of a segment, C channels, W taps, K key heads, V value heads, D their widths, L rows of a chunk. `sizes`
is (L, K, V, the keys' D, the values' D, W).
"""

import numpy as np

from skyrl_isoexec.kernels.numeric.cpu import (
    NUM_LANES,
    ONE,
    ZERO,
    exp,
    f32,
    i32,
    inlined,
    lane_tree,
    read,
    rounded,
)
from skyrl_isoexec.kernels.numeric.gdn_checks import BAD_LENGTH, BAD_PAGE, BAD_ROWS
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.kernels.numeric.gdn_rows import ATANH, NORM_EPS
from skyrl_isoexec.kernels.numeric.gdn_tile import combine

_A7, _A6, _A5, _A4, _A3, _A2, _A1, _A0 = (np.float32(c) for c in ATANH)
_EPS, _TWO = np.float32(NORM_EPS), np.float32(2)


@inlined
def check(table, table_stride, pages_each, num_pages, page_size, starts, lengths, num_requests, num_tokens):
    """Code of the first request whose rows or pages lie outside what was given, or 0; typed pointers."""
    for r in range(num_requests):
        lo, hi, length = np.int64(starts[r]), np.int64(starts[r + 1]), np.int64(lengths[r])
        if lo < 0 or hi < lo or hi > num_tokens or (hi > lo and hi - lo > length):
            return BAD_ROWS + 4 * r
        if hi > lo:
            last = (length - 1) // page_size
            if last >= pages_each:
                return BAD_LENGTH + 4 * r
            for j in range(max(length - (hi - lo) - 1, 0) // page_size, last + 1):
                if table[r * table_stride + j] < 0 or table[r * table_stride + j] >= num_pages:
                    return BAD_PAGE + 4 * r
    return 0


@inlined
def carry(state, step, size, row, position, page_size):
    """Address of the page that holds the state after `position`, with what it has before; `row` is a request's pages.

    Pages of a state are `step` numbers apart and have `size` of them.
    """
    page = state + 4 * step * np.int64(i32(row)[position // page_size])
    if position % page_size == 0:
        before = state + 4 * step * np.int64(i32(row)[max(position - 1, 0) // page_size])
        for i in range(size):
            f32(page)[i] = f32(before)[i] if position else ZERO
    return page


@inlined
def softplus(x):
    """fp32 log(1 + exp(x)); see `gdn_rows.softplus`."""
    y = exp(-abs(x))
    z = y / (y + _TWO)
    s = z * z
    p = ((((((_A7 * s + _A6) * s + _A5) * s + _A4) * s + _A3) * s + _A2) * s + _A1) * s + _A0
    return (x if x > ZERO else ZERO) + (z + z) * p


@inlined
def gates(a, b, a_log, dt_bias, bf16, first, count, num_heads, g, beta):
    """g and beta [n, V] of rows first, first + 1, ..."""
    for i in range(count):
        for h in range(num_heads):
            at = (first + i) * num_heads + h
            decay = softplus(read(a, bf16, at) + read(dt_bias, bf16, h))
            f32(g)[i * num_heads + h] = -exp(read(a_log, bf16, h)) * decay
            f32(beta)[i * num_heads + h] = ONE / (exp(-read(b, bf16, at)) + ONE)


@inlined
def slide(state, x, bf16, first, count, channels, taps, window):
    """window [W - 1 + n, C] = the last W - 1 rows, from `state`, and the new ones; leaves the last W - 1 in `state`."""
    held, size = (taps - 1) * channels, count * channels
    for i in range(held):
        f32(window)[i] = f32(state)[i]
    for i in range(size):
        f32(window)[held + i] = read(x, bf16, first * channels + i)
    for i in range(held):
        f32(state)[i] = f32(window)[size + i]


@inlined
def convolve(window, taps_at, bf16, count, channels, taps, key_heads, key_width, lanes_at, mixed):
    """mixed [n, C]: the convolution of a window with taps [W, C], silu, and the norm of each query and key head."""
    lanes = f32(lanes_at)
    for i in range(count):
        row = mixed + 4 * i * channels
        for c in range(channels):
            f32(row)[c] = ZERO
        for tap in range(taps):
            source, weights = window + 4 * (i + tap) * channels, taps_at + 4 * tap * channels
            for c in range(channels):
                f32(row)[c] = f32(row)[c] + f32(source)[c] * f32(weights)[c]
        for c in range(channels):
            y = f32(row)[c]
            f32(row)[c] = rounded(y / (exp(-y) + ONE), bf16)
        for head in range(2 * key_heads):
            x = f32(row + 4 * head * key_width)
            for lane in range(NUM_LANES):
                lanes[lane] = ZERO
            for d in range(0, key_width, NUM_LANES):
                for lane in range(min(NUM_LANES, key_width - d)):
                    lanes[lane] += x[d + lane] * x[d + lane]
            inverse = ONE / np.sqrt(lane_tree(lanes) + _EPS)
            for d in range(key_width):
                x[d] = rounded(x[d] * inverse, bf16)


def rows_size(heads: GdnHeads, conv_width: int, chunk: int) -> int:
    """fp32 numbers of scratch that the rows of a segment need: those that `begin` lays out."""
    return chunk * (heads.channels + 2 * heads.num_value_heads) + (2 * conv_width - 1 + chunk) * heads.channels


@inlined
def _channels(sizes):
    _, key_heads, value_heads, key_width, width, _ = sizes
    return 2 * key_heads * key_width + value_heads * width


@inlined
def begin(conv, bf16, sizes, scratch):
    """Addresses of mixed [L, C], taps [W, C], a window [W - 1 + L, C], g and beta [L, V], and of what follows them.

    Fills the taps, in fp32, from the weight [C, W].
    """
    length, _, value_heads, _, _, taps = sizes
    channels = _channels(sizes)
    taps_at = scratch + 4 * length * channels
    window = taps_at + 4 * taps * channels
    g = window + 4 * (taps - 1 + length) * channels
    beta = g + 4 * length * value_heads
    for c in range(channels):
        for tap in range(taps):
            f32(taps_at)[tap * channels + c] = read(conv, bf16, c * taps + tap)
    return scratch, taps_at, window, g, beta, beta + 4 * length * value_heads


@inlined
def prepare(
    x, a, b, a_log, dt_bias, bf16, conv_rows, conv_step, keys, keys_step, pages, page_size, position, first, count,
    sizes, made,
):  # fmt: skip
    """Rows first .. first + count of a batch, from `position`, in what `begin` made; keys go to columns of the page."""
    mixed, taps_at, window, g, beta, work = made
    length, key_heads, value_heads, key_width, _, taps = sizes
    channels = _channels(sizes)
    rows = carry(conv_rows, conv_step, (taps - 1) * channels, pages, position, page_size)
    slide(rows, x, bf16, first, count, channels, taps, window)
    convolve(window, taps_at, bf16, count, channels, taps, key_heads, key_width, work, mixed)
    gates(a, b, a_log, dt_bias, bf16, first, count, value_heads, g, beta)
    page = keys + 4 * (keys_step * np.int64(i32(pages)[position // page_size]) + position % length)
    for i in range(count):
        k = f32(mixed + 4 * (i * channels + key_heads * key_width))
        for d in range(key_heads * key_width):
            f32(page)[d * length + i] = k[d]


@inlined
def mixed_row(mixed, i, key_head, head, sizes):
    """Addresses of row i's query, key and value of one value head."""
    _, key_heads, value_heads, key_width, width, _ = sizes
    channels = _channels(sizes)
    q = mixed + 4 * (i * channels + key_head * key_width)
    return q, q + 4 * key_heads * key_width, mixed + 4 * ((i + 1) * channels - (value_heads - head) * width)


@inlined
def snapshot(chain, size, bf16, out):
    """The chain rounded to the dtype, in `out`."""
    for i in range(size):
        f32(out)[i] = rounded(f32(chain)[i], bf16)


@inlined
def extend(
    t, g, beta, k, v, keys, decay, values, decayed, inverse, fresh, start, length, key_width, width, bf16, scratch
):
    """Row t of one value head's open chunk; `keys` has it already. Leaves exp(G_t - G_s), s <= t, in scratch[:L].

    Writes decay [L], values [L, D], decayed [L, D], inverse [L, L] and fresh [L, D]; start is the snapshot [D, D].
    Scratch holds 3 L numbers and the larger of the widths twice.
    """
    decays, lower, weights = scratch, scratch + 4 * length, scratch + 8 * length
    sums = scratch + 12 * length
    more = sums + 4 * max(key_width, width)
    e, total = f32(decays), (f32(decay)[t - 1] if t else ZERO) + g
    f32(decay)[t] = total
    combine(k, key_width, keys, length, t, weights)
    for s in range(t):
        e[s] = exp(total - f32(decay)[s])
        f32(lower)[s] = -(beta * (e[s] * f32(weights)[s]))
    e[t] = exp(total - total)
    row = inverse + 4 * t * length
    combine(lower, t, inverse, length, t, row)
    for s in range(length - t):
        f32(row)[t + s] = ZERO if s else ONE
    for s in range(t + 1):
        f32(weights)[s] = rounded(f32(row)[s], bf16)
    grown = beta * exp(total)
    for d in range(width):
        f32(values)[t * width + d] = rounded(beta * f32(v)[d], bf16)
    for d in range(key_width):
        f32(decayed)[t * key_width + d] = rounded(grown * f32(k)[d], bf16)
    combine(weights, t + 1, decayed, key_width, key_width, sums)
    for d in range(key_width):
        f32(sums)[d] = rounded(f32(sums)[d], bf16)
    combine(sums, key_width, start, width, width, more)
    combine(weights, t + 1, values, width, width, sums)
    for d in range(width):
        f32(fresh)[t * width + d] = rounded(f32(sums)[d] - f32(more)[d], bf16)


@inlined
def close(keys, decay, fresh, chain, length, key_width, width, bf16, scratch):
    """One value head's chain [D, D] after its whole chunk. Scratch holds 2 L + D numbers."""
    last, weights, sums = f32(decay)[length - 1], scratch + 4 * length, scratch + 8 * length
    for s in range(length):
        f32(scratch)[s] = exp(last - f32(decay)[s])
    shrunk = exp(last)
    for d in range(key_width):
        for s in range(length):
            f32(weights)[s] = rounded(f32(scratch)[s] * f32(keys)[d * length + s], bf16)
        combine(weights, length, fresh, width, width, sums)
        for i in range(width):
            f32(chain)[d * width + i] = shrunk * f32(chain)[d * width + i] + f32(sums)[i]
