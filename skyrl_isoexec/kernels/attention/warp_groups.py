"""The long prefill tile of attention on Hopper, in Gluon: two groups of warps compute 64 rows each, one warp copies.

Notable: the arithmetic is that of `triton_loops.py`, function by function and in the same order, so that a row has the
same bits from either; what differs is when things happen. Keys and values come through the copy engine into rings of
K_STAGES and V_STAGES blocks, at most four, and a group takes the scores of the next block before the values of the
last, so that the tensor core works while exponentials are taken. `done` tells for each block that both groups have read
its keys and the values of the one before. What must stay equal: blocks of BKV positions and partitions of PART from the
sequence's start; the lanes of `lane_sums`, which go through a partition, and `folded` at its end; explicit fma; an
accumulator that begins at zeros. The result of the earlier partitions stays in registers (HELD), or waits in the
program's part of `scratch`, where a thread reads what it wrote.

Shapes: a tile's rows are BQ tokens x GROUP query heads of one key-value head; D head dimension.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from skyrl_isoexec.kernels.attention.group_softmax import (
    NEG_INF,
    factors,
    folded,
    fused,
    laid,
    lane_sums,
    per_lane,
    unlaid,
    weights_of,
)

ROWS = 128
"""Rows of a tile."""


@gluon.jit
def _copy(
    keys, values, ring, table, count, query_first, head, num_kv_heads,
    D: gl.constexpr, BKV: gl.constexpr, PAGE: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    """Blocks of keys and values into the rings, each as soon as both groups have left its place."""
    k_ring, v_ring, k_full, v_full, done = ring
    for block in range(0, count):
        k_stage, v_stage, start = block % K_STAGES, block % V_STAGES, block * BKV
        if PAGE:
            plane = gl.load(table + start // PAGE) * 2
            k_row = (plane * num_kv_heads + head) * PAGE + start % PAGE
            v_row = k_row + num_kv_heads * PAGE
            column = 0
        else:
            k_row = query_first + start
            v_row = k_row
            column = head * D
        left = block - K_STAGES
        mbarrier.wait(done.index(left & 3), (left >> 2) & 1, pred=left >= 0)
        mbarrier.expect(k_full.index(k_stage), BKV * D * 2)
        tma.async_copy_global_to_shared(keys, [k_row, column], k_full.index(k_stage), k_ring.index(k_stage))
        left = block - V_STAGES + 1
        mbarrier.wait(done.index(left & 3), (left >> 2) & 1, pred=left >= 1)
        mbarrier.expect(v_full.index(v_stage), BKV * D * 2)
        tma.async_copy_global_to_shared(values, [v_row, column], v_full.index(v_stage), v_ring.index(v_stage))


@gluon.jit
def _attend_rows(
    which: gl.constexpr, q, out, lse, scratch, q_tile, ring, count, full, query_first, first_row, length, context, head,
    num_heads, num_tokens, scale,
    D: gl.constexpr, GROUP: gl.constexpr, BKV: gl.constexpr, PART: gl.constexpr, K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, LSE: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """Rows 64 * which to 64 * which + 63 of a tile, over `count` blocks; from position `full` on, rows see a part."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BKV, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    SCORE_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])
    BLOCKS: gl.constexpr = PART // BKV
    k_ring, v_ring, k_full, v_full, done = ring
    if count > 0:
        row = which * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LOADED))
        at = (query_first + first_row + row // GROUP).to(gl.int64) * num_heads + head * GROUP + row % GROUP
        column = gl.arange(0, D, layout=gl.SliceLayout(0, LOADED))
        there = first_row + row // GROUP < length
        mine = q_tile.index(which)
        mine.store(gl.load(q + at[:, None] * D + column[None, :], mask=there[:, None], other=0.0))
        fence_async_shared()

        row_s = which * 64 + gl.arange(0, 64, layout=SCORE_ROWS)
        token = first_row + row_s // GROUP
        position = gl.where(token < length, context - length + token, -1)
        position_o = gl.convert_layout(position, OUT_ROWS)
        offset = gl.arange(0, BKV, layout=gl.SliceLayout(0, SCORES))
        zeros_s = gl.full((64, BKV), 0.0, gl.float32, SCORES)
        zeros_o = gl.full((64, D), 0.0, gl.float32, OUT)
        none = gl.full((64,), NEG_INF, gl.float32, SCORE_ROWS)
        nothing = gl.full((64,), 0.0, gl.float32, SCORE_ROWS)
        M, L, A = none, nothing, zeros_o  # the partitions before this one
        acc = zeros_o
        earlier = scratch
        if not HELD:
            program = (gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)).to(gl.int64)
            earlier += (program * 128 + which * 64) * D
            earlier += gl.arange(0, D // 8, layout=gl.SliceLayout(1, FLAT))[:, None] * 512
            earlier += gl.arange(0, 512, layout=gl.SliceLayout(0, FLAT))[None, :]
            if count > BLOCKS:
                gl.store(earlier, gl.full((D // 8, 512), 0.0, gl.float32, FLAT))

        mbarrier.wait(k_full.index(0), 0)
        s = warpgroup_mma(mine, k_ring.index(0).permute((1, 0)), zeros_s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(done.index(0))
        if full <= 0:
            s = gl.where(offset[None, :] <= position[:, None], s, NEG_INF)
        m, first_weights, factor = weights_of(s, none, scale)
        l, p = lane_sums(first_weights, BKV), first_weights.to(gl.bfloat16)
        no_lanes = gl.full((64, 4, 4), 0.0, gl.float32, l.type.layout)
        mbarrier.wait(k_full.index(1 % K_STAGES), 0, pred=count > 1)
        for block in range(1, count):
            k_stage, v_stage = block % K_STAGES, (block - 1) % V_STAGES
            scores = warpgroup_mma(mine, k_ring.index(k_stage).permute((1, 0)), zeros_s, is_async=True)
            mbarrier.wait(v_full.index(v_stage), ((block - 1) // V_STAGES) & 1)
            weights = gl.convert_layout(p, WEIGHTS)
            added = warpgroup_mma(weights, v_ring.index(v_stage), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[scores])
            start = block * BKV
            if start >= full:
                s = gl.where((start + offset)[None, :] <= position[:, None], s, NEG_INF)
            opens = block % BLOCKS == 0  # a partition
            before, summed = gl.where(opens, none, m), gl.where(opens, no_lanes, l)
            m_next, weights_next, factor = weights_of(s, before, scale)
            l_next = gl.fma(summed, per_lane(factor, l), lane_sums(weights_next, BKV))
            p = weights_next.to(gl.bfloat16)
            after = block + 1  # this wait keeps the assembler from moving exponentials behind the next one
            mbarrier.wait(k_full.index(after % K_STAGES), (after // K_STAGES) & 1, pred=after < count)
            acc, weights = warpgroup_mma_wait(0, deps=[added, weights])
            mbarrier.arrive(done.index(block & 3))
            if opens:
                first = start - PART
                top, x, y = factors(M, m)
                L = gl.where(first <= position, gl.fma(L, x, folded(l, SCORE_ROWS) * y), L)
                M = gl.where(first <= position, top, M)
                if not HELD:
                    A = unlaid(gl.load(earlier), D, OUT)
                A = fused(A, acc, gl.convert_layout(x, OUT_ROWS), gl.convert_layout(y, OUT_ROWS), first <= position_o)
                if not HELD:
                    gl.store(earlier, laid(A, D, FLAT))
                    A = zeros_o
                acc = zeros_o
            acc = acc * gl.convert_layout(factor, OUT_ROWS)[:, None]
            m, l = m_next, l_next

        last = (count - 1) % V_STAGES
        mbarrier.wait(v_full.index(last), ((count - 1) // V_STAGES) & 1)
        values = v_ring.index(last)
        if count * BKV > context:  # what lies beyond may be anything; both groups write the same
            there = (count - 1) * BKV + gl.arange(0, BKV, layout=gl.SliceLayout(1, LOADED)) < context
            values.store(gl.where(there[:, None], values.load(LOADED), 0.0))
            fence_async_shared()
        weights = gl.convert_layout(p, WEIGHTS)
        added = warpgroup_mma(weights, values, acc, is_async=True)
        acc, weights = warpgroup_mma_wait(0, deps=[added, weights])
        first = (count - 1) // BLOCKS * PART
        top, x, y = factors(M, m)
        L = gl.where(first <= position, gl.fma(L, x, folded(l, SCORE_ROWS) * y), L)
        M = gl.where(first <= position, top, M)
        if not HELD:
            if count > BLOCKS:
                A = unlaid(gl.load(earlier), D, OUT)
        A = fused(A, acc, gl.convert_layout(x, OUT_ROWS), gl.convert_layout(y, OUT_ROWS), first <= position_o)

        y = gl.div_rn(A, zeros_o + gl.convert_layout(L, OUT_ROWS)[:, None])
        y = gl.where(y != y, float("nan"), y).to(gl.bfloat16)
        row_o = which * 64 + gl.arange(0, 64, layout=OUT_ROWS)
        at_o = (query_first + first_row + row_o // GROUP).to(gl.int64) * num_heads + head * GROUP + row_o % GROUP
        column_o = gl.arange(0, D, layout=gl.SliceLayout(0, OUT))
        gl.store(out + at_o[:, None] * D + column_o[None, :], y, mask=(position_o >= 0)[:, None])
        if LSE:
            at_s = (head * GROUP + row_s % GROUP).to(gl.int64) * num_tokens + query_first + token
            gl.store(lse + at_s, (M + gl.log2(L)) * 0.6931471805599453, mask=position >= 0)


@gluon.jit
def _request(query_start, tile, num_requests, BQ: gl.constexpr):
    """The request that owns a tile: request r begins at tile query_start[r] // BQ + r."""
    low, high = tile * 0, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(query_start + middle) // BQ + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@gluon.jit(do_not_specialize=["num_requests", "num_tokens", "shortest", "table_stride"])
def attend(
    q, keys, values, table, query_start, seq_lens, out, lse, scratch, num_requests, num_tokens, num_heads, table_stride,
    scale, shortest,
    D: gl.constexpr, GROUP: gl.constexpr, BQ: gl.constexpr, BKV: gl.constexpr, PART: gl.constexpr, PAGE: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, LSE: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """A tile of rows of one request with more than `shortest` rows, over all of its partitions.

    `keys` and `values` describe blocks of BKV positions, of [T, K * D] at PAGE 0, else of a cache as rows of D.
    """
    tile, head = gl.num_programs(0) - 1 - gl.program_id(0), gl.program_id(1)  # late tiles are long: they begin first
    request = _request(query_start, tile, num_requests, BQ)
    query_first = gl.load(query_start + request)
    length = gl.load(query_start + request + 1) - query_first
    first_row = (tile - query_first // BQ - request) * BQ
    context = length
    if PAGE:
        context = gl.load(seq_lens + request)
    end = gl.minimum(context, context - length + first_row + BQ)
    count = gl.where((first_row < length) & (length > shortest), (end + BKV - 1) // BKV, 0)
    full = (context - length + first_row + 1) // BKV * BKV

    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BKV, D], gl.bfloat16)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_tile = gl.allocate_shared_memory(
        gl.bfloat16, [2, 64, D], gl.NVMMASharedLayout.get_default_for([64, D], gl.bfloat16)
    )
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [K_STAGES, BKV, D], BLOCK)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [V_STAGES, BKV, D], BLOCK)
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], BARRIER)
    gl.static_assert(K_STAGES <= 4 and V_STAGES <= 4)  # else a place of `done` could be told of two blocks
    done = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    for stage in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
    for stage in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(stage), count=1)
    for stage in gl.static_range(4):
        mbarrier.init(done.index(stage), count=2)
    fence_async_shared()
    ring = (k_ring, v_ring, k_full, v_full, done)
    gl.warp_specialize(
        [
            (_attend_rows, (
                0, q, out, lse, scratch, q_tile, ring, count, full, query_first, first_row, length, context, head,
                num_heads, num_tokens, scale, D, GROUP, BKV, PART, K_STAGES, V_STAGES, LSE, HELD,
            )),
            (_attend_rows, (
                1, q, out, lse, scratch, q_tile, ring, count, full, query_first, first_row, length, context, head,
                num_heads, num_tokens, scale, D, GROUP, BKV, PART, K_STAGES, V_STAGES, LSE, HELD,
            )),
            (_copy, (
                keys, values, ring, table + request * table_stride, count, query_first, head, gl.num_programs(1),
                D, BKV, PAGE, K_STAGES, V_STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
