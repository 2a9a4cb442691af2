"""Embedding on one core: PyTorch's gather, which moves bits and has no arithmetic to compile.

The backward adds rows in ascending token order in fp32 and rounds once; PyTorch's own would add in bf16.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.embedding import spec
from skyrl_isoexec.kernels.numeric.cpu import compiled, f32, i64, needs_grad, read


@compiled
def _scatter_add(dy, bf16, ids, num_tokens, width, sums):
    for t in range(num_tokens):
        row = f32(sums + 4 * width * i64(ids)[t])
        for d in range(width):
            row[d] += read(dy, bf16, t * width + d)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids_T, w_VH):
        ctx.save_for_backward(ids_T)
        ctx.like = w_VH.shape, w_VH.dtype
        return torch.index_select(w_VH, 0, ids_T)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TH):
        (ids_T,), (shape, dtype) = ctx.saved_tensors, ctx.like
        dy_TH, ids_T = dy_TH.contiguous(), ids_T.long().contiguous()
        sums = torch.zeros(shape, dtype=torch.float32)
        bf16 = int(dy_TH.dtype is torch.bfloat16)
        _scatter_add(dy_TH.data_ptr(), bf16, ids_T.data_ptr(), len(ids_T), shape[1], sums.data_ptr())
        return None, sums.to(dtype)


def embedding(ids_T: Tensor, w_VH: Tensor) -> Tensor:
    """Rows [T, H] of the table, in its dtype. Refuses what `spec` refuses; IndexError for an id outside the table."""
    spec.check(ids_T, w_VH)
    if needs_grad(w_VH):
        return _Embedding.apply(ids_T, w_VH)
    return torch.index_select(w_VH, 0, ids_T)
