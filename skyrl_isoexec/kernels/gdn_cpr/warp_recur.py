"""The recurrence of `triton_recur.py` on Hopper in Gluon: a thread owns its part of a few columns of the state.

Notable: the arithmetic is that of `triton_recur.recur`, in its order. A state is PIECES tensors [BV, LANES, P], whose
element (column, lane, i) of piece j is number lane * Dk / LANES + j * P + i of Dk: the balanced tree over Dk runs
inside a thread but for its last log2(LANES) sums. Which thread holds what changes no bit.

Shapes: N slots, C rows of a chunk, K key heads, V value heads, Dk and Dv their widths, BV columns of a program.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _partial(x, BV: gl.constexpr, LANES: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr):
    """[BV, LANES] sums of [BV, LANES, P], neighbours first."""
    for step in gl.static_range(1, 8):
        if (P >> step) >= 1:
            x = gl.sum(x.reshape([BV, LANES, P >> step, 2]), 3)
    return gl.convert_layout(x.reshape([BV, LANES]), gl.SliceLayout(2, TILE), assert_trivial=True)


@gluon.jit
def _joined(parts, BV: gl.constexpr, LANES: gl.constexpr, PIECES: gl.constexpr, TILE: gl.constexpr):
    """[BV] sums of PIECES tensors [BV, LANES], the rest of the tree."""
    for step in gl.static_range(1, 8):
        if (PIECES >> step) >= 1:
            less = ()
            for i in gl.static_range(PIECES >> step):
                less = less + (parts[2 * i] + parts[2 * i + 1],)
            parts = less
    x = parts[0]
    for step in gl.static_range(1, 8):
        if (LANES >> step) >= 1:
            x = gl.sum(x.reshape([BV, LANES >> step, 2]), 2)
    return gl.convert_layout(x.reshape([BV]), gl.SliceLayout(1, gl.SliceLayout(2, TILE)), assert_trivial=True)


@gluon.jit
def _piece(row, j: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr):
    """[1, LANES, P] of a row [LANES, Dk / LANES] in shared memory."""
    return gl.expand_dims(row.slice(j * P, P, 1).load(gl.SliceLayout(0, TILE)), 0)


@gluon.jit
def _fade(state, grown, keys, BV: gl.constexpr, LANES: gl.constexpr, P: gl.constexpr, PIECES: gl.constexpr,
          TILE: gl.constexpr):  # fmt: skip
    """(grown S, its products with a row of keys [BV])."""
    faded, parts = (), ()
    for j in gl.static_range(PIECES):
        s = state[j] * grown
        faded = faded + (s,)
        parts = parts + (_partial(s * _piece(keys, j, P, TILE), BV, LANES, P, TILE),)
    return faded, _joined(parts, BV, LANES, PIECES, TILE)


@gluon.jit
def _write(state, d, keys, queries, BV: gl.constexpr, LANES: gl.constexpr, P: gl.constexpr, PIECES: gl.constexpr,
           TILE: gl.constexpr):  # fmt: skip
    """(S + d k, its products with a row of queries [BV])."""
    wide, _ = gl.broadcast(gl.expand_dims(gl.expand_dims(d, 1), 2), state[0])
    made, parts = (), ()
    for j in gl.static_range(PIECES):
        key, _ = gl.broadcast(_piece(keys, j, P, TILE), wide)
        s = gl.fma(wide, key, state[j])
        made = made + (s,)
        parts = parts + (_partial(s * _piece(queries, j, P, TILE), BV, LANES, P, TILE),)
    return made, _joined(parts, BV, LANES, PIECES, TILE)


@gluon.jit
def _opaque(i):
    """A number that the compiler does not know to be i, so that it reads a row again and does not keep it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _zeros(BV: gl.constexpr, LANES: gl.constexpr, P: gl.constexpr, PIECES: gl.constexpr, TILE: gl.constexpr):
    """A state of zeros."""
    state = ()
    for _ in gl.static_range(PIECES):
        state = state + (gl.full([BV, LANES, P], 0.0, gl.float32, TILE),)
    return state


@gluon.jit
def _state(at, STRIDE: gl.constexpr, PIECES: gl.constexpr):
    """A state whose pieces lie STRIDE apart, in fp32."""
    state = ()
    for j in gl.static_range(PIECES):
        state = state + (gl.load(at + j * STRIDE).to(gl.float32),)
    return state


