"""Grouped linear: the same bits as `experts.reference`, by the compiled product that every linear is.

The backward is made of the same products, rows ascending, so its bits depend on neither threads nor other experts.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.experts import spec
from skyrl_isoexec.kernels.numeric.cpu import needs_grad, require_cpu
from skyrl_isoexec.kernels.numeric.product import product, product_gradients


def _occupied(bounds: list[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of those that have any."""
    for e, (first, last) in enumerate(pairwise(bounds)):
        if first < last:
            yield e, slice(first, last)


def _run(x_SK: Tensor, w_ENK: Tensor, bounds: list[int], out_dtype: torch.dtype) -> Tensor:
    out = torch.empty(x_SK.shape[0], w_ENK.shape[1], dtype=out_dtype)
    out[: bounds[0]], out[bounds[-1] :] = 0, 0
    for e, rows in _occupied(bounds):
        out[rows] = product(x_SK[rows], w_ENK[e], out_dtype)
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SK, w_ENK, bounds, out_dtype):
        ctx.save_for_backward(x_SK, w_ENK)
        ctx.bounds = bounds
        return _run(x_SK, w_ENK, bounds, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_SN):
        x_SK, w_ENK = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        dx, dw = (torch.zeros_like(t) if wanted else None for t, wanted in zip((x_SK, w_ENK), needs, strict=True))
        for e, rows in _occupied(ctx.bounds):
            for out, part in zip((dx, dw), product_gradients(dy_SN[rows], x_SK[rows], w_ENK[e], needs), strict=True):
                if part is not None:
                    out[rows if out is dx else e] = part
        return dx, dw, None, None


def grouped_linear(x_SK: Tensor, w_ENK: Tensor, starts_E1: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """y_SN in `out_dtype` (x's by default). Refuses what `spec` refuses, and memory that is not the CPU's."""
    out_dtype = spec.check(x_SK, w_ENK, starts_E1, out_dtype)
    require_cpu(x_SK, w_ENK, starts_E1)
    bounds = spec.bounds(starts_E1, x_SK.shape[0])
    if needs_grad(x_SK, w_ENK):
        return _GroupedLinear.apply(x_SK, w_ENK, bounds, out_dtype)
    return _run(x_SK, w_ENK, bounds, out_dtype)
