"""Gradients of the rows of a gated delta rule on Hopper: norms, silu, convolution and gates.

Notable: the convolution and its silu are made again from x. No atomics: a program adds the rows of its tile, and
PyTorch adds the tiles; equal inputs give equal bits.

Shapes: T tokens, N slots, C rows of a chunk, K key heads, V value heads, Dk and Dv their widths, W taps.
"""

import triton
import triton.language as tl

from skyrl_isoexec.kernels.numeric.sm90 import narrow, widen
from skyrl_isoexec.kernels.numeric.sm90_gdn_rows import LOG2_E, NORM_EPS, exp, gates, place, reciprocal, silu, taps


@triton.jit
def _silu_back(y, grad):
    """Gradient for y of grad * silu(y)."""
    s = reciprocal(exp(-y) + 1.0)
    return grad * s * (1.0 + y * (1.0 - s))


@triton.jit
def _gates_back(
    a, b, a_log, dt_bias, dg, db, da, db_out, rates, shifts, first, begin, context, start,
    C: tl.constexpr, HV: tl.constexpr, HB: tl.constexpr,
):  # fmt: skip
    """Gradients of a and b [T, V], and a slot's part [V] of those of a_log and dt_bias, from dg and db [V, C]."""
    row, head = tl.arange(0, C)[:, None], tl.arange(0, HB)[None, :]
    position = start + row
    there = (position >= begin) & (position < context) & (head < HV)
    at = (first + position - begin).to(tl.int64) * HV + head
    is_head = tl.arange(0, HB) < HV
    rate = tl.broadcast_to(tl.load(a_log + head, mask=head < HV, other=0.0), (C, HB))
    shift = tl.broadcast_to(tl.load(dt_bias + head, mask=head < HV, other=0.0), (C, HB))
    a_row = tl.load(a + at, mask=there, other=0.0)
    g, _ = gates(a_row, tl.load(b + at, mask=there, other=0.0), rate, shift)
    grad = tl.load(dg + head * C + row, mask=there, other=0.0)
    back = grad * -exp(widen(rate)) * reciprocal(exp(-(widen(a_row) + widen(shift))) + 1.0)
    tl.store(da + at, narrow(back, tl.bfloat16), mask=there)
    tl.store(db_out + at, narrow(tl.load(db + head * C + row, mask=there, other=0.0), tl.bfloat16), mask=there)
    heads = tl.arange(0, HB)
    tl.store(rates + heads, tl.sum(grad * (g / LOG2_E), axis=0), mask=is_head)
    tl.store(shifts + heads, tl.sum(back, axis=0), mask=is_head)


