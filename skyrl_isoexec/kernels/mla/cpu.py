"""Latent attention on the CPU: `loops.py` and the shared matrix product behind the functions of every implementation.

What must stay equal: the bits of `reference.py`, whatever the batch, the pages and the cut of a prefill.

Shapes: T tokens, N query heads of a rank, L latent rank, Q = L + width of the rotated part, K and M input and output
features of a head, R requests, P pages of the cache.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.mla import loops, spec
from skyrl_isoexec.kernels.mla.backward import differentiable
from skyrl_isoexec.kernels.mla.spec import mla_cache_shape
from skyrl_isoexec.kernels.numeric.cpu import needs_grad, scratch
from skyrl_isoexec.kernels.numeric.product import product, product_gradients
from skyrl_isoexec.kernels.numeric.softmax_loops import raise_for
from skyrl_isoexec.schedule import Schedule

__all__ = ["head_linear", "mla", "mla_cache_shape", "mla_paged", "write_latent"]

ONE_PAGE = 1 << 31
"""Page size of packed rows: no sequence is longer."""


def _heads(x_TNK: Tensor, w_NMK: Tensor) -> Tensor:
    y_TNM = x_TNK.new_empty(*x_TNK.shape[:2], w_NMK.shape[1])
    for n, (x_TK, w_MK) in enumerate(zip(x_TNK.unbind(1), w_NMK.unbind(0), strict=True)):
        y_TNM[:, n] = product(x_TK, w_MK, x_TNK.dtype)
    return y_TNM


class _HeadLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TNK, w_NMK):
        ctx.save_for_backward(x_TNK, w_NMK)
        return _heads(x_TNK, w_NMK)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TNM):
        x_TNK, w_NMK = ctx.saved_tensors
        heads = zip(dy_TNM.unbind(1), x_TNK.unbind(1), w_NMK.unbind(0), strict=True)
        dx, dw = zip(*(product_gradients(*head, ctx.needs_input_grad) for head in heads), strict=True)
        return None if dx[0] is None else torch.stack(dx, 1), None if dw[0] is None else torch.stack(dw)


def head_linear(x_TNK: Tensor, w_NMK: Tensor) -> Tensor:
    """y_TNM: head n's rows times its own weight, rounded once to x's dtype; differentiable. See `spec.check_heads`."""
    spec.check_heads(x_TNK, w_NMK)
    spec.check_host(x_TNK, w_NMK)
    return _HeadLinear.apply(x_TNK, w_NMK) if needs_grad(x_TNK, w_NMK) else _heads(x_TNK, w_NMK)


def _forward(
    q_TNQ: Tensor, c_TQ: Tensor, cu_seqlens: Tensor, scale: float, latent: int, schedule: Schedule
) -> tuple[Tensor, Tensor]:
    spec.check_host(q_TNQ, c_TQ, cu_seqlens)
    spec.check_rows(q_TNQ, c_TQ, cu_seqlens, latent, schedule)
    q_TNQ, c_TQ, starts = q_TNQ.contiguous(), c_TQ.contiguous(), cu_seqlens.to(torch.int32).contiguous()
    lengths = starts[1:] - starts[:-1]
    num_tokens, num_heads, width = q_TNQ.shape
    tile = loops.tile_length(schedule.kv_block)
    out, lse = q_TNQ.new_empty(num_tokens, num_heads, latent), torch.empty(num_tokens, num_heads)
    code = loops.attend(
        q_TNQ.data_ptr(), c_TQ.data_ptr(), starts.data_ptr(), starts.data_ptr(), lengths.data_ptr(), out.data_ptr(),
        lse.data_ptr(), scratch(loops.scratch_size(num_heads, width, latent, tile)),
        num_tokens, num_heads, width, latent, lengths.shape[0], num_tokens, 1, 1, ONE_PAGE, width,
        scale, schedule.kv_block, schedule.kv_partition, tile, loops.chunk_length(num_heads),
        int(q_TNQ.dtype == torch.bfloat16),
    )  # fmt: skip
    raise_for("mla", code)
    return out, lse


def mla(
    q_TNQ: Tensor, c_TQ: Tensor, cu_seqlens: Tensor, scale: float, latent: int, *, schedule: Schedule
) -> Tensor:  # fmt: skip
    """o_TNL of causal latent attention over packed sequences; differentiable. See `spec.check_rows` for refusals."""
    return differentiable(_forward, q_TNQ, c_TQ, cu_seqlens, scale, latent, schedule)


def write_latent(c_TQ: Tensor, cache: Tensor, slots_T: Tensor) -> None:
    """Store each row at slot page * page_size + offset; rows with a negative slot are skipped."""
    spec.check_host(c_TQ, cache, slots_T)
    spec.check_write(c_TQ, cache, slots_T)
    c_TQ, slots_T = c_TQ.contiguous(), slots_T.contiguous()
    num_pages, page_size, width = cache.shape
    outside = loops.store(
        c_TQ.data_ptr(), cache.data_ptr(), slots_T.data_ptr(), slots_T.shape[0], num_pages * page_size, width,
        int(cache.dtype == torch.bfloat16),
    )  # fmt: skip
    if outside >= 0:
        raise ValueError(f"mla: slot {outside} lies outside {num_pages} pages of {page_size}")


def mla_paged(
    q_TNQ: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    latent: int,
    out: Tensor | None = None,
    *,
    schedule: Schedule,
) -> Tensor:
    """Causal latent attention of the last rows of each request over its pages. See `spec.check_paged` for refusals."""
    spec.check_host(q_TNQ, cache, block_table, query_start, seq_lens)
    spec.check_paged(q_TNQ, cache, block_table, query_start, seq_lens, latent, out, schedule)
    q_TNQ = q_TNQ.contiguous()
    num_tokens, num_heads, width = q_TNQ.shape
    num_pages, page_size, _ = cache.shape
    out = q_TNQ.new_zeros(num_tokens, num_heads, latent) if out is None else out
    tile = loops.tile_length(schedule.kv_block)
    code = loops.attend(
        q_TNQ.data_ptr(), cache.data_ptr(), block_table.data_ptr(), query_start.data_ptr(), seq_lens.data_ptr(),
        out.data_ptr(), 0, scratch(loops.scratch_size(num_heads, width, latent, tile)),
        num_tokens, num_heads, width, latent, seq_lens.shape[0], num_pages, block_table.shape[1],
        block_table.stride(0), page_size, page_size * width,
        scale, schedule.kv_block, schedule.kv_partition, tile, loops.chunk_length(num_heads),
        int(cache.dtype == torch.bfloat16),
    )  # fmt: skip
    raise_for("mla", code)
    return out
