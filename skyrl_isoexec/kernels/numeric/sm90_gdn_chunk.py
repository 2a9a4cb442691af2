"""A chunk of a gated delta rule on Hopper: the inverse of its triangular system, and the pass of states over chunks.

With S0 the snapshot of the state at the chunk's start, G the sums of g from there, and for a row t

    L_ts = beta_t (exp(G_t - G_s) (k_t . k_s)), s < t        T = (I + L)^-1
    e_t = round(beta_t (v_t - exp(G_t) (k_t S0)))            what the value of row t misses in the snapshot
    Z = round(T^T round(exp(G_last - G) k))                  what each e adds to the state at the chunk's end
    S' = exp(G_last) S + Z^T e                               fp32, its last bit cleared; snapshot = round(S')

Notable: v_new = T e is never formed: outputs use (P T) e and the state uses Z e, so a row needs of earlier rows only k,
G, e and T. T is made in blocks of 16 rows: D, the inverse of a diagonal block, row by row, 1 minus a balanced tree; to
its left -round(D) round(X), X = sum over earlier blocks m, ascending, of round(L_im) round(T_m). All blocks are
products of whole tiles, repeated until the last one has its value; what a product meets beside a block is an exact
zero, so that one row alone (a decode step) has the same bits. The state's last bit is cleared so that it is its
snapshot and 16 bits.

Shapes: N slots, C rows of a chunk, K key heads, V value heads, Dk and Dv their widths.
"""

import triton
import triton.language as tl

from skyrl_isoexec.kernels.numeric.sm90 import dot, narrow, tree, widen

BLOCK = tl.constexpr(16)
"""Rows of a diagonal block, inverted by substitution."""


