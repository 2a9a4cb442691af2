"""The chunkwise-parallel recurrent gated delta rule on Hopper, in Triton and bf16.

Notable: the chunk pass is that of the row-causal form; outputs are the recurrence started from each snapshot, parallel
over chunks. A decode step is two launches: the recurrence, and the chunk pass of requests at a chunk's end. Requests
with one row take that launch, the others the kernels over chunks, with equal bits; while a graph is captured the choice
follows from shapes alone (no more rows than requests), and a request with two rows gets NaN.

| state | shape | dtype | what |
|---|---|---|---|
| conv | [W, C] | bf16 | rows before the convolution, at their position modulo W |
| keys | [K, chunk, Dk] | bf16 | k of the open chunk |
| values | [V, chunk, Dv] | bf16 | v of it |
| snapshot | [V, Dk, Dv] | bf16 | the chain at the start of the open chunk, rounded; not of the first chunk |
| remainder | [V, Dk, Dv] | bf16 | the sixteen bits that the snapshot lacks: no number |
| gates | [V, 2, chunk] | fp32 | sums of g in powers of two, beta |
| recurrent | [V, Dv, Dk] | fp32 | the state after the last row, from the snapshot, never rounded |

Shapes: T tokens, C channels, V value heads, Dv their width, W taps, R requests, B pages of a request, N slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from skyrl_isoexec.kernels.gdn_cpr import triton_recur as recur
from skyrl_isoexec.kernels.numeric.gdn_checks import Operands, StateShapes
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.kernels.numeric.sm90 import EXACT
from skyrl_isoexec.kernels.numeric.sm90_gdn_backward import Kept
from skyrl_isoexec.kernels.numeric.sm90_gdn_call import check_states, packed, paged
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

OP = "gdn_cpr"
CONV, KEYS, VALUES, SNAPSHOT, REMAINDER, GATES, RECURRENT = range(7)
"""Places in `gdn_states`."""
KEPT_CHANNELS = 1024
"""Channels of a program that keeps rows of the convolution."""
CLOSED_COLUMNS = 64
"""Columns of a program that ends a chunk in a decode step: changes no bit."""


def gdn_states(heads: GdnHeads, conv_width: int, dtype: torch.dtype, *, schedule: Schedule) -> StateShapes:
    """(shape, dtype) of each state tensor of one page, without the dimension of pages.

    TypeError for a model's dtype other than bfloat16, ValueError for widths and chunks that the tiles do not hold.
    """
    chunk = schedule.gdn_chunk
    check_states(OP, heads, conv_width, dtype, chunk)
    keys, values, deep, width = heads.num_key_heads, heads.num_value_heads, heads.key_width, heads.value_width
    return (
        ((conv_width, heads.channels), dtype),
        ((keys, chunk, deep), dtype),
        ((values, chunk, width), dtype),
        ((values, deep, width), dtype),
        ((values, deep, width), dtype),
        ((values, 2, chunk), torch.float32),
        ((values, width, deep), torch.float32),
    )


def live(states: Sequence[Tensor], page: int | Tensor, position: int, schedule: Schedule) -> tuple[Tensor, ...]:
    """What pages that hold the state after `position` > 0 tokens carry; everything else in them may be anything."""
    rows = position % schedule.gdn_chunk
    views = tuple(state[page] for state in states)
    taps = views[CONV].shape[-2]
    found = [views[CONV][..., at % taps, :] for at in range(max(0, position - taps + 1), position)]
    if position >= schedule.gdn_chunk:
        found += [views[SNAPSHOT], views[REMAINDER]]
    if rows:
        found += [*(views[i][..., :rows, :] for i in (KEYS, VALUES)), views[GATES][..., :rows], views[RECURRENT]]
    return tuple(found)


def chunks(
    rows: Operands, slots: Slots, pages: Pages | None, heads: GdnHeads, chunk: int, out: Tensor, *,
    walk: tuple[int, int, int] | None = None, scan: tuple[int, int] = (32, 4),
) -> Kept:  # fmt: skip
    """Writes o of all slots into `out`, and with pages what open chunks leave in them.

    (columns, warps, stages) of the pass and (columns, warps) of the recurrence change no bit.
    """
    states, num = (pages.states if pages else (rows[0],) * 7), heads.num_value_heads
    values = states[VALUES] if pages else None
    made = rows_of(rows, slots, pages, states[CONV], states[KEYS], values, states[GATES], heads, chunk)
    inverse, ends = system_of(made, slots, heads, chunk)
    errors, snapshots = states_of(
        made, ends, slots, pages, None, states[SNAPSHOT], states[REMAINDER], heads, chunk, walk
    )
    columns, warps = min(scan[0], heads.value_width), scan[1]
    table, held = (pages.table if pages else slots.base), states[RECURRENT]
    recur.scan[(num * (heads.value_width // columns), slots.num)](
        made.q_NKCD, made.k_NKCD, made.v_NVCD, made.steps_NVC, made.beta_NVC, snapshots, slots.base, slots.owner,
        slots.query_start, slots.seq_lens, table, held, out, heads.key_width**-0.5, slots.num_requests,
        table.stride(0), held.stride(0), BV=columns, PAGED=pages is not None, PAGE=pages.size if pages else 1,
        num_warps=warps, **shape_constants(heads, chunk), **EXACT,
    )  # fmt: skip
    if pages:
        into = [states[i] for i in (CONV, KEYS, VALUES, GATES)]
        recur.leave[(num + -(-heads.channels // KEPT_CHANNELS), slots.num_requests)](
            rows[0], made.k_NKCD, made.v_NVCD, made.decay_NVC, made.beta_NVC, slots.base, slots.query_start,
            slots.seq_lens, table, *into, table.stride(0), *(state.stride(0) for state in into),
            W=rows[3].shape[1], CHANNELS=KEPT_CHANNELS, PAGE=pages.size, num_warps=4,
            **shape_constants(heads, chunk), **EXACT,
        )  # fmt: skip
    return Kept(
        q_NKCD=made.q_NKCD, k_NKCD=made.k_NKCD, decay_NVC=made.decay_NVC, beta_NVC=made.beta_NVC,
        inverse_NVCC=inverse, errors_NVCD=errors, snapshots_NVDD=snapshots,
    )  # fmt: skip


def step(
    rows: Operands, query_start: Tensor, seq_lens: Tensor, pages: Pages, heads: GdnHeads, chunk: int, out: Tensor,
    alone: bool, *, choice: tuple[int, int] = (32, 4),
) -> None:  # fmt: skip
    """One row of each request that has one. `choice` is (columns of a program, warps): changes no bit."""
    columns, warps = min(choice[0], heads.value_width), choice[1]
    recur.step[(heads.num_value_heads * (heads.value_width // columns), seq_lens.shape[0])](
        *rows, *pages.states, pages.table, query_start, seq_lens, out, pages.table.stride(0),
        *(state.stride(0) for state in pages.states), heads.key_width**-0.5,
        W=rows[3].shape[1], BV=columns, PAGE=pages.size, ALONE=alone, num_warps=warps,
        **shape_constants(heads, chunk), **EXACT,
    )  # fmt: skip
    columns = min(CLOSED_COLUMNS, heads.value_width)
    held = [pages.states[i] for i in (KEYS, VALUES, SNAPSHOT, REMAINDER, GATES)]
    recur.close[(heads.num_value_heads * (heads.value_width // columns), seq_lens.shape[0])](
        *held, pages.table, query_start, seq_lens, pages.table.stride(0), *(state.stride(0) for state in held),
        BV=columns, PAGE=pages.size, num_warps=4, **shape_constants(heads, chunk), **EXACT,
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
    choice: tuple[int, int] = (32, 4),
) -> Tensor:
    """o [T, V, Dv] of the last rows of each request, whose states go on in their pages.

    Rows past query_start[-1] are padding: `out` keeps what it had there, or is zero. Refuses what
    `gdn_checks.check_paged` refuses, and fp32; values of tables are not read. `choice` is that of `step`.
    """
    rows, batch = (x_TC, a_TV, b_TV, conv_CW, a_log_V, dt_bias_V), (block_table_RB, query_start_R1, seq_lens_R)
    shapes = gdn_states(heads, conv_CW.shape[-1], x_TC.dtype, schedule=schedule)
    one = partial(step, choice=choice)
    return paged(OP, rows, states, shapes, batch, page_size, heads, out, schedule.gdn_chunk, chunks, one)
