"""How every form of a gated delta rule is called on Hopper: checks, which requests take which kernels, autograd.

Shapes: T tokens, C channels, V value heads, Dv their width, R requests, B pages of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric import gdn_checks
from skyrl_isoexec.kernels.numeric.gdn_checks import Batch, Operands, StateShapes
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.kernels.numeric.sm90 import require, require_bf16
from skyrl_isoexec.kernels.numeric.sm90_gdn_backward import Kept, differentiable
from skyrl_isoexec.kernels.numeric.sm90_gdn_slots import (
    Pages,
    Slots,
    check_shapes,
    is_captured,
    packed_slots,
    paged_slots,
)

Chunks = Callable[[Operands, Slots, Pages | None, GdnHeads, int, Tensor], Kept]
"""(rows, slots, pages, heads, chunk, out): writes o of all slots, and with pages what open chunks leave in them."""
Step = Callable[[Operands, Tensor, Tensor, Pages, GdnHeads, int, Tensor, bool], None]
"""(rows, query_start, seq_lens, pages, heads, chunk, out, alone): requests with one row, in one launch."""


def check_states(op: str, heads: GdnHeads, conv_width: int, dtype: torch.dtype, chunk: int) -> None:
    """Refuse (TypeError, ValueError) a dtype, a convolution, widths or a chunk that the kernels do not have."""
    if dtype != torch.bfloat16:
        raise TypeError(f"{op}: the sm90 implementation takes bfloat16, not {dtype}: Hopper has no exact fp32 dot")
    gdn_checks.check_conv_width(op, conv_width)
    check_shapes(op, heads, chunk)
    if conv_width > 1 + min(heads.key_width, chunk):
        raise ValueError(f"{op}: a conv width of {conv_width} reaches past the chunk of {chunk} before a row's own")


def _operands(op: str, rows: Operands) -> Operands:
    require_bf16(op, *rows)
    return tuple(x.contiguous() for x in rows)


def packed(
    op: str, rows: Operands, cu_seqlens: Tensor, heads: GdnHeads, chunk: int, chunks: Chunks
) -> Tensor:  # fmt: skip
    """o [T, V, Dv] of packed sequences; differentiable. Values of `cu_seqlens` are not read."""
    gdn_checks.check_rows(op, rows, heads)
    check_states(op, heads, rows[3].shape[1], rows[0].dtype, chunk)
    require(op, cu_seqlens)

    def forward(
        rows: Operands, cu_seqlens: Tensor, heads: GdnHeads, chunk: int
    ) -> tuple[Tensor, Kept | None, Slots | None]:
        x = rows[0]
        out = x.new_empty(x.shape[0], heads.num_value_heads, heads.value_width)
        if not x.shape[0]:
            return out, None, None
        slots = packed_slots(cu_seqlens, x.shape[0], chunk)
        return out, chunks(rows, slots, None, heads, chunk, out), slots

    return differentiable(forward, _operands(op, rows), cu_seqlens, heads, chunk)


def paged(
    op: str, rows: Operands, states: Sequence[Tensor], shapes: StateShapes, batch: Batch, page_size: int,
    heads: GdnHeads, out: Tensor | None, chunk: int, chunks: Chunks, step: Step,
) -> Tensor:  # fmt: skip
    """o [T, V, Dv] of the last rows of each request: those with one row by `step`, the others by `chunks`.

    In a captured graph a batch of no more rows than requests takes `step` alone, whatever the tables will say.
    """
    x, (table, query_start, seq_lens) = rows[0], batch
    gdn_checks.check_paged(op, rows, states, shapes, batch, page_size, chunk, out, heads)
    require(op, *states, *batch)
    rows = _operands(op, rows)
    if out is None:
        out = x.new_zeros(x.shape[0], heads.num_value_heads, heads.value_width)
    if not x.shape[0] or not seq_lens.shape[0]:
        return out
    pages = Pages(table=table, size=page_size, states=tuple(states))
    alone = x.shape[0] <= seq_lens.shape[0] and is_captured(x)
    slots = None if alone else paged_slots(query_start, seq_lens, x.shape[0], chunk)
    if slots is not None and slots.num:
        chunks(rows, slots, pages, heads, chunk, out)
    step(rows, query_start, seq_lens, pages, heads, chunk, out, alone)
    return out