@triton.jit
def powers(total, C: tl.constexpr):
    """[C, C] exp(G_t - G_s) where s <= t, 0 elsewhere."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.where(row >= column, tl.exp2(total[:, None] - total[None, :]), 0.0)


@triton.jit
def substitute(left, D, NUM: tl.constexpr):
    """[NUM] sums over rows s of L_s D_s, D with its rows as columns [..., 16, 16], by the balanced tree."""
    return tree(tl.reshape(left * D, (NUM, BLOCK)), NUM, BLOCK)


@triton.jit
def invert(keys, total, beta, C: tl.constexpr):
    """bf16 transposed T and X [C, C], and fp32 D [C / 16, 16, 16], its rows as columns, of keys [C, Dk], G, beta [C].

    All of it is transposed: row c and column t hold element (t, c), so that nothing changes its place in registers.
    """
    NB: tl.constexpr = C // BLOCK
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    none = tl.zeros((C, C), tl.float32)
    scores = dot(keys, tl.trans(keys), none)  # symmetric to the bit
    own = tl.arange(0, NB)[:, None, None, None] == tl.arange(0, NB)[None, None, :, None]
    lower = tl.where(row > column, beta[:, None] * (powers(total, C) * scores), 0.0)
    diagonal = tl.sum(tl.where(own, tl.reshape(lower, (NB, BLOCK, NB, BLOCK)), 0.0), axis=2)
    i, j = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    D = tl.where(j == 0, (i == 0).to(tl.float32), diagonal)  # columns yet to come meet zeros
    for step in tl.static_range(1, BLOCK):
        left = tl.sum(tl.where(i == step, diagonal, 0.0), axis=1)  # one element that is not zero: exact
        made = substitute(left[:, None, :], D, NB * BLOCK)
        D = tl.where(j == step, (i == step).to(tl.float32) - tl.reshape(made, (NB, BLOCK))[:, :, None], D)
    whole = tl.reshape(tl.where(own, D[:, :, None, :], 0.0), (C, C))
    above = column // BLOCK > row // BLOCK
    powers_back = tl.exp2(tl.where(above, total[None, :] - total[:, None], 0.0))
    outer = narrow(tl.where(above, beta[None, :] * (powers_back * scores), 0.0), tl.bfloat16)
    inner, T, X = narrow(whole, tl.bfloat16), narrow(whole, tl.bfloat16), narrow(none, tl.bfloat16)
    for _ in tl.static_range(NB - 1):
        X = narrow(dot(T, outer, none), tl.bfloat16)
        T = narrow(tl.where(above, -dot(X, inner, none), whole), tl.bfloat16)
    return T, X, D


@triton.jit
def reach(T, keys, total, last):
    """bf16 Z [C, Dk] of the transposed T [C, C], keys [C, Dk], G [C] and its last value."""
    decayed = narrow(tl.exp2(last - total)[:, None] * widen(keys), tl.bfloat16)
    return narrow(dot(T, decayed, tl.zeros(keys.shape, tl.float32)), tl.bfloat16)


@triton.jit
def missing(value, beta, total, kept):
    """bf16 e of v, beta, G and k S0, of one shape or broadcast to it."""
    return narrow(beta * (widen(value) - tl.exp2(total) * kept), tl.bfloat16)


@triton.jit
def advance(state, Z, errors, last):
    """S' [Dk, Dv] from the chunk's start to its end."""
    state = dot(tl.trans(Z), errors, state * tl.exp2(last))
    return (state.to(tl.int32, bitcast=True) & -2).to(tl.float32, bitcast=True)


@triton.jit
def remainder(state, snapshot):
    """Sixteen bits, kept as bf16, that give the state back together with its snapshot."""
    high = snapshot.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return ((state.to(tl.int32, bitcast=True) - high) >> 1).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def restore(snapshot, rest):
    """fp32 state of its snapshot and remainder."""
    high = snapshot.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return (high + (rest.to(tl.int16, bitcast=True).to(tl.int32) << 1)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_requests"])
def prepare(
    k, decay, beta, owner, inverse, ends, num_requests,
    C: tl.constexpr, DK: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr,
):  # fmt: skip
    """T and Z of a slot and a value head."""
    head, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(owner + slot) < num_requests:
        row, column = tl.arange(0, C), tl.arange(0, DK)
        keys = tl.load(k + (slot * HK + head // (HV // HK)) * C * DK + row[:, None] * DK + column[None, :])
        at = slot * HV + head
        total = tl.load(decay + at * C + row)
        T, _, _ = invert(keys, total, tl.load(beta + at * C + row), C)
        tl.store(inverse + at * C * C + row[None, :] * C + row[:, None], T)
        Z = reach(T, keys, total, tl.load(decay + at * C + C - 1))
        tl.store(ends + at * C * DK + row[:, None] * DK + column[None, :], Z)


@triton.jit
def within_of(head, deep, columns, DK: tl.constexpr, DV: tl.constexpr):
    """Where [deep, columns] of a head's state lie in a page."""
    return head * DK * DV + deep[:, None] * DV + columns[None, :]


@triton.jit
def copy(from_high, from_low, to_high, to_low, head, columns, DK: tl.constexpr, DV: tl.constexpr):
    """Columns of a head's state from page to page."""
    for start in range(0, DK, BLOCK):
        place = within_of(head, start + tl.arange(0, BLOCK), columns, DK, DV)
        tl.store(to_high + place, tl.load(from_high + place))
        tl.store(to_low + place, tl.load(from_low + place))


@triton.jit
def _save(state, snapshot, rest, at):
    rounded = narrow(state, tl.bfloat16)
    tl.store(snapshot + at, rounded)
    tl.store(rest + at, remainder(state, rounded))


