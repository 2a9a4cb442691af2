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

NEG_INF = gl.constexpr(float("-inf"))
ROWS = 64
"""Rows of a tile."""
STAGES = gl.constexpr(2)
"""Blocks of keys in shared memory."""
TILES, WHOLE, PARTS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""What a program's items are."""


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
def _laid(x, H: gl.constexpr, FLAT: gl.constexpr):
    """An accumulator as [H / 8, 512], in which a thread's four numbers of a column of eights lie together: no move."""
    x = x.reshape([4, 2, 8, H // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([H // 8, 512])
    return gl.convert_layout(x, FLAT, assert_trivial=True)


@gluon.jit
def _halves(x, FLAT: gl.constexpr):
    """[n, 512] as twice [n / 2, 512]."""
    a, b = x.reshape([2, x.shape[0] // 2, 512]).permute((1, 2, 0)).split()
    return gl.convert_layout(a, FLAT, assert_trivial=True), gl.convert_layout(b, FLAT, assert_trivial=True)


@gluon.jit
def _pieces(x, H: gl.constexpr, FLAT: gl.constexpr):
    """An accumulator as eight pieces [H / 64, 512] of `_laid`."""
    a, b = _halves(_laid(x, H, FLAT), FLAT)
    a, b, c, d = _halves(a, FLAT) + _halves(b, FLAT)
    return _halves(a, FLAT) + _halves(b, FLAT) + _halves(c, FLAT) + _halves(d, FLAT)


@gluon.jit
def _wide(x, acc, H: gl.constexpr, FLAT: gl.constexpr):
    """A number of each row as a piece has them."""
    return _pieces(gl.full(acc.shape, 0.0, gl.float32, acc.type.layout) + x[:, None], H, FLAT)[0]


@gluon.jit
def _added(A, acc, x, y, reached):
    """A x + acc y, where a row reached the partition."""
    return gl.where(reached, gl.fma(A, x, acc * y), A)


@gluon.jit
def _request_of(query_start, tile, num_requests, N: gl.constexpr):
    """The request that owns a tile: request r begins at tile query_start[r] * N // 64 + r."""
    low, high = tile * 0, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(query_start + middle) * N // 64 + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@gluon.jit
def _items(batch, N: gl.constexpr, PART: gl.constexpr, MODE: gl.constexpr):
    """(first item of the program, bound, step)."""
    query_start, seq_lens, num_requests, num_tiles, bound = batch
    if MODE == TILES:
        return gl.program_id(0), num_tiles, gl.num_programs(0)
    request = gl.program_id(0)
    rows = (gl.load(query_start + request + 1) - gl.load(query_start + request)) * N
    tiles = gl.where(rows <= bound, (rows + 63) // 64, 0)
    if MODE == PARTS:
        parts = (gl.load(seq_lens + request) + PART - 1) // PART - gl.program_id(1)
        tiles *= (gl.maximum(parts, 0) + gl.num_programs(1) - 1) // gl.num_programs(1)
    return request * 0, tiles, request * 0 + 1


@gluon.jit
def _item(item, batch, N: gl.constexpr, PART: gl.constexpr, PAGE: gl.constexpr, MODE: gl.constexpr):
    """(request, its first token, its tokens, its context, first row of the tile, first block, bound of blocks)."""
    query_start, seq_lens, num_requests, num_tiles, bound = batch
    request, tile = gl.program_id(0), item
    if MODE == TILES:
        tile = num_tiles - 1 - item  # late tiles are long: they begin first
        request = _request_of(query_start, tile, num_requests, N)
    query_first = gl.load(query_start + request)
    length = gl.load(query_start + request + 1) - query_first
    context = length
    if PAGE:
        context = gl.load(seq_lens + request)
    if MODE == TILES:
        tile -= query_first * N // 64 + request
    part = 0
    if MODE == PARTS:
        parts = (context + PART - 1) // PART - gl.program_id(1)
        mine = (parts + gl.num_programs(1) - 1) // gl.num_programs(1)
        tile = item // mine
        part = gl.program_id(1) + item % mine * gl.num_programs(1)
    first_row = tile * 64
    end = gl.minimum(context, context - length + (first_row + 63) // N + 1)
    first = part * (PART // 64)
    last = (end + 63) // 64
    if MODE == PARTS:
        last = gl.minimum(last, first + PART // 64)
    if MODE == TILES:
        last = gl.where((first_row < length * N) & (length * N > bound), last, 0)
    return request, query_first, length, context, first_row, first, last


@gluon.jit
def _copy(half: gl.constexpr, keys, row, stage, shared, H: gl.constexpr, R: gl.constexpr):
    """Half of the latent of 64 keys into a stage of the ring, and with the second half their rotated part."""
    latents, rotated = keys
    _, _, ring, ring_last, _, _, _, _, full, _, _, _, _ = shared
    at = stage * 2 + half
    mbarrier.expect(full.index(at), 64 * (H + half * R) * 2)
    tma.async_copy_global_to_shared(latents, [row, half * H], full.index(at), ring.index(at))
    if half:
        tma.async_copy_global_to_shared(rotated, [row, 2 * H], full.index(at), ring_last.index(stage))


@gluon.jit
def _row_of(block, pages, query_first, PAGE: gl.constexpr):
    """Where a block of keys begins."""
    row = query_first + block * 64
    if PAGE:
        row = gl.load(pages + block * 64 // PAGE) * PAGE + block * 64 % PAGE
    return row


@gluon.jit
def _begin(
    half: gl.constexpr, item, bound, done, keys, table, table_stride, shared, batch,
    N: gl.constexpr, H: gl.constexpr, R: gl.constexpr, PART: gl.constexpr, PAGE: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """`_item`, without blocks from `bound` on; the first two blocks of keys are under way."""
    request, query_first, length, context, first_row, first, last = item, item, item, item, item, item, item
    if item < bound:
        request, query_first, length, context, first_row, first, last = _item(item, batch, N, PART, PAGE, MODE)
        pages = table + request * table_stride
        for block in range(first, gl.minimum(last, first + 2)):
            row = _row_of(block, pages, query_first, PAGE)
            _copy(half, keys, row, (done + block - first) % STAGES, shared, H, R)
    return request, query_first, length, context, first_row, first, last


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
    begin, bound, step = _items(batch, N, PART, MODE)
    tiles, done, said = 0, 0, 0
    for item in range(begin, bound, step):
        request, query_first, length, context, first_row, first, last = _item(item, batch, N, PART, PAGE, MODE)
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


@gluon.jit
def _add_values(
    half: gl.constexpr, keys, table, table_stride, out, scratch, accs, num_parts, shared, batch,
    N: gl.constexpr, H: gl.constexpr, R: gl.constexpr, PART: gl.constexpr, PAGE: gl.constexpr, MODE: gl.constexpr,
    BY_TOKEN: gl.constexpr,
):  # fmt: skip
    """Copies of keys, and weights times values, for one half of the latent."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])
    BLOCKS: gl.constexpr = PART // 64
    PIECE: gl.constexpr = H // 64
    _, _, ring, _, p_tile, _, vectors, _, full, p_full, p_free, e_full, e_free = shared
    zeros = gl.full((64, H), 0.0, gl.float32, OUT)
    place = gl.arange(0, 512, layout=gl.SliceLayout(0, FLAT))  # of warps, rows, quarters, rows, columns
    row = place // 128 * 16 + place // 2 % 2 * 8 + place // 16 % 8
    eight = gl.arange(0, PIECE, layout=gl.SliceLayout(1, FLAT))
    column = half * H + eight[:, None] * 8 + (place // 4 % 4 * 2 + place % 2)[None, :]
    earlier = scratch + (gl.program_id(0) * 2 + half).to(gl.int64) * (64 * H) + eight[:, None] * 512 + place[None, :]
    begin, bound, step = _items(batch, N, PART, MODE)
    done, said = 0, 0
    request, query_first, length, context, first_row, first, last = _begin(
        half, begin, bound, 0, keys, table, table_stride, shared, batch, N, H, R, PART, PAGE, MODE
    )
    for item in range(begin, bound, step):
        pages = table + request * table_stride
        token = (first_row + row) // N
        position = gl.where(token < length, context - length + token, -1)[None, :]
        acc = zeros
        for block in range(first, last):
            at, phase = done % STAGES * 2 + half, (done // STAGES) & 1
            ahead = _row_of(gl.minimum(block + 2, last - 1), pages, query_first, PAGE)
            mbarrier.wait(full.index(at), phase)
            values = ring.index(at)
            if (block + 1) * 64 > context:  # what lies beyond may be anything
                seen = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LOADED)) < context
                mbarrier.wait(p_full, done & 1)  # scores were taken
                for piece in gl.static_range(H // 64):
                    part = values.slice(piece * 64, 64, dim=1)
                    part.store(gl.where(seen[:, None], part.load(LOADED), 0.0))
                fence_async_shared()
                gl.thread_barrier()
            mbarrier.wait(p_full, done & 1)
            acc = acc * vectors.index(0).load(OF_ROWS)[:, None]
            acc = warpgroup_mma(p_tile, values, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(p_free)
            if block + 2 < last:
                _copy(half, keys, ahead, done % STAGES, shared, H, R)
            done += 1
            if MODE != PARTS:
                if (block % BLOCKS == BLOCKS - 1) & (block + 1 < last):
                    mbarrier.wait(e_full, said & 1)
                    x, y = vectors.index(1).load(OF_ROWS), vectors.index(2).load(OF_ROWS)
                    mbarrier.arrive(e_free)
                    said += 1
                    pieces = _pieces(acc, H, FLAT)
                    if block < BLOCKS:
                        for i in gl.static_range(8):
                            gl.store(earlier + i * PIECE * 512, pieces[i])
                    else:
                        x_wide, y_wide = _wide(x, acc, H, FLAT), _wide(y, acc, H, FLAT)
                        A = gl.load(earlier)
                        for i in gl.static_range(8):
                            waiting = A
                            if i < 7:
                                A = gl.load(earlier + (i + 1) * PIECE * 512)
                            added = _added(waiting, pieces[i], x_wide, y_wide, block // BLOCKS * PART <= position)
                            gl.store(earlier + i * PIECE * 512, added)
                    acc = zeros
        rows, slot, is_last = query_first * N + first_row + row, first_row + row, last > first
        if MODE == PARTS:
            slot = rows if BY_TOKEN else request * 64 + slot
        of_part, is_joined, reached = first // BLOCKS, last > BLOCKS, (last - 1) // BLOCKS * PART <= position
        there = position >= 0
        request, query_first, length, context, first_row, first, last = _begin(
            half, item + step, bound, done, keys, table, table_stride, shared, batch, N, H, R, PART, PAGE, MODE
        )
        if is_last:
            pieces = _pieces(acc, H, FLAT)
            if MODE == PARTS:
                to = accs + ((slot.to(gl.int64) * num_parts + of_part) * (2 * H))[None, :] + column
                for i in gl.static_range(8):
                    gl.store(to + i * PIECE * 8, pieces[i], mask=there)
            else:
                mbarrier.wait(e_full, said & 1)
                x, y = vectors.index(1).load(OF_ROWS), vectors.index(2).load(OF_ROWS)
                D = vectors.index(3).load(OF_ROWS)
                mbarrier.arrive(e_free)
                said += 1
                x, y, D = _wide(x, acc, H, FLAT), _wide(y, acc, H, FLAT), _wide(D, acc, H, FLAT)
                to = out + (rows.to(gl.int64) * (2 * H))[None, :] + column
                for i in gl.static_range(8):
                    result = pieces[i]
                    if is_joined:
                        result = _added(gl.load(earlier + i * PIECE * 512), result, x, y, reached)
                    result = gl.div_rn(result, D)
                    result = gl.where(result != result, float("nan"), result).to(gl.bfloat16)
                    gl.store(to + i * PIECE * 8, result, mask=there)


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
            (_add_values, (
                0, (latents, rotated), table, table_stride, out, scratch, accs, num_parts, shared, batch, N, H, R, PART,
                PAGE, MODE, BY_TOKEN,
            )),
            (_add_values, (
                1, (latents, rotated), table, table_stride, out, scratch, accs, num_parts, shared, batch, N, H, R, PART,
                PAGE, MODE, BY_TOKEN,
            )),
        ],
        [4, 4],
        [200, 200],
    )  # fmt: skip
