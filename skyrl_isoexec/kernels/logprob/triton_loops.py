"""The Triton kernels of the log-probabilities: block maxima, block sums, their combination, result and gradient.

Notable: a program owns one block of one row, so that one row of a large vocabulary fills the device too, and nothing of
size [T, V] is written but a result of that size. What must stay equal: the order stated in `reference_sm90.py`.

Shapes: T rows (tokens), V vocabulary or a slice of it, L leaves, B blocks of a leaf. HAS_DIVISOR: not at temperature 1.
"""

import triton
import triton.language as tl

from skyrl_isoexec.kernels.logprob import series
from skyrl_isoexec.kernels.numeric.sm90 import exp, tree

LN2, SQRT2 = tl.constexpr(series.LN2), tl.constexpr(series.SQRT2)
C0, C1, C2, C3, C4, C5, C6, C7, C8 = (tl.constexpr(c) for c in series.COEFFICIENTS)


@triton.jit
def _maximum(x):
    """The maximum of a tile, NaN where there is one: exact, so the order of `tl.max` decides nothing."""
    is_nan = tl.max((x != x).to(tl.int32), 0)
    return tl.where(is_nan > 0, float("nan"), tl.max(x, 0))


@triton.jit
def _divided(x, divisors, row, HAS_DIVISOR: tl.constexpr):
    if HAS_DIVISOR:
        x = tl.div_rn(x, tl.zeros(x.shape, tl.float32) + tl.load(divisors + row))
    return x


@triton.jit
def _max_of(parts, row, num_parts, PARTS: tl.constexpr):
    """The maximum of a row's block maxima [T, num_parts], -0 counted as +0."""
    part = tl.arange(0, PARTS)
    x = tl.load(parts + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    return _maximum(x) + 0.0


@triton.jit
def block_max(logits, divisors, parts, stride, size, HAS_DIVISOR: tl.constexpr, BLOCK: tl.constexpr):
    """parts [T, blocks] = maximum of each block of a row over its temperature."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, mask=at < size, other=float("-inf"))
    x = _divided(x, divisors, row, HAS_DIVISOR)
    tl.store(parts + row * tl.num_programs(1) + block, _maximum(x))


@triton.jit(do_not_specialize=["num_parts"])
def row_max(parts, out, num_parts, PARTS: tl.constexpr):
    """out [T] = maximum of each row's block maxima."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, _max_of(parts, row, num_parts, PARTS))


@triton.jit(do_not_specialize=["num_parts"])
def block_sums(
    logits, divisors, maxima, sums, stride, width, num_parts,
    HAS_DIVISOR: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums [T, L * B] = each block's tree of exp(x - maximum); `maxima` [T, num_parts] are of the row's blocks."""
    row, block, leaf = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    m = _max_of(maxima, row, num_parts, PARTS)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + leaf.to(tl.int64) * width + at, mask=at < width, other=0.0)
    e = tl.where(at < width, exp(_divided(x, divisors, row, HAS_DIVISOR) - m), 0.0)
    total = tree(tl.reshape(e, (1, BLOCK)), 1, BLOCK)
    to = sums + (row * tl.num_programs(2) + leaf) * tl.num_programs(1) + block + tl.arange(0, 1)
    tl.store(to, total)


@triton.jit
def _add_blocks(sums, row, num_blocks, LEAVES: tl.constexpr):
    """[1, LEAVES] sums of a row's leaves: blocks in ascending order."""
    leaf = tl.arange(0, LEAVES)[None, :]
    at = sums + (row * LEAVES + leaf) * num_blocks
    total = tl.load(at)
    for block in range(1, num_blocks):
        total += tl.load(at + block)
    return total


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def leaf_sums(sums, out, num_rows, num_blocks, LEAVES: tl.constexpr):
    """out [L, T] = sum of each leaf's blocks."""
    row = tl.program_id(0).to(tl.int64)
    leaf = tl.arange(0, LEAVES)[None, :]
    tl.store(out + leaf * num_rows + row, _add_blocks(sums, row, num_blocks, LEAVES))


@triton.jit
def _log(total):
    """Logarithm of a positive normal fp32 number; see `reference.log`."""
    bits = total.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) - 127).to(tl.float64)
    f = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True).to(tl.float64)
    high = f > SQRT2
    exponent, f = tl.where(high, exponent + 1.0, exponent), tl.where(high, f * 0.5, f)
    s = (f - 1.0) / (f + 1.0)
    z = s * s
    p = z * C0 + C1
    p = p * z + C2
    p = p * z + C3
    p = p * z + C4
    p = p * z + C5
    p = p * z + C6
    p = p * z + C7
    p = p * z + C8
    return (exponent * LN2 + (s + s) * p).to(tl.float32)


@triton.jit
def _finished(x, m, total):
    """(x - maximum) - log(total), NaN where the total is."""
    return tl.where(total != total, float("nan"), (x - m) - _log(total))


@triton.jit
def finish(logits, divisors, maxima, totals, out, stride, size, HAS_DIVISOR: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, V] = log-probabilities of a block of a row."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, mask=at < size, other=0.0)
    x = _divided(x, divisors, row, HAS_DIVISOR)
    tl.store(out + row * size + at, _finished(x, tl.load(maxima + row), tl.load(totals + row)), mask=at < size)


@triton.jit(do_not_specialize=["num_parts", "num_blocks"])
def token(
    logits, divisors, ids, parts, sums, out, maxima, totals, stride, size, num_parts, num_blocks,
    HAS_DIVISOR: tl.constexpr, PARTS: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """out, maxima, totals [T] from the blocks' maxima and sums; NaN for an id outside the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    one = tl.arange(0, 1)
    m = _max_of(parts, row, num_parts, PARTS)
    total = tree(_add_blocks(sums, row, num_blocks, LEAVES), 1, LEAVES)
    id = tl.load(ids + row)
    inside = (id >= 0) & (id < size)
    x = tl.load(logits + row * stride + id + one, mask=inside & (one == 0), other=float("nan"))
    tl.store(out + row + one, _finished(_divided(x, divisors, row, HAS_DIVISOR), m, total))
    tl.store(maxima + row, m)
    tl.store(totals + row + one, total)


@triton.jit
def gradient(
    grads, logits, divisors, ids, maxima, totals, out, stride, size, first_id,
    HAS_DIVISOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, V] = grad ([id == chosen] - exp(x - maximum) / total) / temperature, for ids from `first_id`."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, mask=at < size, other=0.0)
    e = exp(_divided(x, divisors, row, HAS_DIVISOR) - tl.load(maxima + row))
    p = tl.div_rn(e, tl.zeros((BLOCK,), tl.float32) + tl.load(totals + row))
    chosen = tl.where(at == tl.load(ids + row) - first_id, 1.0, 0.0)
    result = _divided(tl.load(grads + row) * (chosen - p), divisors, row, HAS_DIVISOR)
    tl.store(out + row * size + at, result, mask=at < size)
