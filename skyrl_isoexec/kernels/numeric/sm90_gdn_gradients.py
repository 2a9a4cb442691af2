"""Gradients of the chunks of a gated delta rule on Hopper: two kernels over chunks and, between them, one pass back.

With the names of `sm90_gdn_chunk`, E = exp(G), P_ts = exp(G_t - G_s) (q_t . k_s), d = T e (v_new), f = scale do and
dS' the gradient of the state at a chunk's end, per chunk:

    dd = P^T f + exp(G_last - G) (k dS')       de = T^T dd        W = T (beta E k)
    dS = exp(G_last) dS' + U - W^T (exp(G_last - G) (k dS')),     U = (E q)^T f - W^T P^T f
    A = exp(G_t - G_s) (f d^T), s <= t         B = -beta_t exp(G_t - G_s) (de d^T), s < t
    dq = E f S0^T + A k
    dk = [B k - beta E de S0^T] + [exp(G_last - G) d dS'^T + A^T q + B^T k] = [up] + [down]
    dG = q dq + k up - k down, and in the last row also the sum of k (exp(G_last - G) d dS'^T) and exp(G_last) S0 dS'
    dv = beta de, db = (1 - beta) (de e + k (B k)), dg = sums of dG from a row to the chunk's end

Notable: no bit contract with the engine, but the same bits in every run: no atomics, every sum is of one program. What
is stored in between is bf16, sums and the pass are fp32. Only U, W and k enter the pass, as v, Z and k do forwards.

Shapes: N slots, C rows of a chunk, K key heads, V value heads, Dk and Dv their widths.
"""

import triton
import triton.language as tl

from skyrl_isoexec.kernels.numeric.sm90 import dot, narrow, widen
from skyrl_isoexec.kernels.numeric.sm90_gdn_chunk import powers
from skyrl_isoexec.kernels.numeric.sm90_gdn_rows import place


@triton.jit
def _grad_of(
    grad, slot, base, owner, query_start, seq_lens, head, columns, C: tl.constexpr, DV: tl.constexpr, HV: tl.constexpr
):
    """The rows of a slot in grad [T, V, Dv]; zeros where it has none."""
    _, first, begin, context, start = place(slot, base, owner, query_start, seq_lens, C)
    position = start + tl.arange(0, C)
    there = (position >= begin) & (position < context)
    at = (first + position - begin).to(tl.int64) * HV + head
    return tl.load(grad + at[:, None] * DV + columns[None, :], mask=there[:, None], other=0.0)


