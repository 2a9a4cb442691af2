"""Inputs on which a grouped linear is proved: (x, w, starts) by name, and the ways rows spread over experts."""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.inputs import hazards, normal


def starts_of(counts: list[int], first: int = 0) -> Tensor:
    """int32 [E + 1] starts of experts with so many rows, from row `first`."""
    return torch.tensor([first, *counts]).cumsum(0).int()


SPREADS = {
    "even": [4, 4, 4, 4, 4],
    "ragged": [0, 1, 17, 0, 2],
    "all in the first": [20, 0, 0, 0, 0],
    "all in the last": [0, 0, 0, 0, 20],
    "all in one": [0, 0, 20, 0, 0],
}
"""Rows of each of five experts, twenty in all."""


def cases(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Every spread, one expert, sizes around a panel, rows of nobody on both sides, hazard values, no rows."""
    x, w = normal(1, 20, 37, dtype=dtype), normal(2, 5, 33, 37, dtype=dtype)
    made = {name: (x, w, starts_of(counts)) for name, counts in SPREADS.items()}
    made["one expert"] = (normal(3, 7, 16, dtype=dtype), normal(4, 1, 17, 16, dtype=dtype), starts_of([7]))
    made["one row"] = (normal(3, 1, 16, dtype=dtype), normal(4, 3, 16, 16, dtype=dtype), starts_of([0, 1, 0]))
    made["rows of nobody"] = (x, w, starts_of([3, 0, 1, 5, 2], first=4))
    made["nobody's rows alone"] = (x, w, starts_of([0, 0, 0, 0, 0], first=20))
    for name, finite in (("finite hazards", True), ("hazards", False)):
        values = hazards(5, 20, 70, dtype=dtype, finite=finite)
        made[name] = (values, hazards(6, 5, 33, 70, dtype=dtype), starts_of(SPREADS["ragged"]))
    made["no rows"] = (normal(1, 0, 24, dtype=dtype), normal(2, 3, 20, 24, dtype=dtype), starts_of([0, 0, 0]))
    return made
