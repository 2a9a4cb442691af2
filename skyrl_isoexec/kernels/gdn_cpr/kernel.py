"""The chunkwise-parallel recurrent gated delta rule on Hopper, in Triton and Gluon and bf16.

Notable: the chunk pass is that of the row-causal form; outputs are the recurrence started from each snapshot, parallel
over chunks. A decode step is three launches: the row, the recurrence, and the chunk pass of requests at a chunk's end.
Requests with one row take those, the others the kernels over chunks, with equal bits; while a graph is captured the
choice follows from shapes alone (no more rows than requests), and a request with two rows gets NaN.

| state | shape | dtype | what |
|---|---|---|---|
| conv | [W, C] | bf16 | rows before the convolution, at their position modulo W |
| keys | [K, chunk, Dk] | bf16 | k of the open chunk |
| values | [V, chunk, Dv] | bf16 | v of it |
| snapshot | [V, Dk, Dv] | bf16 | the chain at the start of the open chunk, rounded; not of the first chunk |
| remainder | [V, Dk, Dv] | bf16 | the sixteen bits that the snapshot lacks: no number |
| gates | [V, 2, chunk] | fp32 | sums of g in powers of two, beta |
| recurrent | [V, Dk, Dv] | fp32 | the state after the last row, from the snapshot, never rounded |

Shapes: T tokens, C channels, V value heads, Dv their width, W taps, R requests, B pages of a request, N slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from skyrl_isoexec.kernels.gdn_cpr import triton_recur, warp_recur
from skyrl_isoexec.kernels.numeric.gdn_checks import Operands, StateShapes
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.kernels.numeric.sm90 import EXACT, INTERPRETED
from skyrl_isoexec.kernels.numeric.sm90_gdn_backward import Kept
from skyrl_isoexec.kernels.numeric.sm90_gdn_call import check_states, packed, paged
from skyrl_isoexec.kernels.numeric.sm90_gdn_slots import (
    Pages,
    Slots,
    columns_of,
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
ROWS = (16, 4)
"""Rows and warps of a tile of rows: change no bit."""
CLOSED_COLUMNS, CLOSED_SPAN = 64, 16
"""Columns, and requests, of a program that ends chunks in a decode step: change no bit."""
Split = tuple[int, int, int, int, int]
"""How threads share a state: lanes of Dk, columns of a thread, numbers of a piece, warps, registers. Changes no bit."""
SCAN: Split | None = None if INTERPRETED.value else (2, 2, 16, 4, 168)
STEP: Split | None = None if INTERPRETED.value else (4, 2, 16, 4, 128)
"""None takes Triton's kernels, which run in its interpreter, instead of Gluon's."""
FEW_REGISTERS = 200
"""With fewer, a thread reads keys twice."""


def recurrence(heads: GdnHeads, split: Split | None) -> tuple[ModuleType, int, dict[str, int]]:
    """(whose kernels, columns of a program, its constants and launch options) of a split, cut to fit narrow heads."""
    if split is None:
        return triton_recur, min(32, heads.value_width), {"num_warps": 4}
    lanes, columns, piece, warps, registers = split
    lanes = min(lanes, heads.key_width // 8)
    columns = min(columns, max(1, heads.value_width * lanes // 32))
    wide = 32 // lanes * columns
    warps = min(warps, heads.value_width // wide)
    constants = {"LANES": lanes, "COLUMNS": columns, "P": min(piece, heads.key_width // lanes)}
    return warp_recur, wide * warps, {
        **constants, "AGAIN": registers < FEW_REGISTERS, "num_warps": warps, "maxnreg": registers,
    }  # fmt: skip


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
        ((values, deep, width), torch.float32),
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
    walk: tuple[int, int, int] | None = None, scan: Split | None = SCAN,
) -> Kept:  # fmt: skip
    """Writes o of all slots into `out`, and with pages what open chunks leave in them.

    (columns, warps, stages) of the pass and how the recurrence is split change no bit.
    """
    states, num = (pages.states if pages else (rows[0],) * 7), heads.num_value_heads
    values = states[VALUES] if pages else None
    made = rows_of(rows, slots, pages, states[CONV], states[KEYS], values, states[GATES], heads, chunk, *ROWS)
    inverse, ends = system_of(made, slots, heads, chunk)
    width = columns_of(slots.num_requests * num, heads.value_width, rows[0].device.index)
    walk = walk or (width, 4, 4 if width == 64 else 3)
    errors, snapshots = states_of(
        made, ends, slots, pages, None, states[SNAPSHOT], states[REMAINDER], heads, chunk, walk
    )
    module, columns, options = recurrence(heads, scan)
    table, held = (pages.table if pages else slots.base), states[RECURRENT]
    module.scan[(num * (heads.value_width // columns), slots.num)](
        made.q_NKCD, made.k_NKCD, made.v_NVCD, made.steps_NVC, made.beta_NVC, snapshots, slots.base, slots.owner,
        slots.query_start, slots.seq_lens, table, held, out, heads.key_width**-0.5, slots.num_requests,
        table.stride(0), held.stride(0), BV=columns, PAGED=pages is not None, PAGE=pages.size if pages else 1,
        **options, **shape_constants(heads, chunk), **EXACT,
    )  # fmt: skip
    if pages:
        into = [states[i] for i in (CONV, KEYS, VALUES, GATES)]
        triton_recur.leave[(num + -(-heads.channels // KEPT_CHANNELS), slots.num_requests)](
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
    alone: bool, *, choice: Split | None = STEP,
) -> None:  # fmt: skip
    """One row of each request that has one. `choice` is how the recurrence is split: changes no bit."""
    requests, keys, values, table = seq_lens.shape[0], heads.num_key_heads, heads.num_value_heads, pages.table
    q_RKD = out.new_empty(requests, keys, heads.key_width)
    g_RV = torch.empty(requests, values, dtype=torch.float32, device=out.device)
    shapes, batch = shape_constants(heads, chunk), (table, query_start, seq_lens)
    held = [pages.states[i] for i in (CONV, KEYS, VALUES, SNAPSHOT, REMAINDER, GATES)]
    triton_recur.enter[(keys, requests)](
        *rows, *held, q_RKD, g_RV, *batch, table.stride(0), *(state.stride(0) for state in held),
        W=rows[3].shape[1], PAGE=pages.size, num_warps=2, **shapes, **EXACT,
    )  # fmt: skip
    module, columns, options = recurrence(heads, choice)
    held = [pages.states[i] for i in (KEYS, VALUES, SNAPSHOT, GATES, RECURRENT)]
    module.step[(values * (heads.value_width // columns), requests)](
        q_RKD, g_RV, *held, *batch, out, table.stride(0), *(state.stride(0) for state in held), heads.key_width**-0.5,
        BV=columns, PAGE=pages.size, ALONE=alone, **options, **shapes, **EXACT,
    )  # fmt: skip
    columns = min(CLOSED_COLUMNS, heads.value_width)
    held = [pages.states[i] for i in (KEYS, VALUES, SNAPSHOT, REMAINDER, GATES)]
    triton_recur.close[(values * (heads.value_width // columns), -(-requests // CLOSED_SPAN))](
        *held, *batch, requests, table.stride(0), *(state.stride(0) for state in held),
        BV=columns, PAGE=pages.size, SPAN=CLOSED_SPAN, num_warps=4, **shapes, **EXACT,
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
    choice: Split | None = STEP,
) -> Tensor:
    """o [T, V, Dv] of the last rows of each request, whose states go on in their pages.

    Rows past query_start[-1] are padding: `out` keeps what it had there, or is zero. Refuses what
    `gdn_checks.check_paged` refuses, and fp32; values of tables are not read. `choice` is that of `step`.
    """
    rows, batch = (x_TC, a_TV, b_TV, conv_CW, a_log_V, dt_bias_V), (block_table_RB, query_start_R1, seq_lens_R)
    shapes = gdn_states(heads, conv_CW.shape[-1], x_TC.dtype, schedule=schedule)
    one = partial(step, choice=choice)
    return paged(OP, rows, states, shapes, batch, page_size, heads, out, schedule.gdn_chunk, chunks, one)
