"""Outputs of the row-causal gated delta rule on Hopper, parallel over chunks, and what an open chunk leaves behind.

    o_t = scale (exp(G_t) (q_t S0) + round(round(P)_t T) e), P_ts = exp(G_t - G_s) (q_t . k_s), s <= t

rounded once; the rest is in `numeric.sm90_gdn_chunk`. What must stay equal: `triton_step.py` computes one row of this.
The first product is where the second one's accumulator starts: Triton itself turns a sum of a product into that, and
must not find it in one of the two kernels alone.

Shapes: N slots, C rows of a chunk, K key heads, V value heads, Dk and Dv their widths.
"""

import triton
import triton.language as tl

from skyrl_isoexec.kernels.numeric.sm90 import dot, narrow
from skyrl_isoexec.kernels.numeric.sm90_gdn_chunk import BLOCK, invert, powers
from skyrl_isoexec.kernels.numeric.sm90_gdn_rows import leave_conv, place


@triton.jit(do_not_specialize=["num_requests"])
def attend(
    q, k, decay, inverse, errors, snapshots, base, owner, query_start, seq_lens, out, scale, num_requests,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """o of a slot's new rows, BV columns of one value head."""
    head, slot = tl.program_id(0) // (DV // BV), tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) % (DV // BV) * BV + tl.arange(0, BV)
    if tl.load(owner + slot) < num_requests:
        _, first, begin, context, start = place(slot, base, owner, query_start, seq_lens, C)
        row, deep = tl.arange(0, C), tl.arange(0, DK)
        at = slot * HV + head
        where = (slot * HK + head // (HV // HK)) * C * DK + row[:, None] * DK + deep[None, :]
        queries, keys = tl.load(q + where), tl.load(k + where)
        total = tl.load(decay + at * C + row)
        T = tl.load(inverse + at * C * C + row[:, None] * C + row[None, :])
        none = tl.zeros((C, C), tl.float32)
        weights = narrow(powers(total, C) * dot(queries, tl.trans(keys), none), tl.bfloat16)
        mixed = narrow(dot(weights, T, none), tl.bfloat16)
        S0 = tl.load(snapshots + at * DK * DV + deep[:, None] * DV + columns[None, :])
        e = tl.load(errors + at * C * DV + row[:, None] * DV + columns[None, :])
        first_part = tl.exp2(total)[:, None] * dot(queries, S0, tl.zeros((C, BV), tl.float32))
        y = narrow(scale * dot(mixed, e, first_part), tl.bfloat16)
        position = start + row
        there = (position >= begin) & (position < context)
        to = (first + position - begin).to(tl.int64) * HV + head
        tl.store(out + to[:, None] * DV + columns[None, :], y, mask=there[:, None])


@triton.jit(do_not_specialize=["table_stride"])
def leave(
    x, k, decay, beta, errors, base, query_start, seq_lens, table, ring, keys, kept, rows, gate, blocks,
    table_stride, ring_stride, keys_stride, kept_stride, rows_stride, gate_stride, blocks_stride,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, W: tl.constexpr,
    CHANNELS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """What a request's open chunk needs to go on, for one value head; items past the heads keep rows of x."""
    item, request = tl.program_id(0), tl.program_id(1)
    slot = tl.load(base + request + 1).to(tl.int64) - 1
    if slot >= tl.load(base + request):
        first, context = tl.load(query_start + request), tl.load(seq_lens + request)
        begin = context - (tl.load(query_start + request + 1) - first)
        table += request * table_stride
        page = tl.load(table + (context - 1) // PAGE).to(tl.int64)
        num_open = context % C
        if item >= HV:
            channel = (item - HV) * CHANNELS + tl.arange(0, CHANNELS)
            leave_conv(x, ring, table, ring_stride, first, begin, context, channel, 2 * HK * DK + HV * DV, W, PAGE)
        elif num_open > 0:
            row, deep, column = tl.arange(0, C), tl.arange(0, DK), tl.arange(0, DV)
            group: tl.constexpr = HV // HK
            live = row < num_open
            at = slot * HV + item
            own = row[:, None] * DK + deep[None, :]
            made = tl.load(k + (slot * HK + item // group) * C * DK + own)
            if item % group == 0:
                tl.store(keys + page * keys_stride + item // group * C * DK + own, made, mask=live[:, None])
            total, steps = tl.load(decay + at * C + row), tl.load(beta + at * C + row)
            gate += page * gate_stride + item * 2 * C
            tl.store(gate + row, total, mask=live)
            tl.store(gate + C + row, steps, mask=live)
            e = tl.load(errors + at * C * DV + row[:, None] * DV + column[None, :])
            tl.store(kept + page * kept_stride + item * C * DV + row[:, None] * DV + column[None, :], e,
                     mask=live[:, None])  # fmt: skip
            T, X, D = invert(made, total, steps, C)
            rows += page * rows_stride + item * (C + BLOCK) * C
            tl.store(rows + row[None, :] * C + row[:, None], T, mask=live[None, :])
            current = live & (row // BLOCK == num_open // BLOCK)
            tl.store(rows + (C + row % BLOCK)[None, :] * C + row[:, None], X, mask=current[None, :])
            number = tl.arange(0, C // BLOCK)[:, None, None]
            i, j = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
            inside = (number == num_open // BLOCK) & (j < num_open % BLOCK) & (i >= 0)
            to = blocks + page * blocks_stride + item * BLOCK * BLOCK + i * BLOCK + j + number * 0
            tl.store(to, D, mask=inside)
