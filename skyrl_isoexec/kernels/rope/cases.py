"""Inputs on which the rotation is proved: (x, positions, table) by name."""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.inputs import hazards, normal

NUM_POSITIONS = 300


def table(head_dim: int) -> Tensor:
    """What stands for a table of cosines and sines, with ones and zeros at position 0; the other bits are free."""
    made = normal(head_dim, NUM_POSITIONS, head_dim, scale=0.3)
    made[0, : head_dim // 2], made[0, head_dim // 2 :] = 1.0, 0.0
    return made


def cases(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Heads of 2 to 128, positions out of order, first and last one, hazard values, zeros of both signs, no rows."""
    made = {}
    for dim in (2, 6, 64, 128):
        positions = torch.randint(NUM_POSITIONS, (9,), generator=torch.Generator().manual_seed(dim))
        positions[0], positions[-1] = NUM_POSITIONS - 1, 0
        made[f"head of {dim}"] = (normal(1, 9, 3, dim, dtype=dtype), positions, table(dim))
    for name, finite in (("finite hazards", True), ("hazards", False)):
        made[name] = (hazards(4, 9, 3, 22, dtype=dtype, finite=finite), torch.arange(9), table(22))
    zeros = normal(5, 2, 3, 22, dtype=dtype) * 0.0
    made["zeros"] = (zeros, torch.tensor([0, 7]), table(22))
    made["no rows"] = (normal(1, 0, 3, 8, dtype=dtype), torch.arange(0), table(8))
    return made
