"""What a linear accepts: the checks every implementation runs first.

Shapes: T tokens, K input features, N output features.
"""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.panels import packed_shape

DTYPES = (torch.float32, torch.bfloat16)


def check(
    x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype | None, packed: Tensor | None
) -> torch.dtype:
    """The result's dtype. Refuses (ValueError, TypeError) operands that do not fit, naming both."""
    x_shape, w_shape = x_TK.shape, w_NK.shape
    if len(x_shape) != 2 or len(w_shape) != 2 or x_shape[1] != w_shape[1]:
        raise ValueError(f"linear: x {tuple(x_shape)} and w {tuple(w_shape)} are not [T, K] and [N, K]")
    dtype = x_TK.dtype
    if dtype not in DTYPES or w_NK.dtype != dtype:
        raise TypeError(f"linear: x is {dtype} and w {w_NK.dtype}; both are float32 or both bfloat16")
    if bias_N is not None and (bias_N.shape != w_shape[:1] or bias_N.dtype not in DTYPES):
        raise ValueError(f"linear: bias {tuple(bias_N.shape)} {bias_N.dtype} does not fit w {tuple(w_shape)}")
    if packed is not None and (packed.shape != packed_shape(*w_shape) or packed.dtype != dtype):
        raise ValueError(f"linear: packed {tuple(packed.shape)} {packed.dtype} is not w {tuple(w_shape)} packed")
    if out_dtype is None:
        return dtype
    if out_dtype not in DTYPES:
        raise TypeError(f"linear: out_dtype {out_dtype} is neither float32 nor bfloat16")
    return out_dtype
