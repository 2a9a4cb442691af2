"""The row-causal gated delta rule on Hopper, in Triton and bf16: packed, over pages, and one row of a decode step.

Notable: packed sequences and prefills run four kernels over chunks (rows; the system of a chunk; the pass of states;
the outputs) and, over pages, a fifth that leaves the open chunk. Requests with one row take `triton_step.py` instead,
with equal bits: a batch of such requests is one launch. While a graph is captured that follows from shapes alone (no
more rows than requests), and a request with two rows gets NaN.

A page holds bf16, and fp32 only where rows need it; the state is its snapshot and what that lacks:

| state | shape | dtype | what |
|---|---|---|---|
| conv | [W, C] | bf16 | rows before the convolution, at their position modulo W |
| keys | [K, chunk, Dk] | bf16 | k of the open chunk |
| errors | [V, chunk, Dv] | bf16 | e |
| inverse | [V, chunk + 16, chunk] | bf16 | T; then X of the open block of 16 rows |
| snapshot | [V, Dk, Dv] | bf16 | the state at the start of the open chunk, rounded; not of the first chunk |
| remainder | [V, Dk, Dv] | bf16 | the sixteen bits that the snapshot lacks: no number |
| gates | [V, 2, chunk] | fp32 | sums of g in powers of two, beta |
| blocks | [V, 16, 16] | fp32 | D of the open block, its rows as columns |

Shapes: T tokens, C channels, V value heads, Dv their width, W taps, R requests, B pages of a request, N slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from skyrl_isoexec.kernels.gdn import triton_outputs as outputs
from skyrl_isoexec.kernels.gdn import triton_step as decode
from skyrl_isoexec.kernels.numeric.gdn_checks import Operands, StateShapes
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.kernels.numeric.sm90 import EXACT
from skyrl_isoexec.kernels.numeric.sm90_gdn_backward import Kept
from skyrl_isoexec.kernels.numeric.sm90_gdn_call import check_states, packed, paged
from skyrl_isoexec.kernels.numeric.sm90_gdn_chunk import BLOCK
from skyrl_isoexec.kernels.numeric.sm90_gdn_slots import (
    Pages,
    Slots,
    rows_of,
    shape_constants,
    states_of,
    system_of,
)
from skyrl_isoexec.schedule import Schedule

__all__ = ["gdn", "gdn_paged", "gdn_states"]

OP = "gdn"
CONV, KEYS, ERRORS, INVERSE, SNAPSHOT, REMAINDER, GATES, BLOCKS = range(8)
"""Places in `gdn_states`."""
KEPT_CHANNELS = 1024
"""Channels of a program that keeps rows of the convolution."""
REGISTERS = 168
"""Of a thread of a decode step: three programs then fit into a multiprocessor."""


def gdn_states(heads: GdnHeads, conv_width: int, dtype: torch.dtype, *, schedule: Schedule) -> StateShapes:
    """(shape, dtype) of each state tensor of one page, without the dimension of pages.

    TypeError for a model's dtype other than bfloat16, ValueError for widths and chunks that the tiles do not hold.
    """
    chunk, block = schedule.gdn_chunk, BLOCK.value
    check_states(OP, heads, conv_width, dtype, chunk)
    keys, values, deep, width = heads.num_key_heads, heads.num_value_heads, heads.key_width, heads.value_width
    return (
        ((conv_width, heads.channels), dtype),
        ((keys, chunk, deep), dtype),
        ((values, chunk, width), dtype),
        ((values, chunk + block, chunk), dtype),
        ((values, deep, width), dtype),
        ((values, deep, width), dtype),
        ((values, 2, chunk), torch.float32),
        ((values, block, block), torch.float32),
    )


def live(states: Sequence[Tensor], page: int | Tensor, position: int, schedule: Schedule) -> tuple[Tensor, ...]:
    """What pages that hold the state after `position` > 0 tokens carry; everything else in them may be anything."""
    chunk, block = schedule.gdn_chunk, BLOCK.value
    rows, inner = position % chunk, position % block
    views = tuple(state[page] for state in states)
    taps = views[CONV].shape[-2]
    found = [views[CONV][..., at % taps, :] for at in range(max(0, position - taps + 1), position)]
    if position >= chunk:
        found += [views[SNAPSHOT], views[REMAINDER]]
    if rows:
        found += [views[i][..., :rows, :] for i in (KEYS, ERRORS, INVERSE)] + [views[GATES][..., :rows]]
    if inner:
        found += [views[INVERSE][..., chunk : chunk + inner, :], views[BLOCKS][..., :inner]]
    return tuple(found)


def _attend(kept: Kept, slots: Slots, out: Tensor, heads: GdnHeads, chunk: int, choice: tuple[int, int]) -> None:
    columns, warps = choice
    outputs.attend[(heads.num_value_heads * (heads.value_width // columns), slots.num)](
        kept.q_NKCD, kept.k_NKCD, kept.decay_NVC, kept.inverse_NVCC, kept.errors_NVCD, kept.snapshots_NVDD,
        slots.base, slots.owner, slots.query_start, slots.seq_lens, out, heads.key_width**-0.5, slots.num_requests,
        BV=columns, num_warps=warps, **shape_constants(heads, chunk), **EXACT,
    )  # fmt: skip


def _leave(rows: Operands, kept: Kept, slots: Slots, pages: Pages, heads: GdnHeads, chunk: int) -> None:
    """Rows of the convolution and of open chunks into pages."""
    into = [pages.states[i] for i in (CONV, KEYS, ERRORS, INVERSE, GATES, BLOCKS)]
    columns = -(-heads.channels // KEPT_CHANNELS)
    outputs.leave[(heads.num_value_heads + columns, slots.num_requests)](
        rows[0], kept.k_NKCD, kept.decay_NVC, kept.beta_NVC, kept.errors_NVCD, slots.base, slots.query_start,
        slots.seq_lens, pages.table, *into, pages.table.stride(0), *(state.stride(0) for state in into),
        W=rows[3].shape[1], CHANNELS=KEPT_CHANNELS, PAGE=pages.size, num_warps=4, **shape_constants(heads, chunk),
        **EXACT,
    )  # fmt: skip


def chunks(
    rows: Operands, slots: Slots, pages: Pages | None, heads: GdnHeads, chunk: int, out: Tensor, *,
    tile: tuple[int, int] = (32, 4), system: int = 4, walk: tuple[int, int, int] | None = None,
    attend: tuple[int, int] = (64, 4),
) -> Kept:  # fmt: skip
    """Writes o of all slots into `out`, and with pages what open chunks leave in them.

    (rows, warps) of a tile of rows, warps of the system, (columns, warps, stages) of the pass, (columns, warps) of the
    outputs: they change no bit.
    """
    states = pages.states if pages else (rows[0],) * 8
    made = rows_of(rows, slots, pages, states[CONV], states[KEYS], None, states[GATES], heads, chunk, *tile)
    inverse, ends = system_of(made, slots, heads, chunk, system)
    errors, snapshots = states_of(
        made, ends, slots, pages, states[ERRORS], states[SNAPSHOT], states[REMAINDER], heads, chunk, walk
    )
    kept = Kept(
        q_NKCD=made.q_NKCD, k_NKCD=made.k_NKCD, decay_NVC=made.decay_NVC, beta_NVC=made.beta_NVC,
        inverse_NVCC=inverse, errors_NVCD=errors, snapshots_NVDD=snapshots,
    )  # fmt: skip
    _attend(kept, slots, out, heads, chunk, (min(attend[0], heads.value_width), attend[1]))
    if pages:
        _leave(rows, kept, slots, pages, heads, chunk)
    return kept


def step(
    rows: Operands, query_start: Tensor, seq_lens: Tensor, pages: Pages, heads: GdnHeads, chunk: int, out: Tensor,
    alone: bool, *, choice: tuple[int, int, int] = (128, 4, REGISTERS),
) -> None:  # fmt: skip
    """One row of each request that has one. `choice` is (columns of a program, warps, registers): changes no bit."""
    columns, warps, registers = min(choice[0], heads.value_width), choice[1], choice[2]
    decode.step[(heads.num_value_heads * (heads.value_width // columns), seq_lens.shape[0])](
        *rows, *pages.states, pages.table, query_start, seq_lens, out, pages.table.stride(0),
        *(state.stride(0) for state in pages.states), heads.key_width**-0.5,
        W=rows[3].shape[1], BV=columns, PAGE=pages.size, ALONE=alone, num_warps=warps, maxnreg=registers,
        **shape_constants(heads, chunk), **EXACT,
    )  # fmt: skip


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
    """o [T, V, Dv] of packed sequences; differentiable. Refuses what `gdn_checks.check_rows` refuses, and fp32."""
    rows = (x_TC, a_TV, b_TV, conv_CW, a_log_V, dt_bias_V)
    return packed(OP, rows, cu_seqlens, heads, schedule.gdn_chunk, chunks)


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
    choice: tuple[int, int, int] = (128, 4, REGISTERS),
) -> Tensor:
    """o [T, V, Dv] of the last rows of each request, whose states go on in their pages.

    Rows past query_start[-1] are padding: `out` keeps what it had there, or is zero. Refuses what
    `gdn_checks.check_paged` refuses, and fp32; values of tables are not read. `choice` is that of `step`.
    """
    rows, batch = (x_TC, a_TV, b_TV, conv_CW, a_log_V, dt_bias_V), (block_table_RB, query_start_R1, seq_lens_R)
    shapes = gdn_states(heads, conv_CW.shape[-1], x_TC.dtype, schedule=schedule)
    one = partial(step, choice=choice)
    return paged(OP, rows, states, shapes, batch, page_size, heads, out, schedule.gdn_chunk, chunks, one)