@triton.jit
def _errors(
    k, v, decay, beta, errors, snapshots, state, slot, head, columns, kept, old,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr,
    RESUME: tl.constexpr,
):  # fmt: skip
    """e of a slot [C, columns], stored with the snapshot it starts from; if RESUME, `kept` has the first `old` rows."""
    row, deep = tl.arange(0, C), tl.arange(0, DK)
    at = slot * HV + head
    keys = tl.load(k + (slot * HK + head // (HV // HK)) * C * DK + row[:, None] * DK + deep[None, :])
    where = at * C * DV + row[:, None] * DV + columns[None, :]
    value = tl.load(v + where)
    total, steps = tl.load(decay + at * C + row), tl.load(beta + at * C + row)
    rounded = narrow(state, tl.bfloat16)
    tl.store(snapshots + at * DK * DV + deep[:, None] * DV + columns[None, :], rounded)
    product = dot(keys, rounded, tl.zeros((C, columns.shape[0]), tl.float32))
    e = missing(value, steps[:, None], total[:, None], product)
    if RESUME:
        is_old = (row < old)[:, None]
        before = tl.load(kept + row[:, None] * DV + columns[None, :], mask=is_old, other=0.0)
        e = tl.where(is_old, before, e)
    tl.store(errors + where, e)
    return e


@triton.jit(do_not_specialize=["table_stride"])
def walk(
    k, v, decay, beta, ends, base, query_start, seq_lens, table, kept, snapshot, rest, errors, snapshots,
    table_stride, kept_stride, snapshot_stride, rest_stride,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, BV: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, RESUME: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BV columns of a request's state over its slots, one value head: e and snapshot of each, and states of pages."""
    head, request = tl.program_id(0) // (DV // BV), tl.program_id(1)
    columns = tl.program_id(0) % (DV // BV) * BV + tl.arange(0, BV)
    slot = tl.load(base + request).to(tl.int64)
    if tl.load(base + request + 1) > slot:
        context = tl.load(seq_lens + request)
        begin = context - (tl.load(query_start + request + 1) - tl.load(query_start + request))
        start = begin // C
        closed = context // C - start
        deep, row = tl.arange(0, DK), tl.arange(0, C)
        within = head * DK * DV + deep[:, None] * DV + columns[None, :]
        old = begin - start * C
        if PAGED:
            pages = table + request * table_stride
            source = tl.load(pages + tl.maximum(begin - 1, 0) // PAGE).to(tl.int64)
            later = (start > 0) & (columns >= 0)[None, :]
            high = tl.load(snapshot + source * snapshot_stride + within, mask=later, other=0.0)
            state = restore(high, tl.load(rest + source * rest_stride + within, mask=later, other=0.0))
            if RESUME:
                kept += source * kept_stride + head * C * DV
        else:
            state = tl.zeros((DK, BV), tl.float32)
        for i in tl.range(closed, num_stages=STAGES):
            at = slot + i
            e = _errors(
                k, v, decay, beta, errors, snapshots, state, at, head, columns, kept, tl.where(i == 0, old, 0),
                C, DK, DV, HK, HV, RESUME,
            )  # fmt: skip
            Z = tl.load(ends + (at * HV + head) * C * DK + row[:, None] * DK + deep[None, :])
            state = advance(state, Z, e, tl.load(decay + (at * HV + head) * C + C - 1))
            if PAGED:
                end = (start + i + 1) * C
                if end % PAGE == 0:
                    page = tl.load(pages + end // PAGE - 1).to(tl.int64)
                    _save(state, snapshot + page * snapshot_stride, rest + page * rest_stride, within)
        end = (start + closed) * C
        if end < context:
            _errors(
                k, v, decay, beta, errors, snapshots, state, slot + closed, head, columns, kept,
                tl.where(closed == 0, old, 0), C, DK, DV, HK, HV, RESUME,
            )  # fmt: skip
        if PAGED:
            target = tl.load(pages + (context - 1) // PAGE).to(tl.int64)
            moved = (end < context) & (end > 0) & ((closed > 0) | (target != source))
            if moved | ((end == context) & (end % PAGE != 0)):
                _save(state, snapshot + target * snapshot_stride, rest + target * rest_stride, within)