@triton.jit(do_not_specialize=["num_requests"])
def turn(
    q, k, decay, beta, inverse, grad, base, owner, query_start, seq_lens, local, reads, turns, scale, num_requests,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """P^T f [C, BV], W [C, Dk] and U [Dk, BV] of a slot and a value head."""
    part, head, slot = tl.program_id(0) % (DV // BV), tl.program_id(0) // (DV // BV), tl.program_id(1).to(tl.int64)
    columns = part * BV + tl.arange(0, BV)
    if tl.load(owner + slot) < num_requests:
        row, deep = tl.arange(0, C), tl.arange(0, DK)
        at = slot * HV + head
        own = row[:, None] * DK + deep[None, :]
        where = (slot * HK + head // (HV // HK)) * C * DK + own
        queries, keys = tl.load(q + where), tl.load(k + where)
        total, steps = tl.load(decay + at * C + row), tl.load(beta + at * C + row)
        T = tl.load(inverse + at * C * C + row[:, None] * C + row[None, :])
        do = _grad_of(grad, slot, base, owner, query_start, seq_lens, head, columns, C, DV, HV)
        scores = dot(queries, tl.trans(keys), tl.zeros((C, C), tl.float32))
        weights = narrow(powers(total, C) * scores, tl.bfloat16)
        inner = narrow(scale * dot(tl.trans(weights), do, tl.zeros((C, BV), tl.float32)), tl.bfloat16)
        tl.store(local + at * C * DV + row[:, None] * DV + columns[None, :], inner)
        grown = narrow((steps * tl.exp2(total))[:, None] * widen(keys), tl.bfloat16)
        W = narrow(dot(T, grown, tl.zeros((C, DK), tl.float32)), tl.bfloat16)
        if part == 0:
            tl.store(reads + at * C * DK + own, W)
        f = narrow((-scale * tl.exp2(total))[:, None] * widen(do), tl.bfloat16)
        U = dot(tl.trans(W), inner, dot(tl.trans(queries), f, tl.zeros((DK, BV), tl.float32)))
        tl.store(turns + at * DK * DV + deep[:, None] * DV + columns[None, :], narrow(-U, tl.bfloat16))


@triton.jit
def walk_back(
    k, decay, reads, turns, base, ends,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dS' of every slot of a request, BV columns of one value head, from its last slot to its first."""
    head, request = tl.program_id(0) // (DV // BV), tl.program_id(1)
    columns = tl.program_id(0) % (DV // BV) * BV + tl.arange(0, BV)
    first, last = tl.load(base + request).to(tl.int64), tl.load(base + request + 1)
    row, deep = tl.arange(0, C), tl.arange(0, DK)
    within = deep[:, None] * DV + columns[None, :]
    state = tl.zeros((DK, BV), tl.float32)
    for i in tl.range(last - first.to(tl.int32), num_stages=STAGES):
        slot = last - 1 - i + first * 0
        at = slot * HV + head
        own = row[:, None] * DK + deep[None, :]
        keys = tl.load(k + (slot * HK + head // (HV // HK)) * C * DK + own)
        W = tl.load(reads + at * C * DK + own)
        U = tl.load(turns + at * DK * DV + within)
        total, end = tl.load(decay + at * C + row), tl.load(decay + at * C + C - 1)
        rounded = narrow(state, tl.bfloat16)
        tl.store(ends + at * DK * DV + within, rounded)
        product = dot(keys, rounded, tl.zeros((C, BV), tl.float32))
        passed = narrow(-tl.exp2(end - total)[:, None] * product, tl.bfloat16)
        state = dot(tl.trans(W), passed, state * tl.exp2(end) + widen(U))


@triton.jit(do_not_specialize=["num_requests"])
def gradients(
    q, k, decay, beta, inverse, errors, snapshots, local, ends, grad, base, owner, query_start, seq_lens,
    dq, dk, dv, dg, db, scale, num_requests,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv, dg and db of a slot and a value head, Dv in blocks of BV."""
    head, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(owner + slot) < num_requests:
        row, deep = tl.arange(0, C), tl.arange(0, DK)
        at = slot * HV + head
        own = row[:, None] * DK + deep[None, :]
        where = (slot * HK + head // (HV // HK)) * C * DK + own
        keys = tl.load(k + where)
        T = tl.load(inverse + at * C * C + row[:, None] * C + row[None, :])
        total, steps = tl.load(decay + at * C + row), tl.load(beta + at * C + row)
        end = tl.load(decay + at * C + C - 1)
        grown, shrunk = tl.exp2(total), tl.exp2(end - total)
        A, B = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
        made_q = tl.zeros((C, DK), tl.float32)
        up, down = tl.zeros((C, DK), tl.float32), tl.zeros((C, DK), tl.float32)
        step_grad, states = tl.zeros((C,), tl.float32), tl.zeros((DK,), tl.float32)
        for start in tl.range(0, DV, BV, num_stages=STAGES):
            columns = start + tl.arange(0, BV)
            wide = at * C * DV + row[:, None] * DV + columns[None, :]
            within = at * DK * DV + deep[:, None] * DV + columns[None, :]
            do = _grad_of(grad, slot, base, owner, query_start, seq_lens, head, columns, C, DV, HV)
            e, S0, dS = tl.load(errors + wide), tl.load(snapshots + within), tl.load(ends + within)
            d = dot(T, e, tl.zeros((C, BV), tl.float32))
            dd = dot(keys, dS, tl.zeros((C, BV), tl.float32))
            dd = narrow(widen(tl.load(local + wide)) + shrunk[:, None] * dd, tl.bfloat16)
            de = dot(tl.trans(T), dd, tl.zeros((C, BV), tl.float32))
            tl.store(dv + wide, narrow(steps[:, None] * de, tl.bfloat16))
            step_grad += tl.sum(de * widen(e), axis=1)
            states += tl.sum(widen(S0) * widen(dS), axis=1)
            made_q = dot(narrow((scale * grown)[:, None] * widen(do), tl.bfloat16), tl.trans(S0), made_q)
            up = dot(narrow((-steps * grown)[:, None] * de, tl.bfloat16), tl.trans(S0), up)
            down = dot(narrow(shrunk[:, None] * d, tl.bfloat16), tl.trans(dS), down)
            d = tl.trans(narrow(d, tl.bfloat16))
            A = dot(do, d, A)
            B = dot(narrow(de, tl.bfloat16), d, B)
        ahead = tl.sum(widen(keys) * down, axis=1)
        queries = tl.load(q + where)
        A = narrow(scale * powers(total, C) * A, tl.bfloat16)
        strict = row[:, None] > row[None, :]
        B = narrow(tl.where(strict, -steps[:, None] * (powers(total, C) * B), 0.0), tl.bfloat16)
        made_q = dot(A, keys, made_q)
        rows_grad = tl.sum(widen(queries) * made_q, axis=1)
        tl.store(dq + at * C * DK + own, narrow(made_q, tl.bfloat16))
        inner = dot(B, keys, tl.zeros((C, DK), tl.float32))
        step_grad += tl.sum(widen(keys) * inner, axis=1)
        tl.store(db + at * C + row, (1.0 - steps) * step_grad)
        up += inner
        down = dot(tl.trans(B), keys, dot(tl.trans(A), queries, down))
        tl.store(dk + at * C * DK + own, narrow(up + down, tl.bfloat16))
        rows_grad += tl.sum(widen(keys) * (up - down), axis=1)
        rows_grad += tl.where(row == C - 1, tl.sum(ahead, axis=0) + tl.exp2(end) * tl.sum(states, axis=0), 0.0)
        later = tl.where(row[:, None] >= row[None, :], rows_grad[:, None], 0.0)
        tl.store(dg + at * C + row, tl.sum(later, axis=0))
