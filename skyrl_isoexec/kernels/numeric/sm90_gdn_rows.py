"""What a gated delta rule makes of a token on Hopper: convolution, norms and gates, and the chunks that they fill.

Notable: a decode step calls the same functions on one row that a prefill calls on tiles. A kernel that uses them is
compiled with `EXACT`, so products and sums round as written. `make_rows` lays rows out by chunk ("slot"), those of an
open chunk that a page already holds included, so that everything after it works on whole tiles without masks.

Order: y = the taps from the oldest row on, each one fma; y / (exp2(-y log2 e) + 1), rounded; queries and keys times
1 / sqrt(sum of squares by the balanced tree + 1e-6), rounded. g = -exp(a_log) softplus(a + dt_bias), times log2 e;
its sums from the chunk's start ascend row by row, so decays are powers of two. beta = 1 / (exp(-b) + 1) in fp32.
Exponentials and quotients are the chip's. Rows before a sequence's start are zeros.

Shapes: N slots, C rows of a chunk, K key heads, V value heads, Dk and Dv their widths, W taps.
"""

import triton
import triton.language as tl

from skyrl_isoexec.kernels.numeric.sm90 import INTERPRETED, narrow, tree, widen

LOG2_E = tl.constexpr(1.4426950408889634)
NORM_EPS = tl.constexpr(1e-6)
S7, S6, S5, S4, S3, S2, S1 = (tl.constexpr(1 / n) for n in (15, 13, 11, 9, 7, 5, 3))
"""Of z**14 down to z**2 in atanh(z) / z: for z up to 1/3 the rest is below 2e-9."""


@triton.jit
def exp(x):
    """fp32 exponential by the chip's power of two."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def reciprocal(x):
    """1 / x by the chip's approximation, within one unit in the last place."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip


@triton.jit
def silu(y):
    """y / (exp(-y) + 1)."""
    return y * reciprocal(exp(-y) + 1.0)


