"""Multi-head latent attention in eager PyTorch: the definition of the order of its arithmetic.

The latent form of DeepSeek-V2 (arXiv 2405.04434, section 2.1), in every case: with W_uk and W_uv the key and the value
rows of `kv_b_proj` of a head (transformers, Glm4MoeLiteAttention),

    q_nope . (W_uk latent) = (q_nope W_uk) . latent        and        sum p (W_uv latent) = W_uv (sum p latent),

so all heads share one key per position, c = (normed latent | rotated part), and the value is the first L entries of it.
`head_linear` applies W_uk to a query before, and W_uv to the result after, the attention.

Every product and every sum below rounds separately to fp32; bf16 inputs are widened exactly and a result is rounded
once. What must stay equal: the output bits of a query row depend on that row, on the keys at positions 0..t of its
sequence and on the schedule, never on other rows, other heads, pages, or on where a prefill was cut.

`head_linear`: y = ((+0 + x_0 w_0) + x_1 w_1) + ..., k ascending: a linear of each head.

`mla`, for one query row at position t and one query head:

1. score_j = (((0 + q_0 c_j0) + q_1 c_j1) + ...) * scale over all Q entries, ascending, one accumulator.
2. Positions are cut from the sequence's start into partitions of `kv_partition`, partitions into blocks of `kv_block`.
   Blocks ascend inside a partition with running (maximum m, 16 lane sums, accumulator of L):
   m' = max(m, block's scores); lanes and accumulator are multiplied by exp(m - m'); then for j ascending from the
   block's start, p_j = exp(score_j - m'), lane[j % 16] += p_j, accumulator += p_j * c_j. A maximum of -inf counts as 0
   in the two exponents.
3. A partition's sum is the balanced tree over its 16 lanes.
4. Partitions merge ascending, the first one as it is: M' = max(M, m), x = exp(M - M'), y = exp(m - M'),
   D = D * x + d * y, A = A * x + a * y. The output is A / D.

Positions after t do not exist: they are skipped, not multiplied by zero, so that memory never written cannot matter. A
NaN result is the one quiet NaN 0x7fc00000 (0x7fc0 in bf16).

Shapes: T tokens, N query heads of a rank, L latent rank, Q = L + width of the rotated part, K and M input and output
features of a head, C context, R requests.
"""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.mla import spec
from skyrl_isoexec.kernels.mla.backward import differentiable
from skyrl_isoexec.kernels.mla.spec import mla_cache_shape
from skyrl_isoexec.kernels.numeric import NUM_LANES, dot, exp, lane_tree, narrow
from skyrl_isoexec.schedule import Schedule

__all__ = ["head_linear", "mla", "mla_cache_shape", "mla_paged", "write_latent"]

NEG_INF = float("-inf")


def head_linear(x_TNK: Tensor, w_NMK: Tensor) -> Tensor:
    """y_TNM: head n's rows times its own weight, rounded once to x's dtype; differentiable. See `spec.check_heads`."""
    spec.check_heads(x_TNK, w_NMK)
    heads = zip(x_TNK.unbind(1), w_NMK.unbind(0), strict=True)
    return torch.stack([narrow(dot(x_TK.float(), w_MK.float()), x_TNK.dtype) for x_TK, w_MK in heads], 1)


def scores(q_TNQ: Tensor, c_CQ: Tensor, scale: float) -> Tensor:
    """fp32 scores [T, N, C]: entries of the key ascending, then times the scale."""
    total_TNC = torch.zeros(*q_TNQ.shape[:2], c_CQ.shape[0])
    for i in range(q_TNQ.shape[2]):
        total_TNC = total_TNC + q_TNQ[:, :, i, None] * c_CQ[:, i]
    return total_TNC * torch.tensor(scale, dtype=torch.float32)


def _new_maximum(old: Tensor, scores_: Tensor) -> tuple[Tensor, Tensor]:
    """The larger maximum, and what is subtracted in exponents (0 where that maximum is -inf)."""
    new = torch.maximum(old, scores_)
    return new, torch.where(new == NEG_INF, torch.zeros(()), new)


def partition(s_TNC: Tensor, v_CL: Tensor, seen_TC: Tensor, kv_block: int) -> tuple[Tensor, Tensor, Tensor]:
    """One partition of C positions: (maximum [T, N], sum [T, N], accumulator [T, N, L]), not yet divided."""
    num_rows, num_heads, context = s_TNC.shape
    m = torch.full((num_rows, num_heads), NEG_INF)
    lanes = torch.zeros(num_rows, num_heads, NUM_LANES)
    acc = torch.zeros(num_rows, num_heads, v_CL.shape[1])
    s_TNC = torch.where(seen_TC[:, None], s_TNC, NEG_INF)
    for start in range(0, context, kv_block):
        stop = min(start + kv_block, context)
        new, base = _new_maximum(m, s_TNC[:, :, start:stop].amax(-1))
        alpha = exp(m - base)
        lanes, acc, m = lanes * alpha[..., None], acc * alpha[..., None], new
        p_TNB = exp(s_TNC[:, :, start:stop] - base[..., None])
        for j in range(start, stop):
            seen, p, lane = seen_TC[:, j, None], p_TNB[:, :, j - start], (j - start) % NUM_LANES
            lanes[:, :, lane] = torch.where(seen, lanes[:, :, lane] + p, lanes[:, :, lane])
            acc = torch.where(seen[..., None], acc + p[..., None] * v_CL[j], acc)
    return m, lane_tree(lanes), acc


