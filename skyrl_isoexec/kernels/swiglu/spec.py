"""What the product accepts: the checks every implementation runs first.

Shapes: T tokens (any leading dimensions), F features.
"""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)


def check(gate_TF: Tensor, up_TF: Tensor) -> None:
    """Refuse (ValueError, TypeError) operands that do not fit, naming both."""
    if gate_TF.shape != up_TF.shape:
        raise ValueError(f"silu_mul: gate {tuple(gate_TF.shape)} and up {tuple(up_TF.shape)} differ in shape")
    if gate_TF.dtype not in DTYPES or up_TF.dtype != gate_TF.dtype:
        raise TypeError(f"silu_mul: gate is {gate_TF.dtype} and up {up_TF.dtype}; both are float32 or both bfloat16")
