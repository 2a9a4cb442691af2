"""Row-parallel linear on Hopper (Triton): fp32 leaves of K, added by the balanced tree, the root rounded at most once.

Notable: a program adds its leaves in registers; a tile may split them over programs, whose roots the same tree adds in
a second kernel. A rank that owns a subtree computes one node of the tree that a single rank computes.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.numeric import sm90_product
from skyrl_isoexec.kernels.numeric.sm90 import needs_grad, require, require_bf16
from skyrl_isoexec.kernels.numeric.sm90_product import Tile, is_aligned, product, product_gradients, rows_of
from skyrl_isoexec.kernels.numeric.sm90_tiles import Table
from skyrl_isoexec.kernels.row_linear import spec

__all__ = ["row_linear", "tree_sum"]

TABLE = Table(Path(__file__).parent / "tiles.json")


def forward(
    x_TK: Tensor, w_NK: Tensor, num_leaves: int, tile: Tile | None = None, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """The root under `tile`, by default that of the table."""
    x_TK, w_NK = rows_of(x_TK), rows_of(w_NK)
    if tile is None:
        tile = TABLE.choose(x_TK.shape[0], *w_NK.shape, num_leaves, is_aligned(x_TK, w_NK))
    return product(x_TK, w_NK, out_dtype, tile, num_leaves=num_leaves)


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, w_NK, num_leaves, out_dtype):
        ctx.save_for_backward(x_TK, w_NK)
        return forward(x_TK, w_NK, num_leaves, None, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TN):
        return *product_gradients(dy_TN, *ctx.saved_tensors, ctx.needs_input_grad[:2]), None, None


def row_linear(
    x_TK: Tensor,
    w_NK: Tensor,
    num_leaves: int,
    packed: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Root [T, N] over this rank's `num_leaves` leaves. Refuses what `spec` refuses, fp32 and a packed weight."""
    spec.check(x_TK, w_NK, num_leaves, packed, out_dtype)
    require_bf16("row_linear", x_TK, w_NK)
    if packed is not None:
        raise ValueError("row_linear: the sm90 implementation has no packed layout")
    if needs_grad(x_TK, w_NK):
        return _RowLinear.apply(x_TK, w_NK, num_leaves, out_dtype)
    return forward(x_TK, w_NK, num_leaves, None, out_dtype)


class _TreeSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parts_GTN):
        ctx.num = parts_GTN.shape[0]
        return sm90_product.tree_sum(parts_GTN)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TN):
        return dy_TN.expand(ctx.num, *dy_TN.shape)


def tree_sum(parts_GTN: Tensor) -> Tensor:
    """fp32 [T, N]: balanced tree over the first dimension, lower index on the left."""
    spec.check_parts(parts_GTN)
    require("tree_sum", parts_GTN)
    return _TreeSum.apply(parts_GTN) if needs_grad(parts_GTN) else sm90_product.tree_sum(parts_GTN)
