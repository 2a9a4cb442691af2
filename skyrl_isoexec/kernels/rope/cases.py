"""Inputs on which the rotation is proved: (x, positions, table) by name."""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.inputs import hazards, normal

NUM_POSITIONS = 300


def table(rotated: int) -> Tensor:
    """What stands for a table of cosines and sines, with ones and zeros at position 0; the other bits are free."""
    made = normal(rotated, NUM_POSITIONS, rotated, scale=0.3)
    made[0, : rotated // 2], made[0, rotated // 2 :] = 1.0, 0.0
    return made


def cases(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Heads of 2 to 256, rotated whole or in part, positions out of order, first and last one, hazards, no rows."""
    made = {}
    for dim, rotated in ((2, 2), (6, 6), (64, 64), (128, 128), (3, 2), (7, 4), (64, 16), (256, 64)):
        positions = torch.randint(NUM_POSITIONS, (9,), generator=torch.Generator().manual_seed(dim))
        positions[0], positions[-1] = NUM_POSITIONS - 1, 0
        name = f"head of {dim}" if rotated == dim else f"{rotated} of {dim}"
        made[name] = (normal(1, 9, 3, dim, dtype=dtype), positions, table(rotated))
    zeros = normal(5, 2, 3, 22, dtype=dtype) * 0.0
    for part, rotated in (("", 22), (", 8 of 22", 8)):
        for name, finite in (("finite hazards", True), ("hazards", False)):
            made[name + part] = (hazards(4, 9, 3, 22, dtype=dtype, finite=finite), torch.arange(9), table(rotated))
        made[f"zeros{part}"] = (zeros, torch.tensor([0, 7]), table(rotated))
    made["no rows"] = (normal(1, 0, 3, 8, dtype=dtype), torch.arange(0), table(8))
    made["no rows, 4 of 8"] = (normal(1, 0, 3, 8, dtype=dtype), torch.arange(0), table(4))
    return made


def payloads(dtype: torch.dtype) -> Tensor:
    """[4, 1, 22] of NaN alone, each with other bits: what a copy keeps and arithmetic does not."""
    integers, first = (torch.int32, 0x7F800001) if dtype == torch.float32 else (torch.int16, 0x7F81)
    return torch.arange(first, first + 88).to(integers).view(4, 1, 22).view(dtype)
