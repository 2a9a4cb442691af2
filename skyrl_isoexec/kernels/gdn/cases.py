"""Inputs on which this form is proved: those of every gated delta rule, over heads of widths that fill no vector."""

from skyrl_isoexec.kernels.numeric.gdn_cases import KINDS, Case, exact, reached, rows, shards
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads

__all__ = ["HEADS", "KINDS", "TENSOR_CORE_HEADS", "Case", "exact", "reached", "rows", "shards"]

HEADS = GdnHeads(num_key_heads=4, num_value_heads=8, key_width=8, value_width=12)
TENSOR_CORE_HEADS = GdnHeads(num_key_heads=4, num_value_heads=8, key_width=128, value_width=128)
"""For an implementation whose products are those of a tensor core."""
