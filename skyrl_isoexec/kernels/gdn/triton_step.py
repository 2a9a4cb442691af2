"""A decode step of the row-causal gated delta rule on Hopper: one row of its chunk, in one launch.

Notable: nothing recurs. Row t of the chunk needs of earlier rows k, G and e, the finished rows of T and, of its block
of 16 rows, X and D; all of it lies in the page. What the page holds is the tall operand of every product; the row, its
query as column 0 and its key as column 1 of SIDE, is the narrow one: the tensor core's bits are those of a prefill.
Products over rows of the chunk take the blocks before the row's own first, then its own, in which the row is put.
Only the last row of a chunk touches the state. What programs of one key head share is written by one of them into
places that the others do not read in this launch: rows of the convolution lie at their position modulo W, rows of a
chunk at their number.

The order is that of `numeric.sm90_gdn_rows`, `numeric.sm90_gdn_chunk` and `triton_outputs.py`, row by row.
Shapes: C rows of a chunk, K key heads, V value heads, Dk and Dv their widths, W taps.
"""

import triton
import triton.language as tl

from skyrl_isoexec.kernels.numeric.sm90 import dot, narrow, widen
from skyrl_isoexec.kernels.numeric.sm90_gdn_chunk import (
    BLOCK,
    advance,
    copy,
    missing,
    reach,
    remainder,
    restore,
    substitute,
    within_of,
)
from skyrl_isoexec.kernels.numeric.sm90_gdn_rows import single, slide_all

SIDE = tl.constexpr(16)
"""Columns of the narrow operand."""


@triton.jit
def pick(tile, number):
    """One column of a tile to the bit: a sum with zeros whose sign changes no zero."""
    return tl.sum(tl.where(tl.arange(0, tile.shape[1])[None, :] == number, tile, -0.0), axis=1)


@triton.jit
def weigh(scores, power, beta, before, upto):
    """bf16 [rows, SIDE] of scores [rows, SIDE], exp(G_t - G_s), and whether s < t, s <= t: P_t and L_t as columns."""
    column = tl.arange(0, SIDE)[None, :]
    decayed = power[:, None] * scores
    mine = tl.where((column == 0) & upto[:, None], decayed, 0.0)
    return tl.where((column == 1) & before[:, None], tl.broadcast_to(beta[None, :], decayed.shape) * decayed, mine)


