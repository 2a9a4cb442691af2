"""What the gather accepts: the checks every implementation runs first. T tokens, V rows, H width."""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)


def check(ids_T: Tensor, w_VH: Tensor) -> None:
    """Refuse (ValueError, TypeError) operands that do not fit; ids outside the table raise IndexError in the gather."""
    if ids_T.dim() != 1 or w_VH.dim() != 2:
        raise ValueError(f"embedding: ids {tuple(ids_T.shape)} and w {tuple(w_VH.shape)} are not [T] and [V, H]")
    if ids_T.dtype not in (torch.int64, torch.int32) or w_VH.dtype not in DTYPES:
        raise TypeError(f"embedding: ids are {ids_T.dtype} (int64 or int32), w {w_VH.dtype} (float32 or bfloat16)")
