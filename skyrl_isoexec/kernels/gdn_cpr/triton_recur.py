"""The recurrence of the chunkwise-parallel recurrent gated delta rule on Hopper: parallel over chunks, and one step.

    S = exp(g_t) S    d = beta_t (v_t - S k_t)    S = S + d k_t (fma)    o_t = scale S q_t

in fp32 from the snapshot of the state at the chunk's start, products over Dk by the balanced tree, o rounded once.
Notable: what each chunk starts from is the chunk pass of `numeric.sm90_gdn_chunk`, an fp32 chain and its snapshot. A
decode step is three launches: `enter` makes the row, `step` runs the same recurrence on the state of the open chunk,
which is never rounded, and `close` redoes, for requests at a chunk's end, the chunk pass from the chain and the
chunk's rows, which the page holds. `scan` and `step` are those of `warp_recur.py` for Triton's interpreter.

Shapes: N slots, C rows of a chunk, K key heads, V value heads, Dk and Dv their widths.
"""

import triton
import triton.language as tl

from skyrl_isoexec.kernels.numeric.sm90 import dot, narrow, tree, widen
from skyrl_isoexec.kernels.numeric.sm90_gdn_chunk import (
    advance,
    copy,
    invert,
    missing,
    reach,
    remainder,
    restore,
    within_of,
)
from skyrl_isoexec.kernels.numeric.sm90_gdn_rows import gates, leave_conv, place, silu, slide, taps, unit


@triton.jit
def recur(state, q, k, v, g, beta, scale, BV: tl.constexpr, DK: tl.constexpr):
    """(the state after a row, bf16 o [BV]) of the state [BV, Dk], q and k [Dk], v [BV], g and beta that fit [BV]."""
    state = state * tl.exp2(g)[:, None]
    key = tl.broadcast_to(widen(k)[None, :], state.shape)
    d = beta * (widen(v) - tree(state * key, BV, DK))
    state = tl.math.fma(tl.broadcast_to(d[:, None], state.shape), key, state)
    return state, narrow(scale * tree(state * widen(q)[None, :], BV, DK), tl.bfloat16)


