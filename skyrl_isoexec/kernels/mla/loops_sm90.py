"""The Triton kernels of latent attention: one arithmetic for prefill, cut prefill and decode, and the store into pages.

Notable: all heads share their keys, so a tile's rows are rows of q [T * N, Q] as they lie, whatever token and head they
belong to: row r of a request has token r // N. Operands are swapped: scores lie as [positions, rows], accumulators as
[latent, rows], so the long sides meet the 64 rows of a warp group's product, and a tile may have as few rows as a token
has heads. A block of keys is read once and serves as keys and as values. `_walk` computes one partition for a tile of
rows, `_merge` adds it to what came before. `attend` loops over partitions; the running result waits in global memory,
because two accumulators of 512 x 64 do not fit into registers. `attend_split` gives partitions their own programs and
`merge` merges what they wrote: the same functions in the same order. What must stay equal: the latent's products before
the rotated part's in one accumulator; blocks of BKV positions and partitions of PART, both counted from the sequence's
start; the row sum as a product with ones on the tensor core; explicit fma.

Keys are rows of [L + R] from `c`; a page of PAGE positions is PAGE neighbouring rows, and at PAGE 0 a sequence's rows
are neighbours. LW and RW are L and R rounded up to what a tile can have. Shapes: T tokens, N query heads, L latent
rank, R width of the rotated part, Q = L + R.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from skyrl_isoexec.kernels.numeric.sm90 import INTERPRETED, dot, narrow

NEG_INF = tl.constexpr(float("-inf"))
AHEAD = tl.constexpr(8)
"""Partitions that a program which merges them loads at a time."""


@triton.jit
def load_parts(x, row, there, L: tl.constexpr, R: tl.constexpr, LW: tl.constexpr, RW: tl.constexpr,
               MASK: tl.constexpr):  # fmt: skip
    """The latent and the rotated part of rows of x [., L + R]; zeros where MASK and not `there`."""
    left, right = tl.arange(0, LW)[None, :], tl.arange(0, RW)[None, :]
    at = x + row[:, None] * (L + R)
    if MASK:
        a = tl.load(at + left, mask=there[:, None] & (left < L), other=0.0)
        b = tl.load(at + L + right, mask=there[:, None] & (right < R), other=0.0)
    elif L == LW and R == RW:
        a, b = tl.load(at + left), tl.load(at + L + right)
    else:
        a = tl.load(at + left, mask=left < L, other=0.0)
        b = tl.load(at + L + right, mask=right < R, other=0.0)
    return a, b


@triton.jit
def scores(x, x_rotated, y, y_rotated):
    """fp32 sums [rows of x, rows of y] over a key's entries, ascending, not yet scaled."""
    s = dot(x, tl.trans(y), tl.zeros((x.shape[0], y.shape[0]), tl.float32))
    return dot(x_rotated, tl.trans(y_rotated), s)


@triton.jit
def _shift(m):
    """What is subtracted in exponents: the maximum, or 0 where there is none yet."""
    return tl.where(m == NEG_INF, 0.0, m)


