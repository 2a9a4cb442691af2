"""What the programs of `warp_groups.py` work on: tiles of any requests, of one request, or partitions of one request.

A tile's rows are 64 rows of q [T * N, L + R] of one request: row r has its token r // N. `batch` is query_start,
seq_lens, the number of requests, that of tiles, and the rows of a request above which it is one of TILES.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILES, WHOLE, PARTS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""What a program's items are."""


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
def items_of(batch, N: gl.constexpr, PART: gl.constexpr, MODE: gl.constexpr):
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
def item_of(item, batch, N: gl.constexpr, PART: gl.constexpr, PAGE: gl.constexpr, MODE: gl.constexpr):
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
