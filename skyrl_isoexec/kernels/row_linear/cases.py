"""Inputs on which a row-parallel linear is proved: (x, w) by name, with K divisible by `NUM_LEAVES`."""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.inputs import hazards, normal

NUM_LEAVES = 8
"""Leaves of the tree, owned by 1, 2, 4 or 8 ranks."""


def cases(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Leaves of one element, of an odd length, longer than a block of k, hazard values, no rows."""
    sizes = {"leaf of one": (3, 5, 8), "odd leaf": (5, 33, 56), "deep": (2, 17, 8 * 521), "no rows": (0, 20, 24)}
    made = {name: (normal(1, m, k, dtype=dtype), normal(2, n, k, dtype=dtype)) for name, (m, n, k) in sizes.items()}
    for name, finite in (("finite hazards", True), ("hazards", False)):
        made[name] = (hazards(4, 9, 72, dtype=dtype, finite=finite), hazards(5, 35, 72, dtype=dtype))
    return made
