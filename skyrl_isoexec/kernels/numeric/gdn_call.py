"""How every form of a gated delta rule is called on a CPU: checks, the states of packed sequences, autograd, its loop.

Shapes: T tokens, V value heads, D their width, W taps, R requests, B pages of one request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric import gdn_walk
from skyrl_isoexec.kernels.numeric.cpu import require_cpu, scratch
from skyrl_isoexec.kernels.numeric.gdn_backward import differentiable
from skyrl_isoexec.kernels.numeric.gdn_checks import (
    Batch,
    Operands,
    StateShapes,
    check_packed,
    check_paged,
    raise_for,
)
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a form of the rule has of its own."""

    op: str
    """The operator, for what is said about a refusal."""
    states: Callable[..., StateShapes]
    """Its `gdn_states`."""
    loop: Callable[..., int]
    """Its compiled loop, which returns a code of `gdn_checks`."""
    scratch_size: Callable[[GdnHeads, int, int], int]
    """(heads, W, chunk) -> fp32 numbers of scratch that the loop needs."""


def _advance(
    rows: Operands,
    states: Sequence[Tensor],
    batch: Batch,
    page_size: int,
    out: Tensor,
    form: Form,
    heads: GdnHeads,
    schedule: Schedule,
) -> None:
    """Run the loop over what has been checked: it writes states and `out`."""
    rows = tuple(t.contiguous() for t in rows)
    table, starts, lengths = batch
    starts, lengths = starts.contiguous(), lengths.contiguous()
    table = table if table.stride(1) == 1 else table.contiguous()
    taps, chunk = rows[3].shape[1], schedule.gdn_chunk
    code = form.loop(
        *(t.data_ptr() for t in rows), out.data_ptr(), table.data_ptr(), starts.data_ptr(), lengths.data_ptr(),
        scratch(form.scratch_size(heads, taps, chunk)),
        *(state.data_ptr() for state in states), *(state.stride(0) for state in states),
        rows[0].shape[0], lengths.shape[0], states[0].shape[0], table.shape[1], table.stride(0), page_size, chunk,
        heads.num_key_heads, heads.num_value_heads, heads.key_width, heads.value_width, taps,
        heads.key_width**-0.5, int(rows[0].dtype is torch.bfloat16),
    )  # fmt: skip
    raise_for(form.op, code)


def packed(form: Form, rows: Operands, cu_seqlens: Tensor, heads: GdnHeads, schedule: Schedule) -> Tensor:
    """o [T, V, D] of packed sequences; differentiable."""

    def forward(rows: Operands, cu_seqlens: Tensor, heads: GdnHeads, schedule: Schedule) -> Tensor:
        require_cpu(*rows, cu_seqlens)
        check_packed(form.op, rows, cu_seqlens, heads)
        shapes = form.states(heads, rows[3].shape[1], rows[0].dtype, schedule=schedule)
        advance = partial(_advance, form=form, heads=heads, schedule=schedule)
        return gdn_walk.packed(advance, rows, shapes, cu_seqlens, heads)

    return differentiable(forward, rows, cu_seqlens, heads, schedule)


def paged(
    form: Form,
    rows: Operands,
    states: Sequence[Tensor],
    batch: Batch,
    page_size: int,
    heads: GdnHeads,
    out: Tensor | None,
    schedule: Schedule,
) -> Tensor:
    """o [T, V, D] of the last rows of each request, in `out` if there is one."""
    require_cpu(*rows, *states, *batch, out)
    x_TC, *_ = rows
    shapes = form.states(heads, rows[3].shape[-1], x_TC.dtype, schedule=schedule)
    check_paged(form.op, rows, states, shapes, batch, page_size, schedule.gdn_chunk, out, heads)
    if out is None:
        out = x_TC.new_zeros(x_TC.shape[0], heads.num_value_heads, heads.value_width)
    _advance(rows, states, batch, page_size, out, form, heads, schedule)
    return out
