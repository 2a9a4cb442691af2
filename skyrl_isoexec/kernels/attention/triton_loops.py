"""The Triton kernels of attention: one arithmetic for prefill, cut prefill and decode, and the store into pages.

Notable: `_walk` computes one partition for a tile of query rows, `_merge` adds it to what came before. `attend` loops
over partitions and merges in registers; `attend_split` gives partitions their own programs and `merge` merges what they
wrote: the same functions in the same order. What must stay equal: blocks of BKV positions and partitions of PART, both
counted from the sequence's start; row sums of the weights before they are rounded, in the lanes of `lane_sums`, each
multiplied by its row's factor as the accumulator is, and `folded` at a partition's end; explicit fma. `warp_groups.py`
has the same arithmetic.

A tile's rows are BQ tokens x GROUP query heads of one key-value head: row = token * GROUP + head. Keys and values are
read as rows of [positions, D] from `base + position * stride`, where a page of PAGE positions has its own base, or, at
PAGE 0, the sequence has one. Shapes: T tokens, N query heads, K key-value heads, D head dimension, R requests.
"""

import triton
import triton.language as tl

from skyrl_isoexec.kernels.numeric.sm90 import dot, narrow

NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def _shift(m):
    """What is subtracted in exponents: the maximum, or 0 where there is none yet."""
    return tl.where(m == NEG_INF, 0.0, m)


