"""What the rotation accepts: the checks every implementation runs first.

Shapes: T tokens, N heads, D head dimension, P positions of the table, R dimensions that are rotated (even, at most D).
With R < D the first R dimensions are rotated, the others are copied: the partial rotation of Qwen3_5 (transformers
5.8.0, models/qwen3_5, `apply_rotary_pos_emb`).
"""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)


def check(x_TND: Tensor, positions_T: Tensor, cos_sin_PR: Tensor) -> None:
    """Refuse (ValueError, TypeError) operands that do not fit, naming them."""
    shape, table = x_TND.shape, cos_sin_PR.shape
    if len(shape) != 3 or len(table) != 2 or not 2 <= table[1] <= shape[2] or table[1] % 2:
        raise ValueError(
            f"rope: x {tuple(shape)} and table {tuple(table)} are not [T, N, D] and [P, R] with an even R from 2 to D"
        )
    if positions_T.shape != shape[:1] or positions_T.dtype != torch.int64:
        raise ValueError(f"rope: positions {tuple(positions_T.shape)} {positions_T.dtype} are not [{shape[0]}] int64")
    if x_TND.dtype not in DTYPES or cos_sin_PR.dtype != torch.float32:
        raise TypeError(f"rope: x is {x_TND.dtype} (float32 or bfloat16), the table {cos_sin_PR.dtype} (float32)")


def refuse_position(positions_T: Tensor, token: int, num_positions: int) -> None:
    """IndexError for a position outside the table."""
    position = int(positions_T[token])
    raise IndexError(f"rope: position {position} of token {token} lies outside the table of {num_positions} positions")
