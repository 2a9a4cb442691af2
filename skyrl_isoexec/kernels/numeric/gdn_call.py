"""How the compiled loop of a gated delta rule is called: addresses, strides and sizes of what has been checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.cpu import scratch
from skyrl_isoexec.kernels.numeric.gdn_checks import Batch, Operands
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads


def call(
    loop: Callable[..., int],
    size: int,
    rows: Operands,
    states: Sequence[Tensor],
    batch: Batch,
    page_size: int,
    out: Tensor,
    heads: GdnHeads,
    chunk: int,
) -> int:
    """What `loop` returns, which needs `size` fp32 numbers of scratch and writes states and `out`."""
    rows = tuple(t.contiguous() for t in rows)
    table, starts, lengths = batch
    starts, lengths = starts.contiguous(), lengths.contiguous()
    table = table if table.stride(1) == 1 else table.contiguous()
    return loop(
        *(t.data_ptr() for t in rows), out.data_ptr(), table.data_ptr(), starts.data_ptr(), lengths.data_ptr(),
        scratch(size), *(state.data_ptr() for state in states), *(state.stride(0) for state in states),
        rows[0].shape[0], lengths.shape[0], states[0].shape[0], table.shape[1], table.stride(0), page_size, chunk,
        heads.num_key_heads, heads.num_value_heads, heads.key_width, heads.value_width, rows[3].shape[1],
        heads.key_width**-0.5, int(rows[0].dtype is torch.bfloat16),
    )  # fmt: skip
