"""Linear in compiled loops (numba): the same bits as `linear.reference`, with and without a packed weight.

The backward is made of the same products, so its bits depend on neither threads nor the alignment of memory.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.linear import spec
from skyrl_isoexec.kernels.numeric.cpu import needs_grad
from skyrl_isoexec.kernels.numeric.panels import pack
from skyrl_isoexec.kernels.numeric.product import product, product_gradients

__all__ = ["linear", "pack"]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, w_NK, bias_N, out_dtype, packed):
        ctx.save_for_backward(x_TK, w_NK)
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        return product(x_TK, w_NK, out_dtype, packed=packed, bias_N=bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TN):
        dx, dw = product_gradients(dy_TN, *ctx.saved_tensors, ctx.needs_input_grad[:2])
        db = None
        if ctx.needs_input_grad[2]:
            db = product(torch.ones(1, dy_TN.shape[0]), dy_TN.t(), ctx.bias_dtype)[0]  # rows ascending
        return dx, dw, db, None, None


def linear(
    x_TK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    packed: Tensor | None = None,
) -> Tensor:
    """y_TN in `out_dtype` (x's by default); with `packed`, the weight is read from it. Refuses what `spec` refuses."""
    out_dtype = spec.check(x_TK, w_NK, bias_N, out_dtype, packed)
    if needs_grad(x_TK, w_NK, bias_N):
        return _Linear.apply(x_TK, w_NK, bias_N, out_dtype, packed)
    return product(x_TK, w_NK, out_dtype, packed=packed, bias_N=bias_N)
