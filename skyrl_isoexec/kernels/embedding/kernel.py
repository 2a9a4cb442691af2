"""Embedding on Hopper (Triton): a gather of rows, bit for bit. An id outside the table gives a NaN row.

The backward is PyTorch's own gather gradient: sorted by id, added in fp32 in a fixed order, rounded once, no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.embedding import spec
from skyrl_isoexec.kernels.numeric.sm90 import EXACT, narrow, needs_grad, require, require_bf16

__all__ = ["embedding"]

BLOCK = 1024
"""Elements of a row that one program moves."""


@triton.jit
def _gather(ids, w, out, num_rows, width, BLOCK: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64)
    nan = narrow(tl.full((BLOCK,), float("nan"), tl.float32), out.dtype.element_ty)
    inside = (row >= 0) & (row < num_rows)
    there = column < width
    value = tl.load(w + tl.where(inside, row, 0) * width + column, mask=there & inside, other=0.0)
    tl.store(out + token * width + column, tl.where(inside, value, nan), mask=there)


def _run(ids_T: Tensor, w_VH: Tensor) -> Tensor:
    num_rows, width = w_VH.shape
    out = torch.empty(ids_T.shape[0], width, dtype=w_VH.dtype, device=w_VH.device)
    if out.numel():
        grid = (ids_T.shape[0], triton.cdiv(width, BLOCK))
        _gather[grid](ids_T.contiguous(), w_VH, out, num_rows, width, BLOCK=BLOCK, num_warps=4, **EXACT)
    return out


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids_T, w_VH):
        ctx.save_for_backward(ids_T)
        ctx.num_rows = w_VH.shape[0]
        return _run(ids_T, w_VH)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TH):
        (ids_T,) = ctx.saved_tensors
        return None, torch.ops.aten.embedding_dense_backward(dy_TH.contiguous(), ids_T.long(), ctx.num_rows, -1, False)


def embedding(ids_T: Tensor, w_VH: Tensor) -> Tensor:
    """Rows [T, H] of the table, in its dtype. Refuses what `spec` refuses, and fp32."""
    spec.check(ids_T, w_VH)
    require_bf16("embedding", w_VH)
    require("embedding", ids_T)
    w_VH = w_VH.contiguous()
    return _Embedding.apply(ids_T, w_VH) if needs_grad(w_VH) else _run(ids_T, w_VH)
