"""What a row-parallel linear accepts: the checks every implementation runs first.

Shapes: T tokens, K input features of this rank, N output features, G parts of a tree.
"""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.panels import packed_shape
from skyrl_isoexec.schedule.tree import ReductionTree, is_power_of_two

DTYPES = (torch.float32, torch.bfloat16)


def check(x_TK: Tensor, w_NK: Tensor, num_leaves: int, packed: Tensor | None, out_dtype: torch.dtype) -> None:
    """Refuse (ValueError, TypeError) operands that do not fit, and a K that the leaves do not divide."""
    x_shape, w_shape = x_TK.shape, w_NK.shape
    if len(x_shape) != 2 or len(w_shape) != 2 or x_shape[1] != w_shape[1]:
        raise ValueError(f"row_linear: x {tuple(x_shape)} and w {tuple(w_shape)} are not [T, K] and [N, K]")
    dtype = x_TK.dtype
    if dtype not in DTYPES or w_NK.dtype != dtype:
        raise TypeError(f"row_linear: x is {dtype} and w {w_NK.dtype}; both are float32 or both bfloat16")
    if out_dtype not in (torch.float32, dtype):
        raise TypeError(f"row_linear: out_dtype is {out_dtype}; the root is float32 or of x's {dtype}")
    if packed is not None and (packed.shape != packed_shape(*w_shape) or packed.dtype != dtype):
        raise ValueError(f"row_linear: packed {tuple(packed.shape)} {packed.dtype} is not w {tuple(w_shape)} packed")
    ReductionTree(num_leaves=num_leaves).leaf_bounds(x_shape[1])


def check_parts(parts_GTN: Tensor) -> None:
    """Refuse (ValueError, TypeError) parts that are not fp32 or not a power of two."""
    if parts_GTN.dtype != torch.float32:
        raise TypeError(f"tree_sum: parts are {parts_GTN.dtype}, not float32: leaves are added before any rounding")
    if parts_GTN.dim() < 1 or not is_power_of_two(parts_GTN.shape[0]):
        raise ValueError(f"tree_sum: the number of parts of {tuple(parts_GTN.shape)} is not a power of two")
