"""The tile of latent attention on Hopper that overlaps copies, scores and values, in Gluon: 64 rows, three warp groups.

Notable: the arithmetic is that of `loops_sm90.py`, function by function and in the same order, so that a row has the
same bits from either; what differs is when things happen. One group of warps takes scores and softmax, and leaves a
block's weights and its factors in shared memory. Two groups add the values, each for its half of the latent, while the
scores of the next block are taken, and have that half of the block after next copied into a ring of two. Rows are the
tall side of every product here, positions there: a product of the tensor core depends on the order of its sum alone.
What must stay equal: the latent's products before the rotated part's in one accumulator that begins at zeros; blocks of
64 positions and partitions of PART from the sequence's start; the row sum as a product with ones on the tensor core;
explicit fma.

A program's items are tiles of any requests (TILES), all tiles of one request (WHOLE), or every num_programs(1)-th
partition of one request, written to `maxima`, `sums` and `accs` (PARTS). The result of the earlier partitions waits in
the program's part of `scratch`, where a thread reads what it wrote.

Shapes: a tile's rows are rows of q [T * N, L + R]; H is half of the latent, L = 2 H.
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

from skyrl_isoexec.kernels.mla.items_sm90 import PARTS, item_of, items_of
from skyrl_isoexec.kernels.mla.values_sm90 import STAGES, add_values

NEG_INF = gl.constexpr(float("-inf"))
ROWS = 64
"""Rows of a tile."""


@gluon.jit
def _shift(m):
    """What is subtracted in exponents: the maximum, or 0 where there is none yet."""
    return gl.where(m == NEG_INF, 0.0, m)


@gluon.jit
def _softmax(s, m, scale):
    """(maximum with this block, weights of the block in bf16, what the accumulator before is multiplied by)."""
    new = gl.maximum(m, gl.max(s, 1) * scale)
    shift = _shift(new)
    zero = gl.full(s.shape, 0.0, gl.float32, s.type.layout)
    p = gl.exp2(gl.fma(s, zero + scale, zero - shift[:, None])).to(gl.bfloat16)
    return new, p, gl.exp2(m - shift)


@gluon.jit
def _joined(M, D, m, d, reached, is_first):
    """(maximum, sum, factor of the earlier partitions, factor of this one), where a row reached the partition."""
    new = gl.maximum(M, m)
    shift = _shift(new)
    x, y = gl.exp2(M - shift), gl.exp2(m - shift)
    D = gl.where(is_first, d, gl.where(reached, gl.fma(D, x, d * y), D))
    return gl.where(is_first, m, gl.where(reached, new, M)), D, x, y


@gluon.jit
def _weigh(
    q_latents, q_rotated, lse, maxima, sums, num_parts, shared, batch, scale,
    N: gl.constexpr, H: gl.constexpr, R: gl.constexpr, PART: gl.constexpr, PAGE: gl.constexpr, MODE: gl.constexpr,
    LSE: gl.constexpr, BY_TOKEN: gl.constexpr,
):  # fmt: skip
    """Copies of rows of q, scores, their weights, and the factors of what was added before."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    BLOCKS: gl.constexpr = PART // 64
    q_tile, q_last, ring, ring_last, p_tile, ones, vectors, q_full, full, p_full, p_free, e_full, e_free = shared
    row = gl.arange(0, 64, layout=OF_ROWS)
    offset = gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES))
    zeros_s = gl.full((64, 64), 0.0, gl.float32, SCORES)
    zeros_d = gl.full((64, 8), 0.0, gl.float32, SUMS)
    none = gl.full((64,), NEG_INF, gl.float32, OF_ROWS)
    nothing = gl.full((64,), 0.0, gl.float32, OF_ROWS)
    begin, bound, step = items_of(batch, N, PART, MODE)
    tiles, done, said = 0, 0, 0
    for item in range(begin, bound, step):
        request, query_first, length, context, first_row, first, last = item_of(item, batch, N, PART, PAGE, MODE)
        if first < last:
            token = (first_row + row) // N
            there = token < length
            position = gl.where(there, context - length + token, -1)
            whole = (context - length + first_row // N + 1) // 64  # blocks that every row sees
            M, D, m, d = none, nothing, none, nothing
            mbarrier.expect(q_full, 64 * (2 * H + R) * 2)
            at = query_first * N + first_row
            tma.async_copy_global_to_shared(q_latents, [at, 0], q_full, q_tile.index(0))
            tma.async_copy_global_to_shared(q_latents, [at, H], q_full, q_tile.index(1))
            tma.async_copy_global_to_shared(q_rotated, [at, 2 * H], q_full, q_last)
            mbarrier.wait(q_full, tiles & 1)
            tiles += 1
            for block in range(first, last):
                stage, phase = done % STAGES, (done // STAGES) & 1
                mbarrier.wait(full.index(stage * 2), phase)
                s = warpgroup_mma(q_tile.index(0), ring.index(stage * 2).permute((1, 0)), zeros_s, is_async=True)
                mbarrier.wait(full.index(stage * 2 + 1), phase)
                s = warpgroup_mma(q_tile.index(1), ring.index(stage * 2 + 1).permute((1, 0)), s, is_async=True)
                s = warpgroup_mma(q_last, ring_last.index(stage).permute((1, 0)), s, is_async=True)
                s = warpgroup_mma_wait(0, deps=[s])
                if block >= whole:
                    s = gl.where((block * 64 + offset)[None, :] <= position[:, None], s, NEG_INF)
                m, p, factor = _softmax(s, m, scale)
                mbarrier.wait(p_free, (done & 1) ^ 1)
                p_tile.store(p)
                vectors.index(0).store(factor)
                fence_async_shared()
                mbarrier.arrive(p_full)
                added = warpgroup_mma(p_tile, ones.permute((1, 0)), zeros_d, is_async=True)
                added = gl.convert_layout(gl.max(warpgroup_mma_wait(0, deps=[added]), 1), OF_ROWS)  # equal columns
                d = gl.fma(d, factor, added)
                done += 1
                if MODE != PARTS:
                    if (block % BLOCKS == BLOCKS - 1) & (block + 1 < last):
                        reached = block // BLOCKS * PART <= position
                        M, D, x, y = _joined(M, D, m, d, reached, block < BLOCKS)
                        mbarrier.wait(e_free, (said & 1) ^ 1)
                        vectors.index(1).store(x)
                        vectors.index(2).store(y)
                        mbarrier.arrive(e_full)
                        said += 1
                        m, d = none, nothing
            if MODE == PARTS:
                slot = first_row + row
                slot += query_first * N if BY_TOKEN else request * 64
                at = slot.to(gl.int64) * num_parts + first // BLOCKS
                gl.store(maxima + at, m, mask=there)
                gl.store(sums + at, d, mask=there)
            else:
                reached = (last - 1) // BLOCKS * PART <= position
                M, D, x, y = _joined(M, D, m, d, reached, last <= BLOCKS)
                mbarrier.wait(e_free, (said & 1) ^ 1)
                vectors.index(1).store(x)
                vectors.index(2).store(y)
                vectors.index(3).store(D)
                mbarrier.arrive(e_full)
                said += 1
                if LSE:
                    at = (query_first * N + first_row + row).to(gl.int64)
                    gl.store(lse + at, M + gl.log2(D), mask=there)


@gluon.jit(do_not_specialize=["num_requests", "num_tiles", "bound", "num_parts", "table_stride"])
def attend(
    q_latents, q_rotated, latents, rotated, table, query_start, seq_lens, out, lse, scratch, maxima, sums, accs,
    num_requests, num_tiles, bound, num_parts, table_stride, scale,
    N: gl.constexpr, H: gl.constexpr, R: gl.constexpr, PART: gl.constexpr, PAGE: gl.constexpr, MODE: gl.constexpr,
    LSE: gl.constexpr, BY_TOKEN: gl.constexpr,
):  # fmt: skip
    """Requests of more than `bound` rows (TILES), or of at most so many.

    `latents` and `rotated` describe blocks of 64 rows of keys [., L + R], `q_latents` and `q_rotated` such of q.
    """
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, H], gl.bfloat16)
    LAST: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, R], gl.bfloat16)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [2, 64, H], HALF)
    q_last = gl.allocate_shared_memory(gl.bfloat16, [64, R], LAST)
    ring = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 64, H], HALF)
    ring_last = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, R], LAST)
    p_tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], WEIGHTS)
    ones = gl.allocate_shared_memory(
        gl.bfloat16, [8, 64], gl.NVMMASharedLayout.get_default_for([8, 64], gl.bfloat16)
    )  # fmt: skip
    vectors = gl.allocate_shared_memory(gl.float32, [4, 64], VECTOR)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], BARRIER)
    p_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    p_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    e_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    e_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for one in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(one), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_free, count=2)
    mbarrier.init(e_full, count=1)
    mbarrier.init(e_free, count=2)
    ones.store(gl.full((8, 64), 1.0, gl.bfloat16, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    fence_async_shared()
    shared = (q_tile, q_last, ring, ring_last, p_tile, ones, vectors, q_full, full, p_full, p_free, e_full, e_free)
    batch = (query_start, seq_lens, num_requests, num_tiles, bound)
    if MODE == PARTS:  # the kernel that merges them may be launched
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)
    gl.warp_specialize(
        [
            (_weigh, (
                q_latents, q_rotated, lse, maxima, sums, num_parts, shared, batch, scale, N, H, R, PART, PAGE, MODE,
                LSE, BY_TOKEN,
            )),
            (add_values, (
                0, (latents, rotated), table, table_stride, out, scratch, accs, num_parts, shared, batch, N, H, R, PART,
                PAGE, MODE, BY_TOKEN,
            )),
            (add_values, (
                1, (latents, rotated), table, table_stride, out, scratch, accs, num_parts, shared, batch, N, H, R, PART,
                PAGE, MODE, BY_TOKEN,
            )),
        ],
        [4, 4],
        [200, 200],
    )  # fmt: skip
