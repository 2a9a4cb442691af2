"""The chunkwise-parallel recurrent gated delta rule on the CPU: `loops.py` behind every implementation's functions.

What must stay equal: the bits of `reference.py`, whatever the batch, the pages and the cut of a prefill.

Shapes: T tokens, C channels, V value heads, D their width, W taps, R requests, B pages of one request.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from skyrl_isoexec.kernels.gdn_cpr import loops
from skyrl_isoexec.kernels.gdn_cpr.spec import OP, gdn_states
from skyrl_isoexec.kernels.numeric.gdn_call import Form, packed, paged
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.schedule import Schedule

__all__ = ["gdn", "gdn_paged", "gdn_states"]

FORM = Form(op=OP, states=gdn_states, loop=loops.advance, scratch_size=loops.scratch_size)


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
    return packed(FORM, rows, cu_seqlens, heads, schedule)


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
    return paged(FORM, rows, states, batch, page_size, heads, out, schedule)
