"""The row-causal gated delta rule in eager PyTorch: the definition of the order of its arithmetic.

A sequence is cut into chunks of `schedule.gdn_chunk` tokens from its start. Rows are made as `numeric.gdn_rows` states,
a chunk's v_new and its chain as `numeric.gdn_chunk` does. Then, for a row t and its value head, narrow to the model's
dtype and every product and sum rounded to fp32:

    o_t = (exp(G_t) * scale) * (q_t S0) + narrow((exp(G_t - G_s) * (q_t . k_s)) * scale)_{s <= t} v_new

with scale = Dk**-0.5, sums ascending from +0, rounded once to the dtype. What must stay equal: o_t and every state
depend on rows up to t of that sequence and on the schedule, never on other rows, on pages, on heads beside it, or on
where a prefill was cut; a decode step computes one row of the same chunk.

Shapes: T tokens, C channels, K key heads, V value heads, D their widths, W taps, R requests, B pages of one, n rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from skyrl_isoexec.kernels.gdn.spec import CHAIN, CONV, DECAY, DECAYED, FRESH, INVERSE, KEYS, OP, VALUES, gdn_states
from skyrl_isoexec.kernels.numeric.gdn_backward import differentiable
from skyrl_isoexec.kernels.numeric.gdn_checks import Batch, Operands, check_packed, check_paged, raise_for
from skyrl_isoexec.kernels.numeric.gdn_chunk import Chunk, by_value_head, close, decays, extend, ordered
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.kernels.numeric.gdn_rows import Rows, prepare
from skyrl_isoexec.kernels.numeric.gdn_walk import carry, check_values, packed, segments, slide
from skyrl_isoexec.kernels.numeric.reference import exp, narrow
from skyrl_isoexec.schedule import Schedule

__all__ = ["gdn", "gdn_paged", "gdn_states"]


def chunk_of(states: Sequence[Tensor], page: int) -> Chunk:
    """The open chunk of a page."""
    return Chunk(
        keys_KDC=states[KEYS][page],
        decay_VC=states[DECAY][page],
        values_VCD=states[VALUES][page],
        decayed_VCD=states[DECAYED][page],
        inverse_VCC=states[INVERSE][page],
        fresh_VCD=states[FRESH][page],
    )


def outputs(chunk: Chunk, first: int, rows: Rows, snapshot_VDD: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 [V, n, D] of rows first, first + 1, ... of a chunk that has been extended by them."""
    stop, group = first + rows.g_nV.shape[0], rows.g_nV.shape[1] // rows.k_nKD.shape[1]
    scale = torch.tensor(rows.q_nKD.shape[2] ** -0.5, dtype=torch.float32)
    q_VMD = by_value_head(rows.q_nKD, group)
    keys_VDS = chunk.keys_KDC[:, :, :stop].repeat_interleave(group, 0)
    scores = narrow((decays(chunk, first, stop) * ordered(q_VMD, keys_VDS)) * scale, dtype).float()
    inside = ordered(scores, chunk.fresh_VCD[:, :stop], first)
    return (exp(chunk.decay_VC[:, first:stop, None]) * scale) * ordered(q_VMD, snapshot_VDD) + inside


def _advance(
    rows: Operands,
    states: Sequence[Tensor],
    batch: Batch,
    page_size: int,
    out: Tensor,
    heads: GdnHeads,
    schedule: Schedule,
) -> None:
    """Every segment of a batch in turn, each request's in ascending order."""
    raise_for(OP, check_values(batch, page_size, states[0].shape[0], rows[0].shape[0]))
    x_TC, a_TV, b_TV, *parameters = rows
    dtype, chunk_size = x_TC.dtype, schedule.gdn_chunk
    for segment in segments(batch, page_size, chunk_size):
        at, first = segment.rows, segment.offset(chunk_size)
        window_NC = slide(carry(states[CONV], segment), x_TC[at])
        made = prepare(window_NC, a_TV[at], b_TV[at], *parameters, heads)
        chain_VDD, chunk = carry(states[CHAIN], segment), chunk_of(states, segment.page)
        snapshot_VDD = narrow(chain_VDD, dtype).float()
        extend(chunk, first, made, snapshot_VDD, dtype)
        out[at] = narrow(outputs(chunk, first, made, snapshot_VDD, dtype), dtype).transpose(0, 1)
        if first + at.stop - at.start == chunk_size:
            close(chunk, chain_VDD, dtype)


def _forward(rows: Operands, cu_seqlens: Tensor, heads: GdnHeads, schedule: Schedule) -> Tensor:
    check_packed(OP, rows, cu_seqlens, heads)
    shapes = gdn_states(heads, rows[3].shape[1], rows[0].dtype, schedule=schedule)
    return packed(partial(_advance, heads=heads, schedule=schedule), rows, shapes, cu_seqlens, heads)


def gdn(
    x_TC: Tensor,
    a_TV: Tensor,
    b_TV: Tensor,
    conv_CW: Tensor,
    a_log_V: Tensor,
    dt_bias_V: Tensor,
    cu_seqlens: Tensor,
    heads: GdnHeads,
    *,
    schedule: Schedule,
) -> Tensor:
    """o [T, V, D] of packed sequences, in x's dtype; differentiable. See `gdn_checks.check_packed` for refusals."""
    rows = (x_TC, a_TV, b_TV, conv_CW, a_log_V, dt_bias_V)
    return differentiable(_forward, rows, cu_seqlens, heads, schedule)


def gdn_paged(
    x_TC: Tensor,
    a_TV: Tensor,
    b_TV: Tensor,
    conv_CW: Tensor,
    a_log_V: Tensor,
    dt_bias_V: Tensor,
    states: Sequence[Tensor],
    block_table_RB: Tensor,
    query_start_R1: Tensor,
    seq_lens_R: Tensor,
    page_size: int,
    heads: GdnHeads,
    out: Tensor | None = None,
    *,
    schedule: Schedule,
) -> Tensor:
    """o [T, V, D] of the last rows of each request, whose states go on in their pages.

    Rows past query_start[-1] are padding: `out` keeps what it had there, or is zero. See `gdn_checks.check_paged` and
    `gdn_checks.raise_for` for what is refused.
    """
    rows, batch = (x_TC, a_TV, b_TV, conv_CW, a_log_V, dt_bias_V), (block_table_RB, query_start_R1, seq_lens_R)
    shapes = gdn_states(heads, conv_CW.shape[-1], x_TC.dtype, schedule=schedule)
    check_paged(OP, rows, states, shapes, batch, page_size, schedule.gdn_chunk, out, heads)
    if out is None:
        out = x_TC.new_zeros(x_TC.shape[0], heads.num_value_heads, heads.value_width)
    _advance(rows, states, batch, page_size, out, heads, schedule)
    return out
