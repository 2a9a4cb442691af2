"""The chunkwise-parallel recurrent gated delta rule in eager PyTorch: the definition of the order of its arithmetic.

A sequence is cut into chunks of `schedule.gdn_chunk` tokens from its start. Rows are made as `numeric.gdn_rows` states.
Two passes, every product and sum rounded to fp32, sums ascending from +0:

1. The chain: `numeric.gdn_chunk` takes the fp32 chain from a chunk's start to its end, from the snapshot that is the
   chain rounded to the model's dtype. It is done when the chunk's last row is there, in a prefill and in a step alike.
2. Outputs: from the same snapshot, S = S * exp(g_t), d = beta_t * (v_t - k_t S), S = S + k_t d, o_t = (q_t S) * scale,
   with scale = Dk**-0.5, o_t rounded once to the dtype. S stays fp32 within the chunk and is dropped at its end.

What must stay equal: o_t and every state depend on rows up to t of that sequence and on the schedule, never on other
rows, on pages, on heads beside it, or on where a prefill was cut; a decode step is one step of the same recurrence.

Shapes: T tokens, C channels, K key heads, V value heads, D and E their widths (D where both are meant), W taps, R
requests, B pages of one, n rows, L rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from skyrl_isoexec.kernels.gdn_cpr.spec import CHAIN, CONV, GATES, KEYS, OP, RECURRENT, VALUES, gdn_states
from skyrl_isoexec.kernels.numeric.gdn_backward import differentiable
from skyrl_isoexec.kernels.numeric.gdn_checks import Batch, Operands, check_packed, check_paged, raise_for
from skyrl_isoexec.kernels.numeric.gdn_chunk import Chunk, close, extend
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.kernels.numeric.gdn_rows import Rows, prepare
from skyrl_isoexec.kernels.numeric.gdn_walk import carry, check_values, packed, segments, slide
from skyrl_isoexec.kernels.numeric.reference import exp, narrow
from skyrl_isoexec.schedule import Schedule

__all__ = ["gdn", "gdn_paged", "gdn_states"]


def keep(states: Sequence[Tensor], page: int, first: int, rows: Rows) -> None:
    """Rows first, first + 1, ... of a page's open chunk."""
    stop = first + rows.g_nV.shape[0]
    states[KEYS][page][:, :, first:stop] = rows.k_nKD.permute(1, 2, 0)
    states[GATES][page][:, :, first:stop] = torch.stack([rows.g_nV.T, rows.beta_nV.T])
    states[VALUES][page][:, first:stop] = rows.v_nVD.transpose(0, 1)


def advance_chain(states: Sequence[Tensor], page: int, chain_VDD: Tensor, dtype: torch.dtype) -> None:
    """The chain after the whole chunk that a page has kept, in place."""
    keys_KDL, (g_VL, beta_VL), v_VLD = states[KEYS][page], states[GATES][page], states[VALUES][page]
    (num, length, width), key_width = v_VLD.shape, keys_KDL.shape[1]
    k_LKD = keys_KDL.permute(2, 0, 1)
    rows = Rows(q_nKD=k_LKD, k_nKD=k_LKD, v_nVD=v_VLD.transpose(0, 1), g_nV=g_VL.T, beta_nV=beta_VL.T)
    chunk = Chunk(
        keys_KDC=torch.empty_like(keys_KDL),
        decay_VC=torch.empty(num, length),
        values_VCD=torch.empty(num, length, width),
        decayed_VCD=torch.empty(num, length, key_width),
        inverse_VCC=torch.empty(num, length, length),
        fresh_VCD=torch.empty(num, length, width),
    )
    extend(chunk, 0, rows, narrow(chain_VDD, dtype).float(), dtype)
    close(chunk, chain_VDD, dtype)


def times(x_VD: Tensor, state_VDE: Tensor) -> Tensor:
    """fp32 [V, E]: the rows of each head's state, weighted and added in ascending order from +0."""
    total_VE = torch.zeros(state_VDE.shape[0], state_VDE.shape[2])
    for product_VE in (x_VD[:, :, None] * state_VDE).unbind(1):
        total_VE = total_VE + product_VE
    return total_VE


def recur(state_VDE: Tensor, rows: Rows) -> Tensor:
    """fp32 [n, V, E]: the outputs of rows in turn, from the state before them, which becomes that after them."""
    group, outs = rows.g_nV.shape[1] // rows.k_nKD.shape[1], []
    scale = torch.tensor(rows.q_nKD.shape[2] ** -0.5, dtype=torch.float32)
    q_nVD, k_nVD = (x.repeat_interleave(group, 1) for x in (rows.q_nKD, rows.k_nKD))
    for q_VD, k_VD, v_VE, g_V, beta_V in zip(q_nVD, k_nVD, rows.v_nVD, rows.g_nV, rows.beta_nV, strict=True):
        shrunk_VDE = state_VDE * exp(g_V)[:, None, None]
        new_VE = beta_V[:, None] * (v_VE - times(k_VD, shrunk_VDE))
        state_VDE.copy_(shrunk_VDE + k_VD[:, :, None] * new_VE[:, None])
        outs.append(times(q_VD, state_VDE) * scale)
    return torch.stack(outs)


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
        at, page, first = segment.rows, segment.page, segment.offset(chunk_size)
        window_NC = slide(carry(states[CONV], segment), x_TC[at])
        made = prepare(window_NC, a_TV[at], b_TV[at], *parameters, heads)
        chain_VDD, state_VDE = carry(states[CHAIN], segment), states[RECURRENT][page]
        if first == 0:
            state_VDE.copy_(narrow(chain_VDD, dtype))
        keep(states, page, first, made)
        out[at] = narrow(recur(state_VDE, made), dtype)
        if first + at.stop - at.start == chunk_size:
            advance_chain(states, page, chain_VDD, dtype)


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