@triton.jit
def _keys_back(
    x, conv, source, dy, token, position, begin, there, slot, head, first_channel, row, channels,
    C: tl.constexpr, DK: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dy of a query's or a key's head: through its norm, its rounding's argument and silu, the group's parts added."""
    group: tl.constexpr = HV // HK
    column = tl.arange(0, DK)
    channel = (first_channel + column)[None, :]
    y = taps(x, conv, x, token, position, begin, there, channel, channels, 1, channels, DK, W, False)
    total = tl.zeros((ROWS, DK), tl.float32)
    for member in range(group):
        at = (slot * HV + head * group + member) * C * DK + row[:, None] * DK + column[None, :]
        total += widen(tl.load(source + at))
    value = widen(narrow(silu(y), tl.bfloat16))
    inverse = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=1) + NORM_EPS)
    along = tl.sum(total * value, axis=1) * inverse * inverse
    back = inverse[:, None] * (total - value * along[:, None])
    out = token.to(tl.int64)[:, None] * channels + channel
    tl.store(dy + out, narrow(_silu_back(y, back), tl.bfloat16), mask=there[:, None])


@triton.jit
def _values_back(
    x, conv, dv, dy, token, position, begin, there, slot, head, row, channels,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """dy of a value's head: through silu."""
    column = tl.arange(0, DV)
    channel = (2 * HK * DK + head * DV + column)[None, :]
    y = taps(x, conv, x, token, position, begin, there, channel, channels, 1, channels, DV, W, False)
    back = widen(tl.load(dv + (slot * HV + head) * C * DV + row[:, None] * DV + column[None, :]))
    out = token.to(tl.int64)[:, None] * channels + channel
    tl.store(dy + out, narrow(_silu_back(y, back), tl.bfloat16), mask=there[:, None])


@triton.jit(do_not_specialize=["num_requests"])
def rows_back(
    x, a, b, conv, a_log, dt_bias, base, owner, query_start, seq_lens, dq, dk, dv, dg, db, dy, da, db_out, rates,
    shifts, num_requests,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HB: tl.constexpr,
    W: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dy [T, channels], before the silu, of ROWS rows of a slot and one head, or the gates of the slot (item 0)."""
    part, item = tl.program_id(0) % (C // ROWS), tl.program_id(1)
    slot = (tl.program_id(0) // (C // ROWS)).to(tl.int64)
    if tl.load(owner + slot) < num_requests:
        _, first, begin, context, start = place(slot, base, owner, query_start, seq_lens, C)
        channels: tl.constexpr = 2 * HK * DK + HV * DV
        row = part * ROWS + tl.arange(0, ROWS)
        position = start + row
        token = first + position - begin
        there = (position >= begin) & (position < context)
        if item == 0:
            if part == 0:
                _gates_back(
                    a, b, a_log, dt_bias, dg + slot * HV * C, db + slot * HV * C, da, db_out, rates + slot * HV,
                    shifts + slot * HV, first, begin, context, start, C, HV, HB,
                )  # fmt: skip
        elif item <= 2 * HK:
            _keys_back(
                x, conv, dq if item <= HK else dk, dy, token, position, begin, there, slot, (item - 1) % HK,
                (item - 1) * DK, row, channels, C, DK, HK, HV, W, ROWS,
            )  # fmt: skip
        else:
            _values_back(
                x, conv, dv, dy, token, position, begin, there, slot, item - 1 - 2 * HK, row, channels, C, DK, DV, HK,
                HV, W,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_requests", "channels"])
def conv_back(
    x, conv, dy, base, owner, query_start, seq_lens, dx, weights, num_requests, channels,
    C: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx [T, channels] of ROWS rows of a slot, and their part of the gradient of conv, [W, channels]."""
    part, tile = tl.program_id(0) % (C // ROWS), tl.program_id(0).to(tl.int64)
    slot = tile // (C // ROWS)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < channels
    if tl.load(owner + slot) < num_requests:
        _, first, begin, context, start = place(slot, base, owner, query_start, seq_lens, C)
        position = start + part * ROWS + tl.arange(0, ROWS)
        token = (first + position - begin).to(tl.int64)
        there = (position >= begin) & (position < context)
        here = token[:, None] * channels + channel[None, :]
        own = widen(tl.load(x + here, mask=there[:, None] & inside[None, :], other=0.0))
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for tap in tl.static_range(W):
            later = W - 1 - tap
            at = (token + later)[:, None] * channels + channel[None, :]
            mask = (there & (position + later < context))[:, None] & inside[None, :]
            grad = widen(tl.load(dy + at, mask=mask, other=0.0))
            weight = widen(tl.load(conv + tap * channels + channel, mask=inside, other=0.0))
            total += weight[None, :] * grad
            tl.store(weights + (tile * W + tap) * channels + channel, tl.sum(own * grad, axis=0), mask=inside)
        tl.store(dx + here, narrow(total, tl.bfloat16), mask=there[:, None] & inside[None, :])
    else:
        for tap in tl.static_range(W):
            tl.store(weights + (tile * W + tap) * channels + channel, tl.zeros((COLUMNS,), tl.float32), mask=inside)
