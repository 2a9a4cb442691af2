"""What every form of the gated delta rule accepts: the checks that its implementations run first.

Shapes: T tokens, C channels, V value heads, W taps of the convolution, N sequences, R requests, P pages, B pages of one
request.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads

DTYPES = (torch.float32, torch.bfloat16)
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""x [T, C], a and b [T, V], conv [C, W], a_log and dt_bias [V], all of the model's dtype."""
Batch = tuple[Tensor, Tensor, Tensor]
"""block_table [R, B], query_start [R + 1] and seq_lens [R], all int32."""
StateShapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""(shape, dtype) of each state tensor of one page."""


def check_dtype(op: str, name: str, dtype: torch.dtype) -> None:
    """Refuse (TypeError) what is neither float32 nor bfloat16."""
    if dtype not in DTYPES:
        raise TypeError(f"{op}: {name} is {dtype}, neither torch.float32 nor torch.bfloat16")


def check_conv_width(op: str, conv_width: int) -> None:
    """Refuse (ValueError) a convolution that looks at no earlier row."""
    if conv_width < 2:
        raise ValueError(f"{op}: a conv width of {conv_width} has no earlier row; it is at least 2")


def check_rows(op: str, rows: Operands, heads: GdnHeads) -> None:
    """Refuse (TypeError, ValueError) operands that do not fit the heads or each other."""
    x_TC, a_TV, b_TV, conv_CW, a_log_V, dt_bias_V = rows
    check_dtype(op, "x", x_TC.dtype)
    count = x_TC.shape[0] if x_TC.dim() else 0
    values, channels = heads.num_value_heads, heads.channels
    if conv_CW.dim() != 2:
        raise ValueError(f"{op}: conv {tuple(conv_CW.shape)} is not [channels, taps]")
    check_conv_width(op, conv_CW.shape[1])
    for name, t, shape in (
        ("x", x_TC, (count, channels)),
        ("a", a_TV, (count, values)),
        ("b", b_TV, (count, values)),
        ("conv", conv_CW, (channels, conv_CW.shape[1])),
        ("a_log", a_log_V, (values,)),
        ("dt_bias", dt_bias_V, (values,)),
    ):
        if t.shape != shape:
            raise ValueError(f"{op}: {name} is {tuple(t.shape)}, but {count} rows of {heads} need {shape}")
        if t.dtype != x_TC.dtype:
            raise TypeError(f"{op}: {name} is {t.dtype} and x {x_TC.dtype}; all have one dtype")
        if t.device != x_TC.device:
            raise ValueError(f"{op}: {name} is on {t.device} and x on {x_TC.device}; move it to x's device")


def check_packed(op: str, rows: Operands, cu_seqlens: Tensor, heads: GdnHeads) -> None:
    """Refuse (TypeError, ValueError) rows that do not fit, or bounds that do not cut them into sequences."""
    check_rows(op, rows, heads)
    bounds, num_tokens = cu_seqlens.tolist(), rows[0].shape[0]
    if not bounds or bounds[0] != 0 or bounds[-1] != num_tokens or bounds != sorted(bounds):
        raise ValueError(f"{op}: cu_seqlens {bounds} does not cut {num_tokens} tokens into sequences")


@cache
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def check_states(op: str, states: Sequence[Tensor], expected: StateShapes) -> int:
    """The number of pages P; refuses (TypeError, ValueError) states other than [P, *shape] with contiguous pages."""
    if len(states) != len(expected):
        raise ValueError(f"{op}: {len(states)} states were given, but a page has {len(expected)}: {expected}")
    num_pages = states[0].shape[0]
    for i, (state, (shape, dtype)) in enumerate(zip(states, expected, strict=True)):
        if state.shape != (num_pages, *shape):
            raise ValueError(f"{op}: state {i} is {tuple(state.shape)}, but {num_pages} pages need {shape} each")
        if state.dtype is not dtype:
            raise TypeError(f"{op}: state {i} is {state.dtype}, not {dtype}")
        if state.stride()[1:] != _strides(shape) and not state[:1].is_contiguous():
            raise ValueError(f"{op}: state {i} has strides {state.stride()}, but a page of it is not contiguous")
    return num_pages


def check_paged(
    op: str,
    rows: Operands,
    states: Sequence[Tensor],
    expected: StateShapes,
    batch: Batch,
    page_size: int,
    chunk: int,
    out: Tensor | None,
    heads: GdnHeads,
) -> int:
    """The number of pages P; refuses (TypeError, ValueError) rows, states or a batch of undefined shapes and types.

    Values of tensors are not read: see `raise_for`.
    """
    check_rows(op, rows, heads)
    for name, t in zip(("block_table", "query_start", "seq_lens"), batch, strict=True):
        if t.dtype != torch.int32:
            raise TypeError(f"{op}: {name} is {t.dtype}, not torch.int32")
    if page_size <= 0 or page_size % chunk:
        raise ValueError(f"{op}: page size {page_size} is not a multiple of schedule.gdn_chunk {chunk}")
    block_table, query_start, seq_lens = batch
    num = seq_lens.shape[0]
    if query_start.shape != (num + 1,) or block_table.dim() != 2 or block_table.shape[0] < num:
        raise ValueError(
            f"{op}: query_start {tuple(query_start.shape)}, seq_lens {tuple(seq_lens.shape)} and block_table "
            f"{tuple(block_table.shape)} disagree on the number of requests"
        )
    x, shape = rows[0], (rows[0].shape[0], heads.num_value_heads, heads.value_width)
    if out is not None and (out.shape != shape or out.dtype != x.dtype or not out.is_contiguous()):
        raise ValueError(f"{op}: out {tuple(out.shape)} {out.dtype} is not a contiguous {shape} {x.dtype}")
    return check_states(op, states, expected)


BAD_ROWS, BAD_LENGTH, BAD_PAGE = 1, 2, 3
"""What a check of values finds, plus 4 * request; 0 is nothing."""


def raise_for(op: str, code: int) -> None:
    """Say (ValueError) what a check of a batch's values found."""
    reasons = {
        BAD_ROWS: "query_start and seq_lens do not place its rows",
        BAD_LENGTH: "block_table has too few pages for its length",
        BAD_PAGE: "block_table names a page outside the states",
    }
    if code:
        raise ValueError(f"{op}: request {code >> 2}: {reasons[code & 3]}")
