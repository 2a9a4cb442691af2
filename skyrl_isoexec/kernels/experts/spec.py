"""What a grouped linear accepts: the checks every implementation runs first.

Shapes: S rows, E experts, K input features, N output features.

Rows of expert e are starts[e] .. starts[e + 1] - 1. Rows before starts[0] and from starts[E] on belong to nobody here
(on a rank that has some of the experts: to the others), and their result is +0.
"""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)


def check(x_SK: Tensor, w_ENK: Tensor, starts_E1: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The result's dtype. Refuses (ValueError, TypeError) operands that do not fit, naming both."""
    x_shape, w_shape = x_SK.shape, w_ENK.shape
    if len(x_shape) != 2 or len(w_shape) != 3 or x_shape[1] != w_shape[2] or not w_shape[0]:
        raise ValueError(f"grouped_linear: x {tuple(x_shape)} and w {tuple(w_shape)} are not [S, K] and [E, N, K]")
    dtype = x_SK.dtype
    if dtype not in DTYPES or w_ENK.dtype != dtype:
        raise TypeError(f"grouped_linear: x is {dtype} and w {w_ENK.dtype}; both are float32 or both bfloat16")
    if starts_E1.shape != (w_shape[0] + 1,) or starts_E1.dtype != torch.int32:
        raise ValueError(
            f"grouped_linear: starts {tuple(starts_E1.shape)} {starts_E1.dtype} are not [{w_shape[0] + 1}] int32, one "
            f"for each of the {w_shape[0]} experts and their end"
        )
    if out_dtype is None:
        return dtype
    if out_dtype not in DTYPES:
        raise TypeError(f"grouped_linear: out_dtype {out_dtype} is neither float32 nor bfloat16")
    return out_dtype


def bounds(starts_E1: Tensor, num_rows: int) -> list[int]:
    """The values of starts. Refuses (ValueError) those that descend or leave the rows."""
    values = starts_E1.tolist()
    ordered = [0, *values, num_rows]
    for at, (a, b) in enumerate(zip(ordered, ordered[1:], strict=False)):
        if a > b:
            raise ValueError(
                f"grouped_linear: starts {a}, then {b} at expert {at}, do not ascend within 0 .. {num_rows}"
            )
    return values
