"""RMSNorm in Triton: what `kernel.py` launches, the bits of `reference_sm90.py`.

Notable: a row is one tile, its squares are added by the balanced tree, and nothing is fused, so that eager PyTorch
states every bit. The backward adds the rows of a weight's gradient in a fixed number of ascending strides, then by the
same tree.
"""

import triton
import triton.language as tl

from skyrl_isoexec.kernels.numeric.sm90 import exp, narrow, tree, widen


@triton.jit
def _inverse(x, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS] 1 / sqrt(mean of squares + eps)."""
    mean = tl.div_rn(tree(x * x, ROWS, BLOCK), tl.zeros((ROWS,), tl.float32) + width)
    return tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def _normed(x, inverse, dtype: tl.constexpr, CENTERED: tl.constexpr):
    """What the weight multiplies: rounded before it, unless the weight is zero-centred."""
    n = x * inverse[:, None]
    if not CENTERED:
        n = widen(narrow(n, dtype))
    return n


@triton.jit
def _factor(w, column, width, CENTERED: tl.constexpr):
    weight = widen(tl.load(w + column, mask=column < width, other=0.0))
    if CENTERED:
        weight = weight + 1.0
    return weight


@triton.jit(do_not_specialize=["num_rows"])  # one program for every number of rows
def forward(
    x, residual, w, out, total, num_rows, width, eps, heads, stride, step,
    ADD: tl.constexpr, CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows; row r of x lies at r // heads * stride + r % heads * step, all others end to end."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = (row[:, None] < num_rows) & (column[None, :] < width)
    at = row[:, None] * width + column[None, :]
    begin = row // heads * stride + row % heads * step
    value = widen(tl.load(x + begin[:, None] + column[None, :], mask=there, other=0.0))
    weight = _factor(w, column, width, CENTERED)
    dtype: tl.constexpr = out.dtype.element_ty
    if ADD:
        rounded = narrow(widen(tl.load(residual + at, mask=there, other=0.0)) + value, dtype)
        tl.store(total + at, rounded, mask=there)
        value = widen(rounded)
    inverse = _inverse(value, width, eps, ROWS, BLOCK)
    n = _normed(value, inverse, dtype, CENTERED)
    tl.store(out + at, narrow(n * weight[None, :], dtype), mask=there)


@triton.jit(do_not_specialize=["num_rows"])
def backward(
    x, w, dy, dtotal, dx, dw, num_rows, width, eps,
    ADD: tl.constexpr, WEIGHT: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of rows program, program + programs, ...; `dw` [programs, width] gets their share of the weight's gradient."""
    column = tl.arange(0, BLOCK)[None, :]
    there = column < width
    weight = _factor(w, column, width, CENTERED)
    share = tl.zeros((1, BLOCK), tl.float32)
    dtype: tl.constexpr = dx.dtype.element_ty
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        at = (row + tl.zeros((1, 1), tl.int64)) * width + column
        value = widen(tl.load(x + at, mask=there, other=0.0))
        grad = widen(tl.load(dy + at, mask=there, other=0.0))
        inverse = _inverse(value, width, eps, 1, BLOCK)
        along = tree(grad * weight * value, 1, BLOCK) * inverse * inverse * inverse
        along = tl.div_rn(along, tl.zeros((1,), tl.float32) + width)
        share += grad * _normed(value, inverse, dtype, CENTERED)
        result = grad * weight * inverse[:, None] - value * along[:, None]
        if ADD:
            result += widen(tl.load(dtotal + at, mask=there, other=0.0))
        tl.store(dx + at, narrow(result, dtype), mask=there)
    if WEIGHT:
        tl.store(dw + tl.program_id(0) * width + column, share, mask=there)


@triton.jit(do_not_specialize=["num_rows"])
def gated(x, z, w, out, num_rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A norm times silu(z)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = (row[:, None] < num_rows) & (column[None, :] < width)
    at = row[:, None] * width + column[None, :]
    value = widen(tl.load(x + at, mask=there, other=0.0))
    gate = widen(tl.load(z + at, mask=there, other=0.0))
    weight = _factor(w, column, width, False)
    dtype: tl.constexpr = out.dtype.element_ty
    n = _normed(value, _inverse(value, width, eps, ROWS, BLOCK), dtype, False)
    y = widen(narrow(n * weight[None, :], dtype))
    tl.store(out + at, narrow(y * tl.div_rn(gate, exp(-gate) + 1.0), dtype), mask=there)


@triton.jit(do_not_specialize=["num_rows"])
def gated_backward(
    x, z, w, dy, dx, dz, dw, num_rows, width, eps, WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """As `backward`, over tiles of ROWS rows, whose shares of the weight's gradient the tree adds."""
    column = tl.arange(0, BLOCK)
    weight = _factor(w, column, width, False)[None, :]
    share = tl.zeros((ROWS, BLOCK), tl.float32)
    dtype: tl.constexpr = dx.dtype.element_ty
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = (tile + tl.zeros((ROWS,), tl.int64)) * ROWS + tl.arange(0, ROWS)
        there = (row[:, None] < num_rows) & (column[None, :] < width)
        at = row[:, None] * width + column[None, :]
        value = widen(tl.load(x + at, mask=there, other=0.0))
        gate = widen(tl.load(z + at, mask=there, other=0.0))
        grad = widen(tl.load(dy + at, mask=there, other=0.0))
        inverse = _inverse(value, width, eps, ROWS, BLOCK)
        n = _normed(value, inverse, dtype, False)
        sigmoid = tl.div_rn(tl.full((ROWS, BLOCK), 1.0, tl.float32), exp(-gate) + 1.0)
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(dz + at, narrow(grad * widen(narrow(n * weight, dtype)) * slope, dtype), mask=there)
        grad = grad * (gate * sigmoid)
        share += tl.where(there, grad * n, 0.0)
        inner = grad * weight
        along = tree(inner * value, ROWS, BLOCK) * inverse * inverse * inverse
        along = tl.div_rn(along, tl.zeros((ROWS,), tl.float32) + width)
        tl.store(dx + at, narrow(inner * inverse[:, None] - value * along[:, None], dtype), mask=there)
    if WEIGHT:
        tl.store(dw + tl.program_id(0) * width + column, tree(tl.trans(share), BLOCK, ROWS), mask=column < width)


@triton.jit
def add_shares(shares, dw, width, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """dw = balanced tree over the NUM rows of `shares`, rounded once."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.arange(0, NUM)[None, :] * width + column[:, None]
    total = tree(tl.load(shares + at, mask=column[:, None] < width, other=0.0), BLOCK, NUM)
    tl.store(dw + column, narrow(total, dw.dtype.element_ty), mask=column < width)
