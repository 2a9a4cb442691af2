"""Row-parallel linear in compiled loops (numba): the same bits as `row_linear.reference`.

`tree_sum` is the reference's: an elementwise fp32 sum in PyTorch already has one order and needs no loop of ours.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.numeric.cpu import needs_grad
from skyrl_isoexec.kernels.numeric.product import product, product_gradients
from skyrl_isoexec.kernels.row_linear import spec
from skyrl_isoexec.kernels.row_linear.reference import tree_sum

__all__ = ["row_linear", "tree_sum"]


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, w_NK, num_leaves, packed, out_dtype):
        ctx.save_for_backward(x_TK, w_NK)
        return product(x_TK, w_NK, out_dtype, packed=packed, num_leaves=num_leaves)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TN):
        return *product_gradients(dy_TN, *ctx.saved_tensors, ctx.needs_input_grad[:2]), None, None, None


def row_linear(
    x_TK: Tensor,
    w_NK: Tensor,
    num_leaves: int,
    packed: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Root [T, N] over this rank's `num_leaves` leaves; with `packed`, the weight is read from it."""
    spec.check(x_TK, w_NK, num_leaves, packed, out_dtype)
    if needs_grad(x_TK, w_NK):
        return _RowLinear.apply(x_TK, w_NK, num_leaves, packed, out_dtype)
    return product(x_TK, w_NK, out_dtype, packed=packed, num_leaves=num_leaves)
