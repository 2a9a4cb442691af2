"""Causal attention on the CPU: `loops.py`, `loops_backward.py` and `store.py` behind every implementation's functions.

What must stay equal: the bits of `reference.py`, whatever the batch, the pages and the cut of a prefill.

Shapes: T tokens, N query heads, K key-value heads, D head dimension, S sequences, R requests, P pages of the cache.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_isoexec.kernels.attention import loops, loops_backward, spec
from skyrl_isoexec.kernels.attention.spec import kv_cache_shape
from skyrl_isoexec.kernels.attention.store import store
from skyrl_isoexec.kernels.numeric.cpu import needs_grad, scratch
from skyrl_isoexec.kernels.numeric.softmax_loops import raise_for
from skyrl_isoexec.kernels.numeric.threads import spread
from skyrl_isoexec.schedule import Schedule

__all__ = ["attention", "attention_paged", "kv_cache_shape", "write_kv"]

ONE_PAGE = 1 << 31
"""Page size of contiguous rows: no sequence is longer."""
WORTH = 1 << 20
"""Multiplications of queries and keys that a thread must have to do, about 100 microseconds."""


def _over_heads(work: Callable[[int, int], int | None], q_TND: Tensor, num_kv_heads: int, context: int) -> None:
    """Call `work` for parts of the key-value heads; ValueError for the code that it returns, the same for each part.

    `context` is about how many positions a row sees.
    """
    found = spread(num_kv_heads, WORTH * num_kv_heads // max(1, q_TND.numel() * context), work)
    raise_for("attention", found[0])


def _forward(
    q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, scale: float, schedule: Schedule
) -> tuple[Tensor, Tensor]:
    spec.check_host(q_TND, k_TKD, v_TKD, cu_seqlens)
    spec.check_rows(q_TND, k_TKD, v_TKD, cu_seqlens, schedule)
    q_TND, k_TKD, v_TKD = q_TND.contiguous(), k_TKD.contiguous(), v_TKD.contiguous()
    starts = cu_seqlens.to(torch.int32).contiguous()
    lengths = starts[1:] - starts[:-1]
    num_tokens, num_heads, head_dim = q_TND.shape
    num_kv_heads = k_TKD.shape[1]
    row = num_kv_heads * head_dim
    tile = loops.tile_length(schedule.kv_block)
    out, lse = torch.empty_like(q_TND), torch.empty(num_tokens, num_heads)
    size = loops.scratch_size(num_tokens, num_heads // num_kv_heads, head_dim, tile)

    def heads(first: int, last: int) -> int:
        return loops.attend(
            q_TND.data_ptr(), k_TKD.data_ptr(), v_TKD.data_ptr(), starts.data_ptr(), starts.data_ptr(),
            lengths.data_ptr(), out.data_ptr(), lse.data_ptr(), scratch(size),
            num_tokens, num_heads, num_kv_heads, head_dim, lengths.shape[0], num_tokens, 1, 1,
            ONE_PAGE, row, head_dim, row, 1, row,
            scale, schedule.kv_block, schedule.kv_partition, tile, int(q_TND.dtype == torch.bfloat16), first, last,
        )  # fmt: skip

    _over_heads(heads, q_TND, num_kv_heads, num_tokens // max(1, len(lengths)))
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_TND, k_TKD, v_TKD, cu_seqlens, scale, schedule):
        q_TND, k_TKD, v_TKD = q_TND.contiguous(), k_TKD.contiguous(), v_TKD.contiguous()
        out, lse = _forward(q_TND, k_TKD, v_TKD, cu_seqlens, scale, schedule)
        ctx.save_for_backward(q_TND, k_TKD, v_TKD, out, lse, cu_seqlens.to(torch.int32).contiguous())
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TND):
        *operands, starts = ctx.saved_tensors
        grad_TND, (q, k, v) = grad_TND.contiguous(), operands[:3]
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        num_heads, head_dim = q.shape[1:]
        longest = int((starts[1:] - starts[:-1]).max()) if len(starts) > 1 else 0
        size = loops_backward.scratch_size(longest, head_dim)

        def heads(first: int, last: int) -> None:
            loops_backward.gradients(
                grad_TND.data_ptr(), *(x.data_ptr() for x in operands), starts.data_ptr(),
                *(x.data_ptr() for x in grads), scratch(size),
                num_heads, k.shape[1], head_dim, len(starts) - 1, ctx.scale, int(q.dtype == torch.bfloat16),
                first, last,
            )  # fmt: skip

        _over_heads(heads, q, k.shape[1], longest)
        return *grads, None, None, None


def attention(
    q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, scale: float, *, schedule: Schedule
) -> Tensor:
    """Causal attention over packed sequences; differentiable. See `spec.check_rows` for what is refused."""
    if needs_grad(q_TND, k_TKD, v_TKD):
        return _Attention.apply(q_TND, k_TKD, v_TKD, cu_seqlens, scale, schedule)
    return _forward(q_TND, k_TKD, v_TKD, cu_seqlens, scale, schedule)[0]


def write_kv(k_TKD: Tensor, v_TKD: Tensor, cache: Tensor, slots_T: Tensor) -> None:
    """Store each row at slot page * page_size + offset; rows with a negative slot are skipped."""
    spec.check_host(k_TKD, v_TKD, cache, slots_T)
    spec.check_write(k_TKD, v_TKD, cache, slots_T)
    k_TKD, v_TKD, slots_T = k_TKD.contiguous(), v_TKD.contiguous(), slots_T.contiguous()
    num_pages, _, num_kv_heads, head_dim, page_size = cache.shape
    outside = store(
        k_TKD.data_ptr(), v_TKD.data_ptr(), cache.data_ptr(), slots_T.data_ptr(),
        slots_T.shape[0], num_pages, num_kv_heads, head_dim, page_size, int(cache.dtype == torch.bfloat16),
    )  # fmt: skip
    if outside >= 0:
        raise ValueError(f"attention: slot {outside} lies outside {num_pages} pages of {page_size}")


def attention_paged(
    q_TND: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor | None = None,
    *,
    schedule: Schedule,
) -> Tensor:
    """Causal attention of the last rows of each request over its pages. See `spec.check_paged` for what is refused."""
    spec.check_host(q_TND, cache, block_table, query_start, seq_lens)
    spec.check_paged(q_TND, cache, block_table, query_start, seq_lens, out, schedule)
    q_TND = q_TND.contiguous()
    out = torch.zeros_like(q_TND) if out is None else out
    num_tokens, num_heads, head_dim = q_TND.shape
    num_pages, _, num_kv_heads, _, page_size = cache.shape
    head = head_dim * page_size
    address, is_bf16 = cache.data_ptr(), cache.dtype == torch.bfloat16
    tile = loops.tile_length(schedule.kv_block)
    size = loops.scratch_size(num_tokens, num_heads // num_kv_heads, head_dim, tile)

    def heads(first: int, last: int) -> int:
        return loops.attend(
            q_TND.data_ptr(), address, address + num_kv_heads * head * (2 if is_bf16 else 4),
            block_table.data_ptr(), query_start.data_ptr(), seq_lens.data_ptr(), out.data_ptr(), 0, scratch(size),
            num_tokens, num_heads, num_kv_heads, head_dim,
            seq_lens.shape[0], num_pages, block_table.shape[1], block_table.stride(0),
            page_size, 2 * num_kv_heads * head, head, 1, page_size, head_dim,
            scale, schedule.kv_block, schedule.kv_partition, tile, int(is_bf16), first, last,
        )  # fmt: skip

    _over_heads(heads, q_TND, num_kv_heads, block_table.shape[1] * page_size)
    return out
