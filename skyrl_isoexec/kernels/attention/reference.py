"""Causal attention in eager PyTorch: the definition of the order of its arithmetic.

Every product and every sum below rounds separately to fp32; bf16 inputs are widened exactly and the result is rounded
once. What must stay equal: the output bits of a query row depend on that row, on the keys and values at positions 0..t
of its sequence and on the schedule, never on other rows, on pages, or on where a prefill was cut.

Order, for one query row at position t and one query head:

1. score_j = (((0 + q_0 k_j0) + q_1 k_j1) + ...) * scale, head dimension ascending, one accumulator.
2. Positions are cut from the sequence's start into partitions of `kv_partition`, partitions into blocks of `kv_block`.
   Blocks ascend inside a partition with running (maximum m, 16 lane sums, accumulator of D):
   m' = max(m, block's scores); lanes and accumulator are multiplied by exp(m - m'); then for j ascending from the
   block's start, p_j = exp(score_j - m'), lane[j % 16] += p_j, accumulator += p_j * v_j. A maximum of -inf counts as 0
   in the two exponents.
3. A partition's sum is the balanced tree over its 16 lanes.
4. Partitions merge ascending, the first one as it is: M' = max(M, m), x = exp(M - M'), y = exp(m - M'),
   L = L * x + l * y, A = A * x + a * y. The output is A / L.

Positions after t do not exist: they are skipped, not multiplied by zero, so that memory never written cannot matter. A
NaN result is the one quiet NaN 0x7fc00000 (0x7fc0 in bf16).

Shapes: T tokens, N query heads, K key-value heads, D head dimension, C context, R requests.
"""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.attention import spec
from skyrl_isoexec.kernels.attention.backward import differentiable
from skyrl_isoexec.kernels.attention.spec import kv_cache_shape
from skyrl_isoexec.kernels.numeric import NUM_LANES, exp, lane_tree, narrow
from skyrl_isoexec.schedule import Schedule

__all__ = ["attention", "attention_paged", "kv_cache_shape", "write_kv"]

NEG_INF = float("-inf")


def scores(q_TND: Tensor, k_CND: Tensor, scale: float) -> Tensor:
    """fp32 scores [T, N, C]: head dimension ascending, then times the scale."""
    k_DNC = k_CND.permute(2, 1, 0)
    total_TNC = torch.zeros(*q_TND.shape[:2], k_CND.shape[0])
    for d in range(q_TND.shape[2]):
        total_TNC = total_TNC + q_TND[:, :, d, None] * k_DNC[d]
    return total_TNC * torch.tensor(scale, dtype=torch.float32)


def _new_maximum(old: Tensor, scores_: Tensor) -> tuple[Tensor, Tensor]:
    """The larger maximum, and what is subtracted in exponents (0 where that maximum is -inf)."""
    new = torch.maximum(old, scores_)
    return new, torch.where(new == NEG_INF, torch.zeros(()), new)


def partition(s_TNC: Tensor, v_CND: Tensor, seen_TC: Tensor, kv_block: int) -> tuple[Tensor, Tensor, Tensor]:
    """One partition of C positions: (maximum [T, N], sum [T, N], accumulator [T, N, D]), not yet divided."""
    num_rows, num_heads, context = s_TNC.shape
    m = torch.full((num_rows, num_heads), NEG_INF)
    lanes = torch.zeros(num_rows, num_heads, NUM_LANES)
    acc = torch.zeros(num_rows, num_heads, v_CND.shape[2])
    s_TNC = torch.where(seen_TC[:, None], s_TNC, NEG_INF)
    for start in range(0, context, kv_block):
        stop = min(start + kv_block, context)
        new, base = _new_maximum(m, s_TNC[:, :, start:stop].amax(-1))
        alpha = exp(m - base)
        lanes, acc, m = lanes * alpha[..., None], acc * alpha[..., None], new
        for j in range(start, stop):
            seen = seen_TC[:, j, None]
            p = exp(s_TNC[:, :, j] - base)
            lane = (j - start) % NUM_LANES
            lanes[:, :, lane] = torch.where(seen, lanes[:, :, lane] + p, lanes[:, :, lane])
            acc = torch.where(seen[..., None], acc + p[..., None] * v_CND[j], acc)
    return m, lane_tree(lanes), acc