@triton.jit
def unit(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of bf16 [ROWS, WIDTH] over their length, rounded to bf16."""
    wide = widen(x)
    root = tl.sqrt_rn(tree(wide * wide, ROWS, WIDTH) + NORM_EPS)
    return narrow(wide * tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), root)[:, None], tl.bfloat16)


@triton.jit
def softplus(x):
    """fp32 log(1 + exp(x)) = max(x, 0) + 2 atanh(y / (y + 2)), y = exp(-|x|)."""
    y = exp(-tl.abs(x))
    z = y * reciprocal(y + 2.0)
    s = z * z
    p = s * S7 + S6
    p = p * s + S5
    p = p * s + S4
    p = p * s + S3
    p = p * s + S2
    p = p * s + S1
    return tl.maximum(x, 0.0) + (z + z) * (p * s + 1.0)


@triton.jit
def gates(a, b, a_log, dt_bias):
    """(g in powers of two, beta) of bf16 operands of one shape, fp32."""
    g = -exp(widen(a_log)) * softplus(widen(a) + widen(dt_bias))
    return g * LOG2_E, reciprocal(exp(-widen(b)) + 1.0)


@triton.jit
def taps(
    x, conv, ring, token, position, begin, there, channel, channels, of_channel, of_tap,
    COLUMNS: tl.constexpr, W: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """fp32 convolution [rows, COLUMNS] before its silu; rows that are not `there` are zeros.

    `channel` is [1, COLUMNS] or has a row for each of token, position and there. A row before `begin` lies in `ring`
    [W, channels], at its position modulo W. `of_channel` and `of_tap` are the strides of `conv`.
    """
    total = tl.zeros((token.shape[0], COLUMNS), tl.float32)
    for tap in tl.static_range(W):
        at = position - (W - 1 - tap)
        new = there & (at >= begin)
        rows = (token - (W - 1 - tap)).to(tl.int64)
        value = tl.load(x + rows[:, None] * channels + channel, mask=new[:, None], other=0.0)
        if PAGED:
            old = there & (at < begin) & (at >= 0)
            kept = tl.load(ring + (at % W)[:, None] * channels + channel, mask=old[:, None], other=0.0)
            value = tl.where(old[:, None], kept, value)
        weight = tl.load(conv + (position * 0)[:, None] + channel * of_channel + tap * of_tap)  # in the layout of x
        total = tl.math.fma(widen(weight), widen(value), total)
    return total


@triton.jit
def single(
    x, a, b, conv, a_log, dt_bias, ring, token, position, key, head, columns,
    DK: tl.constexpr, DV: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, BV: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Of one token, whose earlier rows lie in `ring`: q and k as rows of bf16 [2, Dk], bf16 v [BV], g and beta [1]."""
    channels: tl.constexpr = 2 * HK * DK + HV * DV
    pair, one = tl.arange(0, 2), tl.arange(0, 1)
    channel = (key * DK + tl.arange(0, DK))[None, :] + (pair * HK * DK)[:, None]
    at = position + pair * 0
    y = taps(x, conv, ring, token + pair * 0, at, at, pair >= 0, channel, channels, W, 1, DK, W, True)
    two = unit(narrow(silu(y), tl.bfloat16), 2, DK)
    channel = (2 * HK * DK + head * DV + columns)[None, :]
    at = position + one
    y = taps(x, conv, ring, token + one, at, at, one == 0, channel, channels, W, 1, BV, W, True)
    at = token * HV + head + one
    g, beta = gates(
        tl.load(a + at), tl.load(b + at), tl.load(a_log + head + one), tl.load(dt_bias + head + one)
    )  # fmt: skip
    return two, tl.reshape(narrow(silu(y), tl.bfloat16), (BV,)), g, beta


@triton.jit
def slide(x, ring, source, target, token, position, channel, channels, W: tl.constexpr, PAGE: tl.constexpr):
    """The row of x into the target's ring; the W - 1 rows before it too where a page begins."""
    if (position % PAGE == 0) & (position > 0):
        for back in tl.static_range(1, W):
            at = (position - back) % W * channels + channel
            tl.store(ring + target + at, tl.load(ring + source + at))
    row = tl.load(x + token * channels + channel)
    tl.store(ring + target + position % W * channels + channel, row)


@triton.jit
def slide_all(
    x, ring, source, target, token, position, key, head, columns, part,
    DK: tl.constexpr, DV: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, W: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The row of x into the target's ring: the program's columns of v, and q and k if it is its key head's first."""
    channels: tl.constexpr = 2 * HK * DK + HV * DV
    slide(x, ring, source, target, token, position, 2 * HK * DK + head * DV + columns, channels, W, PAGE)
    if (part == 0) & (head % (HV // HK) == 0):
        at = key * DK + tl.arange(0, DK)
        slide(x, ring, source, target, token, position, at, channels, W, PAGE)
        slide(x, ring, source, target, token, position, HK * DK + at, channels, W, PAGE)


@triton.jit
def leave_conv(
    x, ring, table, ring_stride, first, begin, context, channel, channels, W: tl.constexpr, PAGE: tl.constexpr
):
    """The last W - 1 rows before each end of a page in [begin, context], and before `context`, into rings of pages."""
    source = tl.load(table + tl.maximum(begin - 1, 0) // PAGE).to(tl.int64)
    there = channel < channels
    for number in range(begin // PAGE, (context - 1) // PAGE + 1):
        page = tl.load(table + number).to(tl.int64)
        end = tl.minimum((number + 1) * PAGE, context)
        for back in tl.static_range(1, W):
            at = end - back
            new = there & (at >= begin)
            row = tl.load(x + (first + at - begin).to(tl.int64) * channels + channel, mask=new, other=0.0)
            old = there & (at >= 0) & (at < begin) & (page != source)
            kept = tl.load(ring + source * ring_stride + at % W * channels + channel, mask=old, other=0.0)
            tl.store(ring + page * ring_stride + at % W * channels + channel, tl.where(new, row, kept), mask=new | old)


@triton.jit
def place(slot, base, owner, query_start, seq_lens, C: tl.constexpr):
    """(request, its first row in the batch, its first position, its length in all, the slot's first position)."""
    request = tl.load(owner + slot)
    first = tl.load(query_start + request)
    context = tl.load(seq_lens + request)
    begin = context - (tl.load(query_start + request + 1) - first)
    start = (begin // C + slot - tl.load(base + request)) * C
    return request, first, begin, context, start


@triton.jit
def _make_gates(
    a, b, a_log, dt_bias, gate, scratch, decay, beta, first, begin, context, start,
    C: tl.constexpr, HV: tl.constexpr, HB: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """decay and beta [V, C] of a slot. `gate` [V, 2, C] holds those of rows before `begin`."""
    row, head = tl.arange(0, C)[:, None], tl.arange(0, HB)[None, :]
    position = start + row
    there = (position >= begin) & (position < context) & (head < HV)
    at = (first + position - begin).to(tl.int64) * HV + head
    is_head = head < HV
    rates = tl.broadcast_to(tl.load(a_log + head, mask=is_head, other=0.0), (C, HB))
    shifts = tl.broadcast_to(tl.load(dt_bias + head, mask=is_head, other=0.0), (C, HB))
    g, step = gates(tl.load(a + at, mask=there, other=0.0), tl.load(b + at, mask=there, other=0.0), rates, shifts)
    g, step = tl.where(there, g, 0.0), tl.where(there, step, 0.0)
    if PAGED:
        old = (position < begin) & is_head
        g = tl.where(old, tl.load(gate + head * 2 * C + row, mask=old, other=0.0), g)
        step = tl.where(old, tl.load(gate + (head * 2 + 1) * C + row, mask=old, other=0.0), step)
    tl.store(scratch + head * C + row, g, mask=is_head)
    tl.store(beta + head * C + row, step, mask=is_head)
    tl.debug_barrier()
    heads = tl.arange(0, HB)
    total = tl.zeros((HB,), tl.float32)
    for i in range(C):
        value = tl.load(scratch + heads * C + i, mask=heads < HV, other=0.0)
        total += value
        if PAGED:
            total = tl.where(start + i < begin, value, total)
        tl.store(decay + heads * C + i, total, mask=heads < HV)


@triton.jit(do_not_specialize=["num_requests", "table_stride"])
def make_rows(
    x, a, b, conv, a_log, dt_bias, base, owner, query_start, seq_lens, table, ring, keys, values, gate,
    q, k, v, steps, decay, beta, num_requests, table_stride, ring_stride, keys_stride, values_stride, gate_stride,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HB: tl.constexpr,
    W: tl.constexpr, ROWS: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a slot for one head of q, k or v, or the gates of the slot (item 0); conv is [W, channels].

    Rows of an open chunk that a page holds are put in, those of v if VALUES and zeros otherwise; g of them is not.
    """
    part, item = tl.program_id(0) % (C // ROWS), tl.program_id(1)
    slot = (tl.program_id(0) // (C // ROWS)).to(tl.int64)
    if tl.load(owner + slot) < num_requests:
        request, first, begin, context, start = place(slot, base, owner, query_start, seq_lens, C)
        if PAGED:
            page = tl.load(table + request * table_stride + tl.maximum(begin - 1, 0) // PAGE).to(tl.int64)
            ring += page * ring_stride
            keys += page * keys_stride
            values += page * values_stride
            gate += page * gate_stride
        channels: tl.constexpr = 2 * HK * DK + HV * DV
        row = part * ROWS + tl.arange(0, ROWS)
        position = start + row
        token = first + position - begin
        there = (position >= begin) & (position < context)
        if item == 0:
            if part == 0:
                _make_gates(
                    a, b, a_log, dt_bias, gate, steps + slot * HV * C, decay + slot * HV * C, beta + slot * HV * C,
                    first, begin, context, start, C, HV, HB, PAGED,
                )  # fmt: skip
        elif item <= 2 * HK:
            column = tl.arange(0, DK)
            head = (item - 1) % HK
            channel = ((item - 1) * DK + column)[None, :]
            y = taps(x, conv, ring, token, position, begin, there, channel, channels, 1, channels, DK, W, PAGED)
            made = unit(narrow(silu(y), tl.bfloat16), ROWS, DK)
            at = (slot * HK + head) * C * DK + row[:, None] * DK + column[None, :]
            if item <= HK:
                tl.store(q + at, made)
            else:
                if PAGED:
                    old = (position < begin)[:, None]
                    kept = tl.load(keys + head * C * DK + row[:, None] * DK + column[None, :], mask=old, other=0.0)
                    made = tl.where(old, kept, made)
                tl.store(k + at, made)
        else:  # other names: the two sides of a branch may differ in width
            wide = tl.arange(0, DV)
            value_head = item - 1 - 2 * HK
            of_value = (2 * HK * DK + value_head * DV + wide)[None, :]
            z = taps(x, conv, ring, token, position, begin, there, of_value, channels, 1, channels, DV, W, PAGED)
            value, own = narrow(silu(z), tl.bfloat16), row[:, None] * DV + wide[None, :]
            if PAGED and VALUES:
                begun = (position < begin)[:, None]
                value = tl.where(begun, tl.load(values + value_head * C * DV + own, mask=begun, other=0.0), value)
            tl.store(v + (slot * HV + value_head) * C * DV + own, value)
