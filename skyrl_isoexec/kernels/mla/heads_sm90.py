"""A linear for each head on Hopper (Triton): one fp32 accumulator per element, K ascending, no split, one rounding.

Notable: strides of both operands are free but for x's last dimension, so a part of `kv_b_proj` is read as it lies, also
transposed. What must stay equal: the bits, under every tile; a tile has a number of rows, columns and k, operands
swapped ("swap": the weight is the tall one) or not ("rows"), warps and stages.

Shapes: T tokens, N heads, K and M input and output features of a head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from skyrl_isoexec.kernels.numeric.sm90 import EXACT, SUM_TYPE, dot, narrow
from skyrl_isoexec.kernels.numeric.sm90_product import Tile

TILES = (
    Tile.parse("swap 16 64 64 w4 s4 x1"),
    Tile.parse("swap 32 64 64 w4 s4 x1"),
    Tile.parse("rows 128 128 64 w8 s3 x1"),
)
"""For up to 16 tokens, up to 64, and more."""


@triton.jit(do_not_specialize=["num_t"])
def _product(
    x, w, y, num_t, num_m, depth, x_token, x_head, w_head, w_m, w_k, y_token, y_head,
    BT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A tile of y [T, N, M] for the head program_id(1); WHOLE: depth is a multiple of BK."""
    columns = tl.cdiv(num_m, BM)
    rows = (tl.program_id(0) // columns * BT + tl.arange(0, BT)).to(tl.int64)
    column = tl.program_id(0) % columns * BM + tl.arange(0, BM)
    head = tl.program_id(1).to(tl.int64)
    x += head * x_head + tl.minimum(rows, num_t - 1) * x_token
    w += head * w_head + tl.minimum(column, num_m - 1) * w_m
    if SWAP:
        acc = tl.zeros((BM, BT), SUM_TYPE)
    else:
        acc = tl.zeros((BT, BM), SUM_TYPE)
    for start in range(0, depth, BK):
        k = start + tl.arange(0, BK)
        if SWAP:
            left, right = w[:, None] + k[None, :] * w_k, x[None, :] + k[:, None]
        else:
            left, right = x[:, None] + k[None, :], w[None, :] + k[:, None] * w_k
        if WHOLE:
            acc = dot(tl.load(left), tl.load(right), acc)
        else:
            there = k < depth
            acc = dot(tl.load(left, there[None, :], other=0.0), tl.load(right, there[:, None], other=0.0), acc)
    y += head * y_head
    sums = narrow(acc.to(tl.float32), y.dtype.element_ty)
    if SWAP:
        there = (column[:, None] < num_m) & (rows[None, :] < num_t)
        tl.store(y + rows[None, :] * y_token + column[:, None], sums, mask=there)
    else:
        there = (rows[:, None] < num_t) & (column[None, :] < num_m)
        tl.store(y + rows[:, None] * y_token + column[None, :], sums, mask=there)


def heads(x_TNK: Tensor, w_NMK: Tensor, tile: Tile | None = None) -> Tensor:
    """y_TNM under `tile`, by default that of the number of tokens. The caller has checked shapes and types."""
    (num_t, num_heads, depth), num_m = x_TNK.shape, w_NMK.shape[1]
    if x_TNK.stride(2) != 1:
        x_TNK = x_TNK.contiguous()
    if tile is None:
        tile = TILES[(num_t > 16) + (num_t > 64)]
    y_TNM = torch.empty(num_t, num_heads, num_m, dtype=x_TNK.dtype, device=x_TNK.device)
    if num_t and num_m:
        _product[(triton.cdiv(num_t, tile.m) * triton.cdiv(num_m, tile.n), num_heads)](
            x_TNK, w_NMK, y_TNM, num_t, num_m, depth, *x_TNK.stride()[:2], *w_NMK.stride(), *y_TNM.stride()[:2],
            BT=tile.m, BM=tile.n, BK=tile.k, SWAP=tile.kind == "swap", WHOLE=depth % tile.k == 0,
            num_warps=tile.warps, num_stages=tile.stages, **EXACT,
        )  # fmt: skip
    return y_TNM