@triton.jit(do_not_specialize=["num_requests", "table_stride"])
def scan(
    q, k, v, steps, beta, snapshots, base, owner, query_start, seq_lens, table, recurrent, out, scale, num_requests,
    table_stride, recurrent_stride,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, BV: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """o of a slot's new rows, BV columns of one value head; leaves the state of an open chunk in its page."""
    head, slot = tl.program_id(0) // (DV // BV), tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) % (DV // BV) * BV + tl.arange(0, BV)
    if tl.load(owner + slot) < num_requests:
        request, first, begin, context, start = place(slot, base, owner, query_start, seq_lens, C)
        deep = tl.arange(0, DK)
        at = slot * HV + head
        inside = head * DK * DV + columns[:, None] + deep[None, :] * DV
        old, stop = tl.maximum(begin - start, 0), tl.minimum(context - start, C)
        state = widen(tl.load(snapshots + at * DK * DV + deep[None, :] * DV + columns[:, None]))
        if PAGED:
            pages = table + request * table_stride
            if old > 0:
                source = tl.load(pages + (begin - 1) // PAGE).to(tl.int64)
                state = tl.load(recurrent + source * recurrent_stride + inside)
        shared = (slot * HK + head // (HV // HK)) * C * DK + deep
        for i in range(old, stop):
            here = at * C + i
            state, o = recur(
                state, tl.load(q + shared + i * DK), tl.load(k + shared + i * DK), tl.load(v + here * DV + columns),
                tl.load(steps + here + columns * 0), tl.load(beta + here + columns * 0), scale, BV, DK,
            )  # fmt: skip
            to = (first + start + i - begin).to(tl.int64) * HV + head
            tl.store(out + to * DV + columns, o)
        if PAGED:
            if stop < C:
                page = tl.load(pages + (context - 1) // PAGE).to(tl.int64)
                tl.store(recurrent + page * recurrent_stride + inside, state)


@triton.jit(do_not_specialize=["table_stride"])
def leave(
    x, k, v, decay, beta, base, query_start, seq_lens, table, ring, keys, values, gate,
    table_stride, ring_stride, keys_stride, values_stride, gate_stride,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, W: tl.constexpr,
    CHANNELS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Rows of a request's open chunk, for one value head; items past the heads keep rows of x."""
    item, request = tl.program_id(0), tl.program_id(1)
    slot = tl.load(base + request + 1).to(tl.int64) - 1
    if slot >= tl.load(base + request):
        first, context = tl.load(query_start + request), tl.load(seq_lens + request)
        begin = context - (tl.load(query_start + request + 1) - first)
        table += request * table_stride
        page = tl.load(table + (context - 1) // PAGE).to(tl.int64)
        if item >= HV:
            channel = (item - HV) * CHANNELS + tl.arange(0, CHANNELS)
            leave_conv(x, ring, table, ring_stride, first, begin, context, channel, 2 * HK * DK + HV * DV, W, PAGE)
        else:
            row, deep, column = tl.arange(0, C), tl.arange(0, DK), tl.arange(0, DV)
            group: tl.constexpr = HV // HK
            live = row < context % C
            own, wide = row[:, None] * DK + deep[None, :], row[:, None] * DV + column[None, :]
            at = slot * HV + item
            if item % group == 0:
                made = tl.load(k + (slot * HK + item // group) * C * DK + own)
                tl.store(keys + page * keys_stride + item // group * C * DK + own, made, mask=live[:, None])
            gate += page * gate_stride + item * 2 * C
            tl.store(gate + row, tl.load(decay + at * C + row), mask=live)
            tl.store(gate + C + row, tl.load(beta + at * C + row), mask=live)
            values += page * values_stride + item * C * DV
            tl.store(values + wide, tl.load(v + at * C * DV + wide), mask=live[:, None])


@triton.jit(do_not_specialize=["table_stride", "num_requests"])
def close(
    keys, values, snapshot, rest, gate, table, query_start, seq_lens, num_requests,
    table_stride, keys_stride, values_stride, snapshot_stride, rest_stride, gate_stride,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, BV: tl.constexpr,
    PAGE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The chunk pass of those of SPAN requests whose one row ends a chunk: chain and snapshot of BV columns there."""
    head, first = tl.program_id(0) // (DV // BV), tl.program_id(1) * SPAN
    columns = tl.program_id(0) % (DV // BV) * BV + tl.arange(0, BV)
    some = first + tl.arange(0, SPAN)
    there = some < num_requests
    ends = tl.load(seq_lens + some, mask=there, other=1) % C == 0
    token = tl.load(query_start + some, mask=there, other=0)
    ends = ends & (tl.load(query_start + some + 1, mask=there, other=0) - token == 1)
    if tl.max(ends.to(tl.int32), axis=0) > 0:
        for request in range(first, tl.minimum(first + SPAN, num_requests)):
            length = tl.load(query_start + request + 1) - tl.load(query_start + request)
            position = tl.load(seq_lens + request) - 1
            if (length == 1) & (position % C == C - 1):
                pages = table + request * table_stride
                target = tl.load(pages + position // PAGE).to(tl.int64)
                source = tl.load(pages + tl.maximum(position - 1, 0) // PAGE).to(tl.int64)
                row, deep = tl.arange(0, C), tl.arange(0, DK)
                held = keys + target * keys_stride + head // (HV // HK) * C * DK
                own = values + target * values_stride + head * C * DV
                number = gate + target * gate_stride + head * 2 * C
                K = tl.load(held + row[:, None] * DK + deep[None, :])
                total, steps, end = tl.load(number + row), tl.load(number + C + row), tl.load(number + C - 1)
                T, _, _ = invert(K, total, steps, C)
                Z = reach(T, K, total, end)
                value = tl.load(own + row[:, None] * DV + columns[None, :])
                at = within_of(head, deep, columns, DK, DV)
                later = (position >= C) & (columns >= 0)[None, :]
                begun = tl.load(snapshot + source * snapshot_stride + at, mask=later, other=0.0)
                chain = restore(begun, tl.load(rest + source * rest_stride + at, mask=later, other=0.0))
                e = missing(value, steps[:, None], total[:, None], dot(K, begun, tl.zeros((C, BV), tl.float32)))
                chain = advance(chain, Z, e, end)
                rounded = narrow(chain, tl.bfloat16)
                tl.store(snapshot + target * snapshot_stride + at, rounded)
                tl.store(rest + target * rest_stride + at, remainder(chain, rounded))


@triton.jit(do_not_specialize=["table_stride"])
def enter(
    x, a, b, conv, a_log, dt_bias, ring, keys, values, snapshot, rest, gate, q, g, table, query_start, seq_lens,
    table_stride, ring_stride, keys_stride, values_stride, snapshot_stride, rest_stride, gate_stride,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, W: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """The one row of a request, for a key head and its value heads: k, v, G and beta into the page, q and g beside."""
    key, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - token
    token = token.to(tl.int64)
    if length == 1:
        position = tl.load(seq_lens + request) - 1
        t = position % C
        pages = table + request * table_stride
        target = tl.load(pages + position // PAGE).to(tl.int64)
        source = tl.load(pages + tl.maximum(position - 1, 0) // PAGE).to(tl.int64)
        channels: tl.constexpr = 2 * HK * DK + HV * DV
        pair, one, deep, columns = tl.arange(0, 2), tl.arange(0, 1), tl.arange(0, DK), tl.arange(0, DV)
        before, after = source * ring_stride, target * ring_stride
        at = position + pair * 0
        channel = (key * DK + deep)[None, :] + (pair * HK * DK)[:, None]
        y = taps(x, conv, ring + before, token + pair * 0, at, at, pair >= 0, channel, channels, W, 1, DK, W, True)
        two = unit(narrow(silu(y), tl.bfloat16), 2, DK)
        tl.store(q + (request * HK + key) * DK + (pair * 0)[:, None] + deep[None, :], two, mask=(pair == 0)[:, None])
        held = keys + target * keys_stride + (key * C + t) * DK
        tl.store(held + (pair * 0)[:, None] + deep[None, :], two, mask=(pair == 1)[:, None])
        slide(x, ring, before, after, token, position, key * DK + deep, channels, W, PAGE)
        slide(x, ring, before, after, token, position, (HK + key) * DK + deep, channels, W, PAGE)
        for i in tl.static_range(HV // HK):
            head = key * (HV // HK) + i
            at = position + one
            channel = 2 * HK * DK + head * DV + columns
            y = taps(
                x, conv, ring + before, token + one, at, at, one == 0, channel[None, :], channels, W, 1, DV, W, True
            )  # fmt: skip
            value = narrow(silu(y), tl.bfloat16)
            tl.store(values + target * values_stride + (head * C + t) * DV + one[:, None] + columns[None, :], value)
            slide(x, ring, before, after, token, position, channel, channels, W, PAGE)
            at = token * HV + head + one
            more, beta = gates(
                tl.load(a + at), tl.load(b + at), tl.load(a_log + head + one), tl.load(dt_bias + head + one)
            )  # fmt: skip
            number = gate + target * gate_stride + head * 2 * C
            total = tl.load(number + tl.maximum(t - 1, 0) + one, mask=(one == 0) & (t > 0), other=0.0)
            tl.store(number + t + one, total + more)
            tl.store(number + C + t + one, beta)
            tl.store(g + request * HV + head + one, more)
            if (position % PAGE == 0) & (position > 0):
                copy(
                    snapshot + source * snapshot_stride, rest + source * rest_stride,
                    snapshot + target * snapshot_stride, rest + target * rest_stride, head, columns, DK, DV,
                )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"])
def step(
    q, g, keys, values, snapshot, gate, recurrent, table, query_start, seq_lens, out,
    table_stride, keys_stride, values_stride, snapshot_stride, gate_stride, recurrent_stride, scale,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, BV: tl.constexpr,
    PAGE: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """BV columns of one value head of a request with one row, which `enter` has put into its page.

    ALONE: no other kernel serves longer requests, so theirs become NaN.
    """
    head, request = tl.program_id(0) // (DV // BV), tl.program_id(1)
    columns = tl.program_id(0) % (DV // BV) * BV + tl.arange(0, BV)
    token = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - token
    token = token.to(tl.int64)
    if ALONE:
        for more in range(tl.where(length > 1, length, 0)):
            nan = narrow(tl.full((BV,), float("nan"), tl.float32), tl.bfloat16)
            tl.store(out + ((token + more) * HV + head) * DV + columns, nan)
    if length == 1:
        position = tl.load(seq_lens + request) - 1
        t = position % C
        pages = table + request * table_stride
        target = tl.load(pages + position // PAGE).to(tl.int64)
        source = tl.load(pages + tl.maximum(position - 1, 0) // PAGE).to(tl.int64)
        deep, key = tl.arange(0, DK), head // (HV // HK)
        inside = head * DK * DV + columns[:, None] + deep[None, :] * DV
        recurrent += target * recurrent_stride
        going = (t > 0) & (columns >= 0)[:, None]
        fresh = (t == 0) & (position >= C) & (columns >= 0)[:, None]
        state = tl.load(recurrent + inside, mask=going, other=0.0)
        begun = tl.load(snapshot + source * snapshot_stride + inside, mask=fresh, other=0.0)
        state = tl.where(going, state, widen(begun))
        state, o = recur(
            state, tl.load(q + (request * HK + key) * DK + deep),
            tl.load(keys + target * keys_stride + (key * C + t) * DK + deep),
            tl.load(values + target * values_stride + (head * C + t) * DV + columns),
            tl.load(g + request * HV + head + columns * 0),
            tl.load(gate + target * gate_stride + (head * 2 + 1) * C + t + columns * 0), scale, BV, DK,
        )  # fmt: skip
        tl.store(out + (token * HV + head) * DV + columns, o)
        if t < C - 1:
            tl.store(recurrent + inside, state)
