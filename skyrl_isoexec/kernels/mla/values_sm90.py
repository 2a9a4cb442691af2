"""The groups of warps of `warp_groups.py` that add values, each for its half of the latent, and have keys copied.

Notable: accumulators are handled in eight pieces where partitions end, so that what waits in global memory is loaded
while the piece before is multiplied and few registers are needed beside the accumulator.

Shapes: H is half of the latent; a piece is [H / 64, 512]: columns in groups of eight, and what a group of warps holds
of one, of which four neighbours belong to a thread.
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

STAGES = gl.constexpr(2)
"""Blocks of keys in shared memory."""


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
    """`item_of`, without blocks from `bound` on; the first two blocks of keys are under way."""
    request, query_first, length, context, first_row, first, last = item, item, item, item, item, item, item
    if item < bound:
        request, query_first, length, context, first_row, first, last = item_of(item, batch, N, PART, PAGE, MODE)
        pages = table + request * table_stride
        for block in range(first, gl.minimum(last, first + 2)):
            row = _row_of(block, pages, query_first, PAGE)
            _copy(half, keys, row, (done + block - first) % STAGES, shared, H, R)
    return request, query_first, length, context, first_row, first, last


@gluon.jit
def add_values(
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
    begin, bound, step = items_of(batch, N, PART, MODE)
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
