"""Softmax of 64 rows in registers of one group of warps, in Gluon: what `warp_groups.py` computes between products.

What must stay equal: the arithmetic of `triton_loops.py`, function by function; explicit fma. Every step of a sum adds
two numbers that one thread holds, but for those of `folded`, which a partition needs once.

Shapes: 64 rows, BKV positions of a block, D head dimension; lanes of a sum are [64, 4, 4].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NEG_INF = gl.constexpr(float("-inf"))


@gluon.jit
def _shift(m):
    """What is subtracted in exponents: the maximum, or 0 where there is none yet."""
    return gl.where(m == NEG_INF, 0.0, m)


@gluon.jit
def lane_sums(p, BKV: gl.constexpr):
    """`triton_loops.lane_sums` of 64 rows: [64, 4, 4], whose every number is the sum of what one thread holds."""
    x = p.reshape([64, BKV // 8, 4, 2])
    for step in gl.static_range(1, 8):
        if (BKV // 8) >> step >= 4:
            x = gl.sum(x.reshape([64, 2, (BKV // 8) >> step, 4, 2]), 1)
    return gl.sum(x, 3)


@gluon.jit
def folded(l, ROWS_OF: gl.constexpr):
    """`triton_loops.folded` of 64 rows."""
    x = gl.sum(l.reshape([64, 2, 2, 4]), 1)
    x = gl.sum(x, 1)
    x = gl.sum(x.reshape([64, 2, 2]), 2)
    return gl.convert_layout(gl.sum(x, 1), ROWS_OF)


@gluon.jit
def per_lane(x, l):
    """A number for each row, beside each of its lanes."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, l.type.layout))
    wide, _ = gl.broadcast(gl.convert_layout(x, LAYOUT).expand_dims(1).expand_dims(2), l)
    return wide


@gluon.jit
def weights_of(s, m, scale):
    """(maximum with this block, weights of the block in fp32, what everything before is multiplied by)."""
    new = gl.maximum(m, gl.max(s, 1) * scale)
    shift = _shift(new)
    zero = gl.full(s.shape, 0.0, gl.float32, s.type.layout)
    return new, gl.exp2(gl.fma(s, zero + scale, zero - shift[:, None])), gl.exp2(m - shift)


@gluon.jit
def factors(M, m):
    """(maximum of both, factor of the earlier partitions, factor of this one)."""
    new = gl.maximum(M, m)
    shift = _shift(new)
    return new, gl.exp2(M - shift), gl.exp2(m - shift)


@gluon.jit
def fused(A, acc, x, y, reached):
    """A x + acc y, where a row reached the partition."""
    wide = gl.full(A.shape, 0.0, gl.float32, A.type.layout) + x[:, None]
    return gl.where(reached[:, None], gl.fma(A, wide, acc * y[:, None]), A)


@gluon.jit
def laid(x, D: gl.constexpr, FLAT: gl.constexpr):
    """An accumulator as [D / 8, 512], in which a thread's four numbers of a column of eights lie together: no move."""
    x = x.reshape([4, 2, 8, D // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([D // 8, 512])
    return gl.convert_layout(x, FLAT, assert_trivial=True)


@gluon.jit
def unlaid(x, D: gl.constexpr, OUT: gl.constexpr):
    """The inverse of `laid`."""
    x = x.reshape([D // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, D])
    return gl.convert_layout(x, OUT, assert_trivial=True)
