"""Inputs on which the norms are proved: (x, residual, w) and (x, z, w) by name."""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.inputs import hazards, normal

EPS = 1e-6
WIDTHS = (1, 5, 16, 17, 64, 250, 1024)
"""Fewer elements than lanes, exactly as many, one more, and larger."""


def cases(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Every width, a row of zeros, hazard values, three dimensions, no rows."""
    made = {
        f"width {n}": tuple(normal(i, 6, n, dtype=dtype) for i in (1, 2)) + (normal(3, n, dtype=dtype),) for n in WIDTHS
    }
    zeros = torch.zeros(3, 40, dtype=dtype)
    made["zeros"] = (zeros, -zeros, normal(3, 40, dtype=dtype))
    for name, finite in (("finite hazards", True), ("hazards", False)):
        x = hazards(4, 9, 85, dtype=dtype, finite=finite)
        made[name] = (x, hazards(5, 9, 85, dtype=dtype), hazards(6, 85, dtype=dtype))
    made["heads"] = (normal(7, 5, 3, 24, dtype=dtype), normal(8, 5, 3, 24, dtype=dtype), normal(9, 24, dtype=dtype))
    made["no rows"] = (normal(1, 0, 24, dtype=dtype), normal(2, 0, 24, dtype=dtype), normal(3, 24, dtype=dtype))
    return made


def gated_cases(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """(x, z, w): as `cases`, and gates z whose silu is 0, all but 0, or what it is given."""
    made = cases(dtype)
    z = torch.linspace(-110.0, 110.0, 881).to(dtype)[None]
    made["tails"] = (normal(10, 1, 881, dtype=dtype, scale=1e-3), z, normal(11, 881, dtype=dtype, scale=1e-3))
    return made