def merge(whole: tuple[Tensor, ...], part: tuple[Tensor, ...], reached: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(maximum, sum, accumulator) with one more partition, for the rows that reached it."""
    (M, D, A), (m, d, a) = whole, part
    new, base = _new_maximum(M, m)
    x, y = exp(M - base), exp(m - base)
    D = torch.where(reached, D * x + d * y, D)
    A = torch.where(reached[..., None], A * x[..., None] + a * y[..., None], A)
    return torch.where(reached, new, M), D, A


def attend(q_TNQ: Tensor, c_CQ: Tensor, scale: float, latent: int, schedule: Schedule) -> tuple[Tensor, Tensor]:
    """Rows at the last T of C positions: fp32 (output [T, N, L], log of the softmax denominator [T, N])."""
    num_rows, context = q_TNQ.shape[0], c_CQ.shape[0]
    c_CQ, row_position, whole = c_CQ.float(), torch.arange(context - num_rows, context), None
    s_TNC = scores(q_TNQ.float(), c_CQ, scale)
    for start in range(0, context, schedule.kv_partition):
        stop = min(start + schedule.kv_partition, context)
        seen_TC = torch.arange(start, stop) <= row_position[:, None]
        part = partition(s_TNC[:, :, start:stop], c_CQ[start:stop, :latent], seen_TC, schedule.kv_block)
        whole = part if whole is None else merge(whole, part, seen_TC[:, :1])
    M, D, A = whole
    out = A / D[..., None]
    return torch.where(out.isnan(), torch.tensor(float("nan")), out), M + D.log()


def _forward(
    q_TNQ: Tensor, c_TQ: Tensor, cu_seqlens: Tensor, scale: float, latent: int, schedule: Schedule
) -> tuple[Tensor, Tensor]:
    spec.check_rows(q_TNQ, c_TQ, cu_seqlens, latent, schedule)
    out, lse = q_TNQ.new_empty(*q_TNQ.shape[:2], latent), torch.empty(q_TNQ.shape[:2])
    bounds = cu_seqlens.tolist()
    for lo, hi in zip(bounds[:-1], bounds[1:], strict=True):
        if hi > lo:
            o, lse[lo:hi] = attend(q_TNQ[lo:hi], c_TQ[lo:hi], scale, latent, schedule)
            out[lo:hi] = narrow(o, q_TNQ.dtype)
    return out, lse


def mla(
    q_TNQ: Tensor, c_TQ: Tensor, cu_seqlens: Tensor, scale: float, latent: int, *, schedule: Schedule
) -> Tensor:  # fmt: skip
    """o_TNL of causal latent attention over packed sequences; differentiable. See `spec.check_rows` for refusals."""
    return differentiable(_forward, q_TNQ, c_TQ, cu_seqlens, scale, latent, schedule)


def write_latent(c_TQ: Tensor, cache: Tensor, slots_T: Tensor) -> None:
    """Store each row at slot page * page_size + offset; rows with a negative slot are skipped."""
    spec.check_write(c_TQ, cache, slots_T)
    num_pages, page_size, _ = cache.shape
    if slots_T.numel() and int(slots_T.max()) >= num_pages * page_size:
        raise ValueError(f"mla: slot {int(slots_T.max())} lies outside {num_pages} pages of {page_size}")
    for row_Q, slot in zip(c_TQ, slots_T.tolist(), strict=False):
        if slot >= 0:
            cache[slot // page_size, slot % page_size] = row_Q


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
    """Causal latent attention of the last rows of each request over its pages: gather, then the same order."""
    spec.check_paged(q_TNQ, cache, block_table, query_start, seq_lens, latent, out, schedule)
    out = q_TNQ.new_zeros(*q_TNQ.shape[:2], latent) if out is None else out
    starts = query_start.tolist()
    for r, length in enumerate(seq_lens.tolist()):
        lo, hi = starts[r], starts[r + 1]
        if hi > lo:
            pages = block_table[r, : spec.cdiv(length, cache.shape[1])].long()
            c_CQ = cache[pages].flatten(0, 1)[:length]
            out[lo:hi] = narrow(attend(q_TNQ[lo:hi], c_CQ, scale, latent, schedule)[0], q_TNQ.dtype)
    return out
