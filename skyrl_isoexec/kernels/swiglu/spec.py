"""What the products accept and where they round: the checks every implementation runs first.

Shapes: T tokens (any leading dimensions), F features. Operands of one call have one dtype.

- silu_mul: silu(gate) is rounded to the dtype before it multiplies, as the MLPs of transformers do.
- sigmoid_mul: x * sigmoid(gate) in fp32 is rounded once. The gate has x's shape, or one number per token, [T, 1].
  Qwen3_5Attention (transformers 5.8.0, models/qwen3_5) rounds the sigmoid to the dtype as well; here it stays fp32.
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


def check_sigmoid(x_TF: Tensor, gate: Tensor) -> None:
    """As `check`, for `sigmoid_mul`."""
    if not x_TF.dim() or gate.shape not in (x_TF.shape, (*x_TF.shape[:-1], 1)):
        raise ValueError(f"sigmoid_mul: gate {tuple(gate.shape)} is neither [T, F] nor [T, 1] of x {tuple(x_TF.shape)}")
    if x_TF.dtype not in DTYPES or gate.dtype != x_TF.dtype:
        raise TypeError(f"sigmoid_mul: x is {x_TF.dtype} and gate {gate.dtype}; both are float32 or both bfloat16")


def gate_width(x_TF: Tensor, gate: Tensor) -> int:
    """How many neighbouring elements of x one number of the gate multiplies."""
    return 1 if gate.shape == x_TF.shape else x_TF.shape[-1]