@triton.jit
def _block(
    q, q_rotated, c, table, start, end, position, m, d, acc, scale,
    L: tl.constexpr, R: tl.constexpr, LW: tl.constexpr, RW: tl.constexpr, BKV: tl.constexpr, PAGE: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Online softmax over BKV positions from `start`; MASK where a row may not see all of them."""
    at = start + tl.arange(0, BKV)
    if PAGE:
        row = tl.load(table + start // PAGE).to(tl.int64) * PAGE + at % PAGE
    else:
        row = at.to(tl.int64)
    k, k_rotated = load_parts(c, row, at < end, L, R, LW, RW, MASK)
    s = scores(k, k_rotated, q, q_rotated)
    if MASK:
        s = tl.where(at[:, None] <= position[None, :], s, NEG_INF)
    new = tl.maximum(m, tl.max(s, 0) * scale)  # a maximum is exact in any order
    shift = _shift(new)
    zero = tl.zeros(s.shape, tl.float32)
    p = narrow(tl.exp2(tl.math.fma(s, zero + scale, zero - shift[None, :])), tl.bfloat16)
    alpha = tl.exp2(m - shift)
    ones = narrow(tl.full((64, BKV), 1.0, tl.float32), tl.bfloat16)
    row_sum = tl.max(dot(ones, p, tl.zeros((64, q.shape[0]), tl.float32)), 0)  # equal rows
    d = tl.math.fma(d, alpha, row_sum)
    acc = dot(tl.trans(k), p, acc * alpha[None, :])
    return new, d, acc


@triton.jit
def _walk(
    q, q_rotated, c, table, first, last, full, end, position, scale,
    L: tl.constexpr, R: tl.constexpr, LW: tl.constexpr, RW: tl.constexpr, BKV: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One partition [first, last): its maximum, sum and accumulator. Every row sees all positions before `full`."""
    rows: tl.constexpr = q.shape[0]
    m = tl.full((rows,), NEG_INF, tl.float32)
    d = tl.zeros((rows,), tl.float32)
    acc = tl.zeros((LW, rows), tl.float32)
    whole = tl.maximum(first, tl.minimum(last, full))
    for start in range(first, whole, BKV):
        m, d, acc = _block(
            q, q_rotated, c, table, start, end, position, m, d, acc, scale, L, R, LW, RW, BKV, PAGE, False
        )
    for start in range(whole, last, BKV):
        m, d, acc = _block(
            q, q_rotated, c, table, start, end, position, m, d, acc, scale, L, R, LW, RW, BKV, PAGE, True
        )
    return m, d, acc


@triton.jit
def _merge(M, D, A, m, d, acc, reached):
    """The running result with one more partition, where a row reached it."""
    new = tl.maximum(M, m)
    shift = _shift(new)
    x, y = tl.exp2(M - shift), tl.exp2(m - shift)
    D = tl.where(reached, tl.math.fma(D, x, d * y), D)
    fused = tl.math.fma(A, tl.broadcast_to(x[None, :], A.shape), acc * y[None, :])
    A = tl.where(reached[None, :], fused, A)
    return tl.where(reached, new, M), D, A


@triton.jit
def _finish(M, D, A, out, lse, at, there, column, L: tl.constexpr, LSE: tl.constexpr):
    """out = A / D rounded once; lse = logarithm to base 2 of the softmax denominator."""
    y = tl.div_rn(A, tl.broadcast_to(D[None, :], A.shape))
    y = narrow(tl.where(y != y, float("nan"), y), out.dtype.element_ty)
    tl.store(out + at[None, :] * L + column, y, mask=there[None, :] & (column < L))
    if LSE:
        tl.store(lse + at, M + tl.log2(D), mask=there)


@triton.jit
def request_of(query_start, tile, num_requests, N: tl.constexpr, BM: tl.constexpr):
    """The request that owns a tile of BM rows, N for a token: request r begins at tile query_start[r] * N // BM + r."""
    low, high = tile * 0, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) * N // BM + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _tile(q, query_first, length, first_row, context, N: tl.constexpr, BM: tl.constexpr, L: tl.constexpr,
          R: tl.constexpr, LW: tl.constexpr, RW: tl.constexpr):  # fmt: skip
    """BM rows of a request from `first_row`: (both parts of q, rows of q, which exist, positions, end, full).

    No row sees a position from `end` on, every row sees those before `full`, which is not yet whole blocks.
    """
    row = first_row + tl.arange(0, BM)
    there, at = row < length * N, query_first.to(tl.int64) * N + row
    left, right = load_parts(q, at, there, L, R, LW, RW, True)
    before = context - length
    position = tl.where(there, before + row // N, -1)
    end = tl.minimum(context, before + (first_row + BM - 1) // N + 1)
    return left, right, at, there, position, end, before + first_row // N + 1


@triton.jit(do_not_specialize=["num_requests", "num_tiles", "table_stride", "shortest"])
def attend(
    q, c, table, query_start, seq_lens, out, lse, scratch, num_requests, num_tiles, table_stride, shortest, scale,
    N: tl.constexpr, L: tl.constexpr, R: tl.constexpr, LW: tl.constexpr, RW: tl.constexpr, BM: tl.constexpr,
    BKV: tl.constexpr, PART: tl.constexpr, PAGE: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Every num_programs(0)-th tile of rows of a request with more than `shortest` rows, over all of its partitions."""
    waiting = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[None, :]
    waiting = scratch + waiting * LW + tl.arange(0, LW)[:, None]
    for item in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile = num_tiles - 1 - item  # late tiles are long: they begin first
        request = request_of(query_start, tile, num_requests, N, BM)
        query_first = tl.load(query_start + request)
        length = tl.load(query_start + request + 1) - query_first
        first_row = (tile - query_first * N // BM - request) * BM
        if (first_row < length * N) & (length * N > shortest):
            if PAGE:
                context, keys = tl.load(seq_lens + request), c
            else:
                context, keys = length, c + query_first.to(tl.int64) * (L + R)
            x, x_rotated, at, there, position, end, full = _tile(
                q, query_first, length, first_row, context, N, BM, L, R, LW, RW
            )
            M = tl.full((BM,), NEG_INF, tl.float32)
            D = tl.zeros((BM,), tl.float32)
            result = tl.zeros((LW, BM), tl.float32)
            for first in range(0, end, PART):
                m, d, acc = _walk(
                    x, x_rotated, keys, table + request * table_stride, first, tl.minimum(first + PART, end),
                    full // BKV * BKV, end, position, scale, L, R, LW, RW, BKV, PAGE,
                )  # fmt: skip
                if first > 0:
                    A = tl.load(waiting)
                    tl.debug_barrier()
                    M, D, acc = _merge(M, D, A, m, d, acc, first <= position)
                else:
                    M, D = m, d
                if first + PART < end:
                    tl.store(waiting, acc)
                    tl.debug_barrier()
                result = acc
            _finish(M, D, result, out, lse, at, there, tl.arange(0, LW)[:, None], L, LSE)


@triton.jit(do_not_specialize=["num_parts", "longest", "table_stride"])
def attend_split(
    q, c, table, query_start, seq_lens, maxima, sums, accs, num_parts, longest, table_stride, scale,
    N: tl.constexpr, L: tl.constexpr, R: tl.constexpr, LW: tl.constexpr, RW: tl.constexpr, BM: tl.constexpr,
    BKV: tl.constexpr, PART: tl.constexpr, PAGE: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Every num_programs(1)-th partition of a request of at most `longest` rows, written to maxima, sums and accs.

    A row's parts lie by its place among all rows of q, or, unless BY_TOKEN, among at most BM rows of its request.
    """
    request = tl.program_id(0)
    query_first = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - query_first
    length = tl.where(length * N <= longest, length, 0)
    context, column = tl.load(seq_lens + request), tl.arange(0, LW)[:, None]
    for first_row in range(0, length * N, BM):
        x, x_rotated, at, there, position, end, full = _tile(
            q, query_first, length, first_row, context, N, BM, L, R, LW, RW
        )
        slot = at if BY_TOKEN else request.to(tl.int64) * BM + first_row + tl.arange(0, BM)
        for part in range(tl.program_id(1), tl.cdiv(end, PART), tl.num_programs(1)):
            first = part * PART
            m, d, acc = _walk(
                x, x_rotated, c, table + request * table_stride, first, tl.minimum(first + PART, end),
                full // BKV * BKV, end, position, scale, L, R, LW, RW, BKV, PAGE,
            )  # fmt: skip
            to = slot * num_parts + part
            tl.store(maxima + to, m, mask=there)
            tl.store(sums + to, d, mask=there)
            tl.store(accs + to[None, :] * LW + column, acc, mask=there[None, :])


@triton.jit
def _parts(maxima, sums, accs, base, part, count, column, LW: tl.constexpr):
    """Maxima, sums and accumulators of AHEAD partitions, loaded together; zeros from `count` on."""
    m, d, acc = (), (), ()
    for i in tl.static_range(AHEAD):
        at, there = base + part + i, base * 0 + part + i < count
        m += (tl.load(maxima + at, mask=there, other=0.0),)
        d += (tl.load(sums + at, mask=there, other=0.0),)
        acc += (tl.load(accs + at[None, :] * LW + column, mask=there[None, :], other=0.0),)
    return m, d, acc


@triton.jit(do_not_specialize=["num_parts", "longest"])
def merge(
    maxima, sums, accs, query_start, seq_lens, out, num_parts, longest,
    N: tl.constexpr, L: tl.constexpr, LW: tl.constexpr, LC: tl.constexpr, BM: tl.constexpr, PART: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """LC columns of one head of a request of at most `longest` rows: its partitions in ascending order.

    It may begin before the kernel that writes them has ended.
    """
    request, head = tl.program_id(0), tl.program_id(1)
    query_first = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - query_first
    length = tl.where(length * N <= longest, length, 0)
    context = tl.load(seq_lens + request)
    one, column = tl.arange(0, 1), tl.program_id(2) * LC + tl.arange(0, LC)[:, None]
    if not INTERPRETED:
        gdc_wait()
    for token in range(0, length):
        row = (token * N + head + one).to(tl.int64)
        base = (query_first.to(tl.int64) * N + row if BY_TOKEN else request.to(tl.int64) * BM + row) * num_parts
        count = (context - length + token) // PART + 1
        M, D, A = tl.load(maxima + base), tl.load(sums + base), tl.load(accs + base[None, :] * LW + column)
        for part in range(1, count, AHEAD):
            m, d, acc = _parts(maxima, sums, accs, base, part, count, column, LW)
            for i in tl.static_range(AHEAD):
                M, D, A = _merge(M, D, A, m[i], d[i], acc[i], (part + i < count) & (one == 0))
        _finish(M, D, A, out, out, query_first.to(tl.int64) * N + row, one == 0, column, L, False)


@triton.jit
def store(c, cache, slots, num_slots, Q: tl.constexpr, WIDTH: tl.constexpr):
    """Copy one token's row of c into its slot; slots outside the cache are skipped."""
    token = tl.program_id(0).to(tl.int64)
    slot, column = tl.load(slots + token), tl.arange(0, WIDTH)
    if (slot >= 0) & (slot < num_slots):
        tl.store(cache + slot * Q + column, tl.load(c + token * Q + column, mask=column < Q), mask=column < Q)