@gluon.jit
def _stage(rows, base, C: gl.constexpr, DK: gl.constexpr, LANES: gl.constexpr, WARPS: gl.constexpr):
    """bf16 rows [C, Dk] from `base` on, in shared memory as fp32 [C, LANES, Dk / LANES]."""
    WIDTH: gl.constexpr = DK // LANES
    VECTOR: gl.constexpr = 8 if C * DK >= WARPS * 256 else 2
    ACROSS: gl.constexpr = min(32, WIDTH // VECTOR)
    LOADED: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    held = gl.allocate_shared_memory(gl.float32, [C * LANES, WIDTH], ROWS)
    row = gl.arange(0, C * LANES, layout=gl.SliceLayout(1, LOADED))
    i = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LOADED))
    held.store(gl.load(rows + base + row[:, None] * WIDTH + i[None, :]).to(gl.float32))
    return held._reinterpret(gl.float32, [C, LANES, WIDTH], ROWS)


@gluon.jit(do_not_specialize=["num_requests", "table_stride"])
def scan(
    q, k, v, steps, beta, snapshots, base, owner, query_start, seq_lens, table, recurrent, out, scale, num_requests,
    table_stride, recurrent_stride,
    C: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, HK: gl.constexpr, HV: gl.constexpr, BV: gl.constexpr,
    LANES: gl.constexpr, COLUMNS: gl.constexpr, P: gl.constexpr, AGAIN: gl.constexpr, PAGED: gl.constexpr,
    PAGE: gl.constexpr,
):  # fmt: skip
    """`triton_recur.scan`: a thread has COLUMNS columns of a state [Dk, Dv]; AGAIN: it reads keys twice."""
    WARPS: gl.constexpr = gl.num_warps()
    TILE: gl.constexpr = gl.BlockedLayout([COLUMNS, 1, P], [32 // LANES, LANES, 1], [WARPS, 1, 1], [0, 2, 1])
    WIDE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, TILE))
    PIECES: gl.constexpr = DK // LANES // P
    head, slot = gl.program_id(0) // (DV // BV), gl.program_id(1).to(gl.int64)
    if gl.load(owner + slot) < num_requests:
        request = gl.load(owner + slot)
        first = gl.load(query_start + request)
        context = gl.load(seq_lens + request)
        begin = context - (gl.load(query_start + request + 1) - first)
        start = (begin // C + gl.program_id(1) - gl.load(base + request)) * C
        old, stop = gl.maximum(begin - start, 0), gl.minimum(context - start, C)
        at = slot * HV + head
        columns = gl.program_id(0) % (DV // BV) * BV + gl.arange(0, BV, layout=WIDE)
        lane = gl.arange(0, LANES, layout=gl.SliceLayout(0, gl.SliceLayout(2, TILE)))
        deep = gl.arange(0, P, layout=gl.SliceLayout(0, gl.SliceLayout(1, TILE)))
        within = columns[:, None, None] + (lane[None, :, None] * (DK // LANES) + deep[None, None, :]) * DV
        pages = table + request * table_stride
        snapshots += at * DK * DV
        recurrent += head * DK * DV
        if PAGED:
            state = _zeros(BV, LANES, P, PIECES, TILE)
            if old > 0:
                source = gl.load(pages + gl.maximum(begin - 1, 0) // PAGE).to(gl.int64)
                state = _state(recurrent + source * recurrent_stride + within, P * DV, PIECES)
            else:
                state = _state(snapshots + within, P * DV, PIECES)
        else:
            state = _state(snapshots + within, P * DV, PIECES)
        shared = (slot * HK + head // (HV // HK)) * C * DK
        keys, queries = _stage(k, shared, C, DK, LANES, WARPS), _stage(q, shared, C, DK, LANES, WARPS)
        gl.thread_barrier()
        v += at * C * DV
        steps += at * C
        beta += at * C
        out += ((first + start - begin).to(gl.int64) * HV + head) * DV
        value, g, b = gl.load(v + old * DV + columns), gl.load(steps + old), gl.load(beta + old)
        for i in range(old, stop):
            more = gl.minimum(i + 1, C - 1)
            next_value, next_g, next_b = gl.load(v + more * DV + columns), gl.load(steps + more), gl.load(beta + more)
            state, found = _fade(state, gl.exp2(g), keys.index(i), BV, LANES, P, PIECES, TILE)
            d = b * (value.to(gl.float32) - found)
            again = i
            if AGAIN:
                again = _opaque(i)
            state, o = _write(state, d, keys.index(again), queries.index(i), BV, LANES, P, PIECES, TILE)
            gl.store(out + i * (HV * DV) + columns, (scale * o).to(gl.bfloat16))
            value, g, b = next_value, next_g, next_b
        if PAGED:
            if stop < C:
                page = gl.load(pages + (context - 1) // PAGE).to(gl.int64)
                for j in gl.static_range(PIECES):
                    gl.store(recurrent + page * recurrent_stride + (within + j * P * DV), state[j])


@gluon.jit(do_not_specialize=["table_stride"])
def step(
    q, g, keys, values, snapshot, gate, recurrent, table, query_start, seq_lens, out,
    table_stride, keys_stride, values_stride, snapshot_stride, gate_stride, recurrent_stride, scale,
    C: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, HK: gl.constexpr, HV: gl.constexpr, BV: gl.constexpr,
    LANES: gl.constexpr, COLUMNS: gl.constexpr, P: gl.constexpr, AGAIN: gl.constexpr, PAGE: gl.constexpr,
    ALONE: gl.constexpr,
):  # fmt: skip
    """BV columns of one value head of a request with one row, whose k, v and beta are in its page already.

    ALONE: no other kernel serves longer requests, so theirs become NaN.
    """
    WARPS: gl.constexpr = gl.num_warps()
    TILE: gl.constexpr = gl.BlockedLayout([COLUMNS, 1, P], [32 // LANES, LANES, 1], [WARPS, 1, 1], [0, 2, 1])
    WIDE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, TILE))
    PIECES: gl.constexpr = DK // LANES // P
    head, request = gl.program_id(0) // (DV // BV), gl.program_id(1)
    columns = gl.program_id(0) % (DV // BV) * BV + gl.arange(0, BV, layout=WIDE)
    token = gl.load(query_start + request)
    length = gl.load(query_start + request + 1) - token
    out += (token.to(gl.int64) * HV + head) * DV
    if ALONE:
        if length > 1:
            for more in range(length):
                nan = gl.full([BV], float("nan"), gl.float32, WIDE)
                gl.store(out + more * (HV * DV) + columns, nan.to(gl.bfloat16))
    if length == 1:
        position = gl.load(seq_lens + request) - 1
        t = position % C
        pages = table + request * table_stride
        target = gl.load(pages + position // PAGE).to(gl.int64)
        source = gl.load(pages + gl.maximum(position - 1, 0) // PAGE).to(gl.int64)
        lane = gl.arange(0, LANES, layout=gl.SliceLayout(0, gl.SliceLayout(2, TILE)))
        deep = gl.arange(0, P, layout=gl.SliceLayout(0, gl.SliceLayout(1, TILE)))
        within = columns[:, None, None] + (lane[None, :, None] * (DK // LANES) + deep[None, None, :]) * DV
        recurrent += target * recurrent_stride + head * DK * DV
        state = _zeros(BV, LANES, P, PIECES, TILE)
        if t > 0:
            state = _state(recurrent + within, P * DV, PIECES)
        elif position >= C:
            state = _state(snapshot + source * snapshot_stride + head * DK * DV + within, P * DV, PIECES)
        shared = head // (HV // HK)
        key = _stage(keys, target * keys_stride + (shared * C + t) * DK, 1, DK, LANES, WARPS)
        query = _stage(q, (request * HK + shared) * DK, 1, DK, LANES, WARPS)
        gl.thread_barrier()
        value = gl.load(values + target * values_stride + (head * C + t) * DV + columns).to(gl.float32)
        beta = gl.load(gate + target * gate_stride + (head * 2 + 1) * C + t)
        grown = gl.exp2(gl.load(g + request * HV + head))
        state, found = _fade(state, grown, key.index(0), BV, LANES, P, PIECES, TILE)
        d, again = beta * (value - found), t - t
        if AGAIN:
            again = _opaque(again)
        state, o = _write(state, d, key.index(again), query.index(0), BV, LANES, P, PIECES, TILE)
        gl.store(out + columns, (scale * o).to(gl.bfloat16))
        if t < C - 1:
            for j in gl.static_range(PIECES):
                gl.store(recurrent + (within + j * P * DV), state[j])