@triton.jit(do_not_specialize=["table_stride"])
def step(
    x, a, b, conv, a_log, dt_bias, ring, keys, kept, rows, snapshot, rest, gate, blocks, table, query_start, seq_lens,
    out, table_stride, ring_stride, keys_stride, kept_stride, rows_stride, snapshot_stride, rest_stride, gate_stride,
    blocks_stride, scale,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, W: tl.constexpr,
    BV: tl.constexpr, PAGE: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """BV columns of one value head of a request with one row. ALONE: no other kernel serves longer requests, so theirs
    become NaN."""
    head, request = tl.program_id(0) // (DV // BV), tl.program_id(1)
    part = tl.program_id(0) % (DV // BV)
    columns = part * BV + tl.arange(0, BV)
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
        local, first = t % BLOCK, t // BLOCK * BLOCK
        pages = table + request * table_stride
        target = tl.load(pages + position // PAGE).to(tl.int64)
        source = tl.load(pages + tl.maximum(position - 1, 0) // PAGE).to(tl.int64)
        group: tl.constexpr = HV // HK
        key = head // group
        row, i, deep = tl.arange(0, C), tl.arange(0, BLOCK), tl.arange(0, DK)
        done, before, here = row < first, i < local, i == local
        one = tl.arange(0, 1)

        # what the page holds
        keys += target * keys_stride + key * C * DK
        kept += target * kept_stride + head * C * DV
        rows += target * rows_stride + head * (C + BLOCK) * C
        gate += target * gate_stride + head * 2 * C
        blocks += target * blocks_stride + head * BLOCK * BLOCK
        within = within_of(head, deep, columns, DK, DV)
        later = (position >= C) & (columns >= 0)[None, :]
        own = (first + i)[:, None]
        S0 = tl.load(snapshot + source * snapshot_stride + within, mask=later, other=0.0)
        K0 = tl.load(keys + row[:, None] * DK + deep[None, :], mask=done[:, None], other=0.0)
        K1 = tl.load(keys + own * DK + deep[None, :], mask=before[:, None], other=0.0)
        T0 = tl.load(rows + row[:, None] * C + row[None, :], mask=done[:, None], other=0.0)
        T1 = tl.load(rows + own * C + row[None, :], mask=before[:, None], other=0.0)
        X1 = tl.load(rows + (C + i)[:, None] * C + row[None, :], mask=before[:, None], other=0.0)
        D1 = tl.load(blocks + i[:, None] * BLOCK + i[None, :], mask=before[None, :], other=0.0)
        G0 = tl.load(gate + row, mask=done, other=0.0)
        G1 = tl.load(gate + first + i, mask=before, other=0.0)

        # the row itself
        two, v_t, g, beta = single(
            x, a, b, conv, a_log, dt_bias, ring + source * ring_stride, token, position, key, head, columns,
            DK, DV, HK, HV, BV, W,
        )  # fmt: skip
        side, pair = tl.arange(0, SIDE), tl.arange(0, 2)
        k_t = narrow(tl.sum(tl.where(pair[:, None] == 1, widen(two), 0.0), axis=0), tl.bfloat16)
        again = tl.arange(0, SIDE // 2)[:, None, None] == 0
        both = tl.where(again, two[None, :, :], narrow(tl.zeros((1, 2, DK), tl.float32), tl.bfloat16))
        both = tl.reshape(both, (SIDE, DK))
        G = tl.load(gate + tl.maximum(t - 1, 0) + one, mask=(one == 0) & (t > 0), other=0.0) + g

        # the snapshot, and e of earlier rows: in flight while T is made
        base = dot(tl.trans(S0), tl.trans(both), tl.zeros((BV, SIDE), tl.float32))
        e_t = missing(v_t, tl.broadcast_to(beta, (BV,)), tl.broadcast_to(G, (BV,)), pick(base, 1))
        e0 = tl.load(kept + row[:, None] * DV + columns[None, :], mask=done[:, None], other=0.0)
        e1 = tl.load(kept + own * DV + columns[None, :], mask=before[:, None], other=0.0)

        # P_t and L_t; then X, D, T and P T of the row
        K1 = tl.where(here[:, None], k_t[None, :], K1)
        scores = dot(K0, tl.trans(both), tl.zeros((C, SIDE), tl.float32))
        whole = tl.broadcast_to(G, (C,))
        w0 = weigh(scores, tl.exp2(tl.where(done, whole - G0, 0.0)), beta, done, done)
        scores = dot(K1, tl.trans(both), tl.zeros((BLOCK, SIDE), tl.float32))
        whole = tl.broadcast_to(G, (BLOCK,))
        w1 = weigh(scores, tl.exp2(tl.where(before, whole - G1, 0.0)), beta, before, before | here)
        mixed = dot(tl.trans(T0), narrow(w0, tl.bfloat16), tl.zeros((C, SIDE), tl.float32))
        X_t = narrow(pick(mixed, 1), tl.bfloat16)
        D_t = here.to(tl.float32) - substitute(pick(w1, 1)[None, :], D1, BLOCK)
        X1 = tl.where(here[:, None], X_t[None, :], X1)
        d = narrow(tl.where(side[None, :] == 1, D_t[:, None], 0.0), tl.bfloat16)
        outer = -pick(dot(tl.trans(X1), d, tl.zeros((C, SIDE), tl.float32)), 1)
        block = tl.arange(0, C // BLOCK) == t // BLOCK
        spread = tl.reshape(tl.where(block[:, None], D_t[None, :], 0.0), (C,))
        T_t = narrow(tl.where(done, outer, spread), tl.bfloat16)
        T1 = tl.where(here[:, None], T_t[None, :], T1)
        mixed = dot(tl.trans(T1), narrow(w1, tl.bfloat16), mixed)
        cut = tl.reshape(mixed, (C // BLOCK, BLOCK, SIDE))
        mixed_own = narrow(tl.sum(tl.where(block[:, None, None], cut, 0.0), axis=0), tl.bfloat16)

        # o of the row
        e1 = tl.where(here[:, None], e_t[None, :], e1)
        whole = tl.broadcast_to(tl.exp2(G)[:, None], base.shape)
        inner = dot(tl.trans(e0), narrow(mixed, tl.bfloat16), whole * base)
        inner = dot(tl.trans(e1), mixed_own, inner)
        o = narrow(scale * pick(inner, 0), tl.bfloat16)
        tl.store(out + (token * HV + head) * DV + columns, o)

        # what the next rows need
        tl.store(kept + t * DV + columns, e_t)
        slide_all(
            x, ring, source * ring_stride, target * ring_stride, token, position, key, head, columns, part,
            DK, DV, HK, HV, W, PAGE,
        )  # fmt: skip
        if part == 0:
            tl.store(rows + t * C + row, T_t)
            tl.store(rows + (C + local) * C + row, X_t)
            tl.store(blocks + i * BLOCK + local, D_t)
            tl.store(gate + t + one, G)
            tl.store(gate + C + t + one, beta)
            if head % group == 0:
                tl.store(keys + t * DK + deep, k_t)

        # the state
        if t == C - 1:
            finish(
                keys, kept, rows, gate, snapshot + source * snapshot_stride, rest + source * rest_stride,
                snapshot + target * snapshot_stride, rest + target * rest_stride, k_t, T_t, e_t, G, head, part,
                position >= C, C, DK, DV, BV,
            )  # fmt: skip
        elif (position % PAGE == 0) & (position > 0):
            copy(
                snapshot + source * snapshot_stride, rest + source * rest_stride, snapshot + target * snapshot_stride,
                rest + target * rest_stride, head, columns, DK, DV,
            )  # fmt: skip


@triton.jit
def finish(
    keys, kept, rows, gate, from_high, from_low, to_high, to_low, k_t, T_t, e_t, G, head, part, later,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The state at the end of a chunk, in tiles of columns, from its rows in the page and its last row."""
    row, deep = tl.arange(0, C), tl.arange(0, DK)
    last, before = (row == C - 1)[:, None], row < C - 1
    K = tl.load(keys + row[:, None] * DK + deep[None, :], mask=before[:, None], other=0.0)
    T = tl.load(rows + row[:, None] * C + row[None, :], mask=before[:, None], other=0.0)
    whole = tl.broadcast_to(G, (C,))
    total = tl.where(before, tl.load(gate + row, mask=before, other=0.0), whole)
    end = tl.sum(G, axis=0)
    Z = reach(tl.trans(tl.where(last, T_t[None, :], T)), tl.where(last, k_t[None, :], K), total, end)
    tl.store(kept + (C - 1) * DV + part * BV + tl.arange(0, BV), e_t)
    tl.debug_barrier()
    PIECE: tl.constexpr = 32 if BV > 32 else BV
    for start in range(0, BV, PIECE):
        columns = part * BV + start + tl.arange(0, PIECE)
        e = tl.load(kept + row[:, None] * DV + columns[None, :])
        place = within_of(head, deep, columns, DK, DV)
        there = later & (columns >= 0)[None, :]
        chain = restore(
            tl.load(from_high + place, mask=there, other=0.0), tl.load(from_low + place, mask=there, other=0.0)
        )
        chain = advance(chain, Z, e, end)
        rounded = narrow(chain, tl.bfloat16)
        tl.store(to_high + place, rounded)
        tl.store(to_low + place, remainder(chain, rounded))
