"""What the chunkwise-parallel recurrent gated delta rule accepts, and the states of its pages on the CPU.

The operator, and what it rounds, is that of the row-causal form; the order differs. Every page holds `gdn_states`, all
fp32, because values that were rounded to bf16 need no second conversion:

| state | shape | what |
|---|---|---|
| conv | [W - 1, C] | the last rows before the convolution, oldest first |
| chain | [V, Dk, Dv] | the state at the start of the open chunk, never rounded; its snapshot is its rounding |
| keys | [K, Dk, chunk] | keys of the open chunk, as columns |
| gates | [2, V, chunk] | g and beta of its rows |
| values | [V, chunk, Dv] | v |
| recurrent | [V, Dk, Dv] | the state after the last row, from the snapshot by the recurrence, never rounded |

Shapes: C channels, K key heads, V value heads, Dk and Dv their widths, W taps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric import gdn_checks
from skyrl_isoexec.kernels.numeric.gdn_checks import StateShapes
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.schedule import Schedule

OP = "gdn_cpr"
CONV, CHAIN, KEYS, GATES, VALUES, RECURRENT = range(6)
"""Places in `gdn_states`."""


def gdn_states(heads: GdnHeads, conv_width: int, dtype: torch.dtype, *, schedule: Schedule) -> StateShapes:
    """(shape, dtype) of each state tensor of one page, without the dimension of pages.

    TypeError for a model's dtype other than float32 and bfloat16, ValueError for a convolution of one tap.
    """
    gdn_checks.check_dtype(OP, "the model's dtype", dtype)
    gdn_checks.check_conv_width(OP, conv_width)
    keys, values, key_width, width = heads.num_key_heads, heads.num_value_heads, heads.key_width, heads.value_width
    chunk = schedule.gdn_chunk
    shapes = (
        (conv_width - 1, heads.channels),
        (values, key_width, width),
        (keys, key_width, chunk),
        (2, values, chunk),
        (values, chunk, width),
        (values, key_width, width),
    )
    return tuple((shape, torch.float32) for shape in shapes)


def live(states: Sequence[Tensor], page: int | Tensor, position: int, schedule: Schedule) -> tuple[Tensor, ...]:
    """What a page, or some pages, carry of the state after `position` > 0 tokens; the rest of it may be anything."""
    views = tuple(state[page] for state in states)
    rows = position % schedule.gdn_chunk
    if not rows:
        return views[:KEYS]
    columns = tuple(view[..., :rows] for view in views[KEYS:VALUES])
    return *views[:KEYS], *columns, views[VALUES][..., :rows, :], views[RECURRENT]
