"""Shared arithmetic in eager PyTorch: the definition of the order.

Every product, sum and quotient rounds separately to fp32: nothing here may be fused. What must stay equal:
`numeric.cpu` gives the same bits for every input, except that the payload of a NaN is free.
"""

import torch
from torch import Tensor

NUM_LANES = 16
"""Partial sums of a row reduction: element d belongs to lane d % 16."""

LOG2_E = 1.44269504088896341
TO_INTEGER = 12582912.0
"""1.5 * 2**23: adding it to |x| < 2**22 rounds x to an integer, which then stands in the low bits of the sum."""
TO_INTEGER_BITS = 0x4B400000
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
"""Their sum is ln 2; the first has so few bits that its product with the exponent is exact."""
POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Coefficients of x**7 down to x**2, of the widely published single-precision minimax polynomial."""
EXP_OVERFLOWS, EXP_VANISHES = 88.72284, -103.97208
"""Above the first the result is infinite, below the second it is +0; between them subnormal results are kept."""


def _power_of_two(n: Tensor) -> Tensor:
    """2**n for int32 n in [-126, 127]."""
    return ((n + 127) << 23).view(torch.float32)


def exp(x: Tensor) -> Tensor:
    """fp32 exponential from products and sums only (no libm), within one unit in the last place; NaN stays NaN."""
    shifted = x * LOG2_E + TO_INTEGER
    n = (shifted - TO_INTEGER).detach()  # an integer: its derivative is zero
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = torch.full_like(x, POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        p = p * r + coefficient
    y = (p * (r * r) + r) + 1.0
    exponent = shifted.view(torch.int32) - TO_INTEGER_BITS
    half = exponent >> 1
    y = y * _power_of_two(half) * _power_of_two(exponent - half)
    y = torch.where(x > EXP_OVERFLOWS, torch.full_like(x, float("inf")), y)
    return torch.where(x < EXP_VANISHES, torch.zeros_like(x), y)


def sqrt(x: Tensor) -> Tensor:
    """fp32 square root, correctly rounded: PyTorch's own fp32 root may come from a library that is not."""
    return x.double().sqrt().float()


def lane_tree(lanes: Tensor) -> Tensor:
    """Sum over the last dimension (a power of two) by a balanced tree over neighbours, lower index on the left."""
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    return lanes[..., 0]


def lane_sum(x: Tensor) -> Tensor:
    """Sum of fp32 x over its last dimension: 16 lanes start at +0 and take their elements ascending, then the tree."""
    lanes = torch.zeros(*x.shape[:-1], NUM_LANES, dtype=torch.float32, device=x.device)
    for start in range(0, x.shape[-1], NUM_LANES):
        chunk = x[..., start : start + NUM_LANES]
        width = chunk.shape[-1]
        lanes = torch.cat([lanes[..., :width] + chunk, lanes[..., width:]], dim=-1)
    return lane_tree(lanes)


def dot(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """fp32 [M, N] of fp32 operands: one accumulator per element, from +0, k ascending."""
    sums_MN = torch.zeros(x_MK.shape[0], w_NK.shape[0], dtype=torch.float32, device=x_MK.device)
    for k in range(x_MK.shape[1]):
        sums_MN = sums_MN + x_MK[:, k, None] * w_NK[None, :, k]
    return sums_MN


def tree(parts: Tensor) -> Tensor:
    """Sum over the first dimension (a power of two) by the balanced tree of `lane_tree`."""
    while parts.shape[0] > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


def dot_tree(x_MK: Tensor, w_NK: Tensor, num_leaves: int) -> Tensor:
    """fp32 [M, N]: K in `num_leaves` equal contiguous leaves, each a `dot`, added by `tree`."""
    leaves = zip(x_MK.chunk(num_leaves, 1), w_NK.chunk(num_leaves, 1), strict=True)
    return tree(torch.stack([dot(x, w) for x, w in leaves]))


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 to `dtype` (float32 or bfloat16), to nearest, ties to even; every NaN becomes the bf16 NaN 0x7fc0."""
    if dtype == torch.float32:
        return x
    if dtype != torch.bfloat16:
        raise TypeError(f"narrow: {dtype} is neither torch.float32 nor torch.bfloat16")
    rounded = x.to(dtype)
    return torch.where(rounded.isnan(), torch.full_like(rounded, float("nan")), rounded)
