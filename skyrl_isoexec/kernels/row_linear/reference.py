"""Row-parallel linear in eager PyTorch: the definition of the order.

K is cut into contiguous leaves of equal length. A leaf is ((+0 + x_0 w_0) + x_1 w_1) + ... in fp32, k ascending; leaves
are added in fp32 by a balanced tree over neighbours, lower index left. The root is rounded once, where all leaves are
in: here with `out_dtype`, on a single rank; else by the caller, after the last rank's part. A rank that owns a subtree
of the leaves computes one node of the same tree.
"""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric import dot_tree, tree
from skyrl_isoexec.kernels.numeric.panels import unpack
from skyrl_isoexec.kernels.row_linear import spec


def row_linear(
    x_TK: Tensor,
    w_NK: Tensor,
    num_leaves: int,
    packed: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Root [T, N] over this rank's `num_leaves` leaves; with `packed`, the weight is read from it."""
    spec.check(x_TK, w_NK, num_leaves, packed, out_dtype)
    if packed is not None:
        w_NK = unpack(packed, w_NK.shape[0])
    return dot_tree(x_TK.float(), w_NK.float(), num_leaves).to(out_dtype)


def tree_sum(parts_GTN: Tensor) -> Tensor:
    """fp32 [T, N]: balanced tree over the first dimension, lower index on the left."""
    spec.check_parts(parts_GTN)
    return tree(parts_GTN)
