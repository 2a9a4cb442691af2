"""Inputs on which the product is proved: (gate, up) by name."""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.inputs import hazards, normal


def cases(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Odd sizes, gates whose sigmoid is subnormal, 0 or 1, hazard values, three dimensions, no rows."""
    made = {f"{m} by {n}": (normal(1, m, n, dtype=dtype), normal(2, m, n, dtype=dtype)) for m, n in ((1, 1), (7, 33))}
    made["wide"] = (normal(3, 20, 100, dtype=dtype, scale=40.0), normal(4, 20, 100, dtype=dtype))
    tails = torch.linspace(-110.0, 110.0, 881).to(dtype)[None]
    made["tails"] = (tails, torch.full_like(tails, 1e-3))
    for name, finite in (("finite hazards", True), ("hazards", False)):
        made[name] = (hazards(5, 9, 70, dtype=dtype, finite=finite), hazards(6, 9, 70, dtype=dtype))
        made[f"{name} with others"] = (made[name][0], made[name][1].flip(1))
    made["stacked"] = (normal(7, 2, 3, 5, dtype=dtype), normal(8, 2, 3, 5, dtype=dtype))
    made["no rows"] = (normal(1, 0, 24, dtype=dtype), normal(2, 0, 24, dtype=dtype))
    return made
