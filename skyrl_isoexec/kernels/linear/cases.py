"""Inputs on which every linear is proved: (x, w, bias) by name."""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.inputs import hazards, normal

ROW_COUNTS = (1, 2, 17, 33, 64, 128, 257)
"""Row counts at which a row must keep its bits, whatever surrounds it."""


def cases(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Small and odd sizes, sizes around a tile and a block of k, hazard values, no rows."""
    sizes = {"one": (1, 1, 1), "odd": (7, 33, 45), "tile": (4, 16, 16), "tile+1": (5, 17, 17), "deep": (3, 20, 1037)}
    made = {
        name: (normal(1, m, k, dtype=dtype), normal(2, n, k, dtype=dtype), normal(3, n, dtype=dtype))
        for name, (m, n, k) in sizes.items()
    }
    for name, finite in (("finite hazards", True), ("hazards", False)):
        x = hazards(4, 9, 70, dtype=dtype, finite=finite)
        made[name] = (x, hazards(5, 85, 70, dtype=dtype), hazards(6, 85, dtype=dtype))
    made["no rows"] = (normal(1, 0, 24, dtype=dtype), normal(2, 20, 24, dtype=dtype), normal(3, 20, dtype=dtype))
    return made
