"""Inputs on which the gather is proved: (ids, table) by name."""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.inputs import hazards, normal


def cases(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """First, last and repeated rows, hazard values that a sum of masked shards would change, no rows."""
    return {
        "repeated": (torch.tensor([0, 10, 3, 3, 0, 3]), normal(1, 11, 7, dtype=dtype)),
        "hazards": (torch.arange(9), hazards(2, 9, 31, dtype=dtype, finite=False)),
        "no rows": (torch.arange(0), normal(1, 11, 7, dtype=dtype)),
    }