@triton.jit
def lane_sums(x, ROWS: tl.constexpr, BKV: tl.constexpr):
    """fp32 sums of a block in lanes [ROWS, G, 4], G = min(4, BKV / 8): position 8 g + 2 i + j goes to lane (g % G, i).

    Groups of eight are added in halves until G are left, then the two neighbours of a pair: so a thread of the tensor
    core adds what it holds, whatever the number of warps. Each step is a sum over a dimension of length two, which has
    one order in every layout.
    """
    x = tl.reshape(x, (ROWS, BKV // 8, 4, 2))
    for step in tl.static_range(1, 8):
        if (BKV // 8) >> step >= 4:
            x = tl.sum(tl.reshape(x, (ROWS, 2, (BKV // 8) >> step, 4, 2)), axis=1)
    return tl.sum(x, axis=3)


@triton.jit
def folded(x, ROWS: tl.constexpr, G: tl.constexpr):
    """The sums of rows from those of their lanes: halves of the groups until one is left, then neighbours."""
    for step in tl.static_range(1, 3):
        if G >> step >= 1:
            x = tl.sum(tl.reshape(x, (ROWS, 2, G >> step, 4)), axis=1)
    x = tl.sum(tl.reshape(x, (ROWS, 2, 2)), axis=2)
    return tl.sum(x, axis=1)


@triton.jit
def _block(
    q, keys, values, table, stride, page_stride, start, end, position, m, l, acc, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, BKV: tl.constexpr, PAGE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Online softmax over BKV positions from `start`; MASK where a row may not see all of them."""
    at, column = tl.arange(0, BKV), tl.arange(0, WIDTH)
    if PAGE:
        page = tl.load(table + start // PAGE).to(tl.int64)
        where = page * page_stride + (start % PAGE + at)[:, None] * stride + column[None, :]
    else:
        where = (start + at).to(tl.int64)[:, None] * stride + column[None, :]
    if MASK:
        there = (start + at < end)[:, None] & (column < D)[None, :]
        k = tl.load(keys + where, mask=there, other=0.0)
        v = tl.load(values + where, mask=there, other=0.0)
    elif D == WIDTH:
        k, v = tl.load(keys + where), tl.load(values + where)
    else:
        k = tl.load(keys + where, mask=(column < D)[None, :], other=0.0)
        v = tl.load(values + where, mask=(column < D)[None, :], other=0.0)
    s = dot(q, tl.trans(k), tl.zeros((q.shape[0], BKV), tl.float32))
    if MASK:
        s = tl.where((start + at)[None, :] <= position[:, None], s, NEG_INF)
    new = tl.maximum(m, tl.max(s, 1) * scale)  # a maximum is exact in any order
    shift = _shift(new)
    zero = tl.zeros(s.shape, tl.float32)
    p = tl.exp2(tl.math.fma(s, zero + scale, zero - shift[:, None]))
    alpha = tl.exp2(m - shift)
    l = tl.math.fma(l, tl.broadcast_to(alpha[:, None, None], l.shape), lane_sums(p, q.shape[0], BKV))
    acc = dot(narrow(p, tl.bfloat16), v, acc * alpha[:, None])
    return new, l, acc


@triton.jit
def _walk(
    q, keys, values, table, stride, page_stride, first, last, full, end, position, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, BKV: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One partition [first, last): its maximum, sum and accumulator. Every row sees all positions before `full`."""
    rows: tl.constexpr = q.shape[0]
    groups: tl.constexpr = 4 if BKV >= 32 else BKV // 8
    m = tl.full((rows,), NEG_INF, tl.float32)
    l = tl.zeros((rows, groups, 4), tl.float32)
    acc = tl.zeros((rows, WIDTH), tl.float32)
    whole = tl.maximum(first, tl.minimum(last, full))
    for start in range(first, whole, BKV):
        m, l, acc = _block(
            q, keys, values, table, stride, page_stride, start, end, position, m, l, acc, scale,
            D, WIDTH, BKV, PAGE, False,
        )  # fmt: skip
    for start in range(whole, last, BKV):
        m, l, acc = _block(
            q, keys, values, table, stride, page_stride, start, end, position, m, l, acc, scale,
            D, WIDTH, BKV, PAGE, True,
        )  # fmt: skip
    return m, folded(l, rows, groups), acc


@triton.jit
def _merge(M, L, A, m, l, acc, reached):
    """The running result with one more partition, where a row reached it."""
    new = tl.maximum(M, m)
    shift = _shift(new)
    x, y = tl.exp2(M - shift), tl.exp2(m - shift)
    L = tl.where(reached, tl.math.fma(L, x, l * y), L)
    fused = tl.math.fma(A, tl.broadcast_to(x[:, None], A.shape), acc * y[:, None])
    A = tl.where(reached[:, None], fused, A)
    return tl.where(reached, new, M), L, A


@triton.jit
def _finish(M, L, A, out, lse, at_out, at_lse, there, D: tl.constexpr, WIDTH: tl.constexpr, LSE: tl.constexpr):
    """out = A / L rounded once; lse = natural logarithm of the softmax denominator."""
    column = tl.arange(0, WIDTH)[None, :]
    y = tl.div_rn(A, tl.broadcast_to(L[:, None], A.shape))
    y = narrow(tl.where(y != y, float("nan"), y), out.dtype.element_ty)
    tl.store(out + at_out[:, None] + column, y, mask=there[:, None] & (column < D))
    if LSE:
        tl.store(lse + at_lse, (M + tl.log2(L)) * 0.6931471805599453, mask=there)


@triton.jit
def _request(query_start, tile, num_requests, BQ: tl.constexpr):
    """The request that owns a tile: request r begins at tile query_start[r] // BQ + r."""
    low, high = tile * 0, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BQ + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _rows(q, first_row, length, head, num_heads, context, D: tl.constexpr, WIDTH: tl.constexpr,
          GROUP: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr, query_first):  # fmt: skip
    """(q tile, offsets of its rows, which exist, their positions) of BQ tokens from `first_row` of a request."""
    row = tl.arange(0, BM)
    token = first_row + row // GROUP
    there = (row // GROUP < BQ) & (token < length)
    at = (query_first + token).to(tl.int64) * num_heads + head * GROUP + row % GROUP
    column = tl.arange(0, WIDTH)[None, :]
    tile = tl.load(q + at[:, None] * D + column, mask=there[:, None] & (column < D), other=0.0)
    return tile, at, there, tl.where(there, context - length + token, -1)


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "shortest", "table_stride"])
def attend(
    q, k, v, table, query_start, seq_lens, out, lse, num_requests, num_tokens, num_heads, stride, page_stride,
    head_stride, table_stride, scale, shortest,
    D: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr,
    BKV: tl.constexpr, PART: tl.constexpr, PAGE: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one request with more than `shortest` rows, over all of its partitions."""
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # late tiles are long: they begin first
    request = _request(query_start, tile, num_requests, BQ)
    query_first = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - query_first
    first_row = (tile - query_first // BQ - request) * BQ
    if (first_row < length) & (length > shortest):
        if PAGE:
            context = tl.load(seq_lens + request)
            keys, values = k + head * head_stride, v + head * head_stride
        else:
            context = length
            base = query_first.to(tl.int64) * stride + head * head_stride
            keys, values = k + base, v + base
        x, at, there, position = _rows(
            q, first_row, length, head, num_heads, context, D, WIDTH, GROUP, BQ, BM, query_first
        )
        end = tl.minimum(context, context - length + first_row + BQ)
        full = (context - length + first_row + 1) // BKV * BKV
        M = tl.full((BM,), NEG_INF, tl.float32)
        L = tl.zeros((BM,), tl.float32)
        A = tl.zeros((BM, WIDTH), tl.float32)
        for first in range(0, end, PART):
            m, l, acc = _walk(
                x, keys, values, table + request * table_stride, stride, page_stride, first,
                tl.minimum(first + PART, end), full, end, position, scale, D, WIDTH, BKV, PAGE,
            )  # fmt: skip
            M, L, A = _merge(M, L, A, m, l, acc, first <= position)
        at_lse = at % num_heads * num_tokens + at // num_heads
        _finish(M, L, A, out, lse, at * D, at_lse, there, D, WIDTH, LSE)


@triton.jit
def _slot(request, token, BQ: tl.constexpr, BY_TOKEN: tl.constexpr):
    """Where a row's parts lie: by its token, or at most BQ for a request."""
    return (token if BY_TOKEN else request * BQ).to(tl.int64)


@triton.jit(do_not_specialize=["num_parts", "longest", "table_stride"])
def attend_split(
    q, k, v, table, query_start, seq_lens, maxima, sums, accs, num_heads, num_parts, longest, stride, page_stride,
    head_stride, table_stride, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr,
    BKV: tl.constexpr, PART: tl.constexpr, PAGE: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Every num_programs(2)-th partition of a request with at most `longest` rows, written to maxima, sums and accs."""
    request, head = tl.program_id(0), tl.program_id(1)
    query_first = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - query_first
    length = tl.where(length <= longest, length, 0)
    context = tl.load(seq_lens + request)
    row, column = tl.arange(0, BM), tl.arange(0, WIDTH)[None, :]
    for first_row in range(0, length, BQ):
        x, _at, there, position = _rows(
            q, first_row, length, head, num_heads, context, D, WIDTH, GROUP, BQ, BM, query_first
        )
        end = tl.minimum(context, context - length + first_row + BQ)
        full = (context - length + first_row + 1) // BKV * BKV
        slot = _slot(request, query_first + first_row, BQ, BY_TOKEN) + row // GROUP
        for part in range(tl.program_id(2), tl.cdiv(end, PART), tl.num_programs(2)):
            first = part * PART
            m, l, acc = _walk(
                x, k + head * head_stride, v + head * head_stride, table + request * table_stride, stride, page_stride,
                first, tl.minimum(first + PART, end), full, end, position, scale, D, WIDTH, BKV, PAGE,
            )  # fmt: skip
            to = ((slot * tl.num_programs(1) + head) * num_parts + part) * GROUP + row % GROUP
            tl.store(maxima + to, m, mask=there)
            tl.store(sums + to, l, mask=there)
            tl.store(accs + to[:, None] * WIDTH + column, acc, mask=there[:, None])


@triton.jit(do_not_specialize=["num_parts", "longest"])
def merge(
    maxima, sums, accs, query_start, seq_lens, out, num_heads, num_parts, longest,
    D: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BQ: tl.constexpr, PART: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """The rows of one query head of a request with at most `longest` rows: their partitions in ascending order."""
    request, head, member = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query_first = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - query_first
    length = tl.where(length <= longest, length, 0)
    context = tl.load(seq_lens + request)
    one, column = tl.arange(0, 1), tl.arange(0, WIDTH)[None, :]
    for token in range(0, length):
        M = tl.full((1,), NEG_INF, tl.float32)
        L = tl.zeros((1,), tl.float32)
        A = tl.zeros((1, WIDTH), tl.float32)
        slot = _slot(request, query_first, BQ, BY_TOKEN) + token
        base = (slot * tl.num_programs(1) + head) * num_parts
        for part in range(0, (context - length + token) // PART + 1):
            at = (base + part) * GROUP + member + one
            acc = tl.load(accs + at[:, None] * WIDTH + column)
            M, L, A = _merge(M, L, A, tl.load(maxima + at), tl.load(sums + at), acc, one == 0)
        to = ((query_first + token).to(tl.int64) * num_heads + head * GROUP + member + one) * D
        _finish(M, L, A, out, out, to, to, one == 0, D, WIDTH, False)


@triton.jit
def store(k, v, cache, slots, k_stride, v_stride, width, page_stride, plane, capacity, head_dim, head_stride,
          PAGE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Copy one token's keys and values [K, D] into its slot of a page; slots outside the cache are skipped.

    Tokens lie k_stride and v_stride apart.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < capacity):
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = at < width
        to = cache + slot // PAGE * page_stride + at // head_dim * head_stride + slot % PAGE * head_dim + at % head_dim
        tl.store(to, tl.load(k + token * k_stride + at, mask=there), mask=there)
        tl.store(to + plane, tl.load(v + token * v_stride + at, mask=there), mask=there)
