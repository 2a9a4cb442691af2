"""How a gated delta rule walks over a batch and the pages of its states, in eager PyTorch.

A sequence is cut into segments: tokens of one step that lie in one chunk, and so in one page. The state after position
p lies in page block_table[r, (p - 1) // page_size]. A segment that starts a page takes what the page before ends with
and leaves that page alone, because other requests may read it. Page size is a multiple of the chunk, so nothing of an
open chunk is live at a page's end.

Shapes: R requests, B pages of one, W taps of the convolution, C channels, n rows of a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.gdn_checks import BAD_LENGTH, BAD_PAGE, BAD_ROWS, Batch, Operands, StateShapes
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads

ONE_PAGE = 1 << 30
"""Page size of packed sequences: none is longer."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tokens of one request that lie in one chunk."""

    rows: slice
    """Where they lie in the batch."""
    first: int
    """Position of the first one in its sequence."""
    page: int
    """The page that holds the state after them."""
    source: int
    """The page that holds the state before them; meaningless at position 0."""

    def offset(self, chunk: int) -> int:
        """Row of the first one in its chunk."""
        return self.first % chunk


def check_values(batch: Batch, page_size: int, num_pages: int, num_tokens: int) -> int:
    """Code (see `gdn_checks.raise_for`) of the first request whose rows or pages lie outside what was given, or 0."""
    block_table_RB, query_start_R1, seq_lens_R = batch
    starts, table = query_start_R1.tolist(), block_table_RB.tolist()
    for r, length in enumerate(seq_lens_R.tolist()):
        lo, hi = starts[r], starts[r + 1]
        if not (0 <= lo <= hi <= num_tokens) or (hi > lo and hi - lo > length):
            return BAD_ROWS + 4 * r
        if hi == lo:
            continue
        last = (length - 1) // page_size
        if last >= block_table_RB.shape[1]:
            return BAD_LENGTH + 4 * r
        first = max(length - (hi - lo) - 1, 0) // page_size
        if not all(0 <= page < num_pages for page in table[r][first : last + 1]):
            return BAD_PAGE + 4 * r
    return 0


def segments(batch: Batch, page_size: int, chunk: int) -> Iterator[Segment]:
    """All segments of a batch, each request's in ascending order."""
    block_table_RB, query_start_R1, seq_lens_R = batch
    starts, table = query_start_R1.tolist(), block_table_RB.tolist()
    for r, length in enumerate(seq_lens_R.tolist()):
        shift = length - starts[r + 1]  # from a token's row to its position
        position = starts[r] + shift
        while position < length and starts[r] < starts[r + 1]:
            stop = min(length, (position // chunk + 1) * chunk)
            yield Segment(
                rows=slice(position - shift, stop - shift),
                first=position,
                page=table[r][position // page_size],
                source=table[r][max(position - 1, 0) // page_size],
            )
            position = stop


def carry(state: Tensor, segment: Segment) -> Tensor:
    """The segment's page of a state [P, ...], holding what it has before the segment: zeros before position 0."""
    page = state[segment.page]
    if segment.first == 0:
        page.zero_()
    elif segment.page != segment.source:
        page.copy_(state[segment.source])
    return page


def slide(rows_WC: Tensor, x_nC: Tensor) -> Tensor:
    """fp32 [W - 1 + n, C]: the last W - 1 rows and the new ones; leaves the last W - 1 of all in `rows_WC`."""
    window = torch.cat([rows_WC, x_nC.float()])
    rows_WC.copy_(window[x_nC.shape[0] :])
    return window


def packed(
    advance: Callable[[Operands, list[Tensor], Batch, int, Tensor], None],
    rows: Operands,
    shapes: StateShapes,
    cu_seqlens: Tensor,
    heads: GdnHeads,
) -> Tensor:
    """o [T, V, D] of packed sequences by `advance(rows, states, batch, page_size, out)`.

    They are requests that start now and share one page, one after the other.
    """
    states = [torch.empty((1, *shape), dtype=dtype) for shape, dtype in shapes]
    starts = cu_seqlens.to(torch.int32)
    batch = torch.zeros(starts.shape[0] - 1, 1, dtype=torch.int32), starts, starts.diff()
    out = rows[0].new_empty(rows[0].shape[0], heads.num_value_heads, heads.value_width)
    advance(rows, states, batch, ONE_PAGE, out)
    return out
