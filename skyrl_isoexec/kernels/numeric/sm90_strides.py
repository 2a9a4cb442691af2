"""Rows that lie apart: parts of a wider product, which a kernel reads where they are. Changes no bit.

Shapes: T tokens, N heads of one, D elements of a row.
"""

from torch import Tensor


def rows_apart(x: Tensor) -> tuple[Tensor, int, int, int]:
    """(x, N, stride, step): row r of all rows [., D] begins at r // N * stride + r % N * step.

    x is copied only where its rows do not lie so: those of [T, D] and [T, N, D] do, if a row is in one piece.
    """
    if not x.is_contiguous() and x.stride(-1) == 1:
        if x.dim() == 2:
            return x, 1, x.stride(0), 0
        if x.dim() == 3:
            return x, x.shape[1], x.stride(0), x.stride(1)
    return x.contiguous(), 1, x.shape[-1], 0


def whole_tokens(x_TND: Tensor) -> Tensor:
    """x with the heads of a token end to end and tokens stride(0) apart: x itself where they lie so."""
    return x_TND if x_TND.stride(2) == 1 and x_TND.stride(1) == x_TND.shape[2] else x_TND.contiguous()
