"""Linear on Hopper (Triton): one fp32 accumulator per element, K ascending on the tensor core, no split, one rounding.

Notable: bf16 only. The tile comes from `tiles.json` by the shape alone and changes no bit. There is no packed layout:
`pack` returns None, and the weight is read as it lies. The backward is two cuBLAS products and a sum over rows.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.linear import spec
from skyrl_isoexec.kernels.numeric.sm90 import needs_grad, require, require_bf16
from skyrl_isoexec.kernels.numeric.sm90_product import Tile, is_aligned, product, product_gradients, rows_of
from skyrl_isoexec.kernels.numeric.sm90_tiles import Table

__all__ = ["linear", "pack"]

TABLE = Table(Path(__file__).parent / "tiles.json")


def pack(w_NK: Tensor, out: Tensor | None = None) -> None:
    """None: the kernel reads the weight itself."""
    if out is not None:
        raise ValueError("pack: the sm90 implementation has no packed layout")


def forward(
    x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype, tile: Tile | None = None
) -> Tensor:
    """The product under `tile`, by default that of the table."""
    x_TK, w_NK = rows_of(x_TK), rows_of(w_NK)
    if tile is None:
        tile = TABLE.choose(x_TK.shape[0], *w_NK.shape, 1, is_aligned(x_TK, w_NK))
    return product(x_TK, w_NK, out_dtype, tile, bias_N=None if bias_N is None else bias_N.contiguous())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, w_NK, bias_N, out_dtype):
        ctx.save_for_backward(x_TK, w_NK)
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        return forward(x_TK, w_NK, bias_N, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TN):
        dx, dw = product_gradients(dy_TN, *ctx.saved_tensors, ctx.needs_input_grad[:2])
        db = dy_TN.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None


def linear(
    x_TK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    packed: Tensor | None = None,
) -> Tensor:
    """y_TN in `out_dtype` (x's by default). Refuses what `spec` refuses, fp32 operands and a packed weight."""
    out_dtype = spec.check(x_TK, w_NK, bias_N, out_dtype, packed)
    require_bf16("linear", x_TK, w_NK)
    require("linear", bias_N)
    if packed is not None:
        raise ValueError("linear: the sm90 implementation has no packed layout")
    if needs_grad(x_TK, w_NK, bias_N):
        return _Linear.apply(x_TK, w_NK, bias_N, out_dtype)
    return forward(x_TK, w_NK, bias_N, out_dtype)