def attend(q_TND: Tensor, k_CKD: Tensor, v_CKD: Tensor, scale: float, schedule: Schedule) -> tuple[Tensor, Tensor]:
    """Rows at the last T of C positions: fp32 (output [T, N, D], log of the softmax denominator [T, N])."""
    num_rows, num_heads, _ = q_TND.shape
    context = k_CKD.shape[0]
    group = num_heads // k_CKD.shape[1]
    k_CND, v_CND = (x.float().repeat_interleave(group, 1) for x in (k_CKD, v_CKD))
    row_position = torch.arange(context - num_rows, context)
    s_TNC = scores(q_TND.float(), k_CND, scale)
    M = L = A = None
    for start in range(0, context, schedule.kv_partition):
        stop = min(start + schedule.kv_partition, context)
        seen_TC = torch.arange(start, stop) <= row_position[:, None]
        m, l, a = partition(s_TNC[:, :, start:stop], v_CND[start:stop], seen_TC, schedule.kv_block)
        if M is None:
            M, L, A = m, l, a
            continue
        new, base = _new_maximum(M, m)
        x, y = exp(M - base), exp(m - base)
        reached = seen_TC[:, :1]
        L = torch.where(reached, L * x + l * y, L)
        A = torch.where(reached[..., None], A * x[..., None] + a * y[..., None], A)
        M = torch.where(reached, new, M)
    out = A / L[..., None]
    return torch.where(out.isnan(), torch.tensor(float("nan")), out), M + L.log()


def _forward(
    q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, scale: float, schedule: Schedule
) -> tuple[Tensor, Tensor]:
    spec.check_rows(q_TND, k_TKD, v_TKD, cu_seqlens, schedule)
    out, lse = torch.empty_like(q_TND), torch.empty(q_TND.shape[:2])
    bounds = cu_seqlens.tolist()
    for lo, hi in zip(bounds[:-1], bounds[1:], strict=True):
        if hi > lo:
            o, lse[lo:hi] = attend(q_TND[lo:hi], k_TKD[lo:hi], v_TKD[lo:hi], scale, schedule)
            out[lo:hi] = narrow(o, q_TND.dtype)
    return out, lse


def attention(
    q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor, scale: float, *, schedule: Schedule
) -> Tensor:
    """Causal attention over packed sequences; differentiable. See `spec.check_rows` for what is refused."""
    return differentiable(_forward, q_TND, k_TKD, v_TKD, cu_seqlens, scale, schedule)


def write_kv(k_TKD: Tensor, v_TKD: Tensor, cache: Tensor, slots_T: Tensor) -> None:
    """Store each row at slot page * page_size + offset; rows with a negative slot are skipped."""
    spec.check_write(k_TKD, v_TKD, cache, slots_T)
    keys, values = spec.planes(cache)
    page_size = cache.shape[4]
    if slots_T.numel() and int(slots_T.max()) >= cache.shape[0] * page_size:
        raise ValueError(f"attention: slot {int(slots_T.max())} lies outside {cache.shape[0]} pages of {page_size}")
    for t, slot in enumerate(slots_T.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, page_size)
            keys[page, :, :, offset] = k_TKD[t]
            values[page, :, offset] = v_TKD[t]


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
    """Causal attention of the last rows of each request over its pages: gather, then the same order."""
    spec.check_paged(q_TND, cache, block_table, query_start, seq_lens, out, schedule)
    out = torch.zeros_like(q_TND) if out is None else out
    keys, values = spec.planes(cache)
    starts = query_start.tolist()
    for r, length in enumerate(seq_lens.tolist()):
        lo, hi = starts[r], starts[r + 1]
        if hi == lo:
            continue
        pages = block_table[r, : spec.cdiv(length, cache.shape[4])].long()
        k_CKD = keys[pages].permute(0, 3, 1, 2).flatten(0, 1)[:length]
        v_CKD = values[pages].permute(0, 2, 1, 3).flatten(0, 1)[:length]
        out[lo:hi] = narrow(attend(q_TND[lo:hi], k_CKD, v_CKD, scale, schedule)[0], q_TND.dtype)
    return out
