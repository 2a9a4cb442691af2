"""What RMSNorm accepts and where it rounds: the checks every implementation runs first.

Shapes: T tokens or R rows (any leading dimensions), H or D width. Operands of one call have one dtype.

With inv = 1 / sqrt(mean of squares + eps), everything in fp32 but for these roundings to the dtype:
- offset 0.0: x * inv is rounded, then multiplied by w and rounded, as the norms of Llama and Qwen3 do.
- offset 1.0: x * inv * (w + 1) is rounded once. The weight is stored as w - 1, as in Qwen3_5RMSNorm.
- gated: x * inv is rounded, times w rounded, times silu(z) rounded, as in Qwen3_5RMSNormGated.
The sources are the classes of these names in transformers 5.8.0 (models/llama, models/qwen3, models/qwen3_5).
"""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)
OFFSETS = (0.0, 1.0)
"""What is added to a weight before it multiplies."""


def check(x_TH: Tensor, w_H: Tensor, residual_TH: Tensor | None, offset: float) -> None:
    """Refuse (ValueError, TypeError) operands that do not fit, naming both."""
    if type(offset) is not float or offset not in OFFSETS:
        raise ValueError(f"rmsnorm: offset {offset!r} is none of {OFFSETS}: give 1.0 for a weight stored as w - 1")
    _check_weight("rmsnorm", x_TH, w_H)
    if residual_TH is not None and (residual_TH.shape != x_TH.shape or residual_TH.dtype != x_TH.dtype):
        raise ValueError(
            f"add_rmsnorm: residual {tuple(residual_TH.shape)} {residual_TH.dtype} is not like x "
            f"{tuple(x_TH.shape)} {x_TH.dtype}"
        )


def check_gated(x_RD: Tensor, z_RD: Tensor, w_D: Tensor) -> None:
    """As `check`, for a norm with a gate."""
    _check_weight("gated_rmsnorm", x_RD, w_D)
    if z_RD.shape != x_RD.shape or z_RD.dtype != x_RD.dtype:
        raise ValueError(
            f"gated_rmsnorm: z {tuple(z_RD.shape)} {z_RD.dtype} is not like x {tuple(x_RD.shape)} {x_RD.dtype}"
        )


def _check_weight(name: str, x_TH: Tensor, w_H: Tensor) -> None:
    if not x_TH.dim() or w_H.shape != x_TH.shape[-1:] or not w_H.shape[0]:
        raise ValueError(f"{name}: w {tuple(w_H.shape)} does not fit the last dimension of x {tuple(x_TH.shape)}")
    if x_TH.dtype not in DTYPES or w_H.dtype != x_TH.dtype:
        raise TypeError(f"{name}: x is {x_TH.dtype} and w {w_H.dtype}; both are float32 or both bfloat16")
