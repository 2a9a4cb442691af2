"""Arithmetic that several operators share, in eager PyTorch (`reference`) and in compiled loops (`cpu`): the same bits.

The names exported here are those of `reference`. Importing this package does not import numba.
"""

from skyrl_isoexec.kernels.numeric.reference import (
    NUM_LANES,
    dot,
    dot_tree,
    exp,
    lane_sum,
    lane_tree,
    narrow,
    sqrt,
    tree,
)

__all__ = ["NUM_LANES", "dot", "dot_tree", "exp", "lane_sum", "lane_tree", "narrow", "sqrt", "tree"]
