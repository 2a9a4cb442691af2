"""What RMSNorm accepts: the checks every implementation runs first.

Shapes: T tokens (any leading dimensions), H width.
"""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)


def check(x_TH: Tensor, w_H: Tensor, residual_TH: Tensor | None, zero_centered: bool) -> None:
    """Refuse (ValueError, TypeError, NotImplementedError) operands that do not fit, naming both."""
    if zero_centered:
        raise NotImplementedError("rmsnorm: zero_centered (a weight stored as w - 1) is reserved and not implemented")
    if not x_TH.dim() or w_H.shape != x_TH.shape[-1:] or not w_H.shape[0]:
        raise ValueError(f"rmsnorm: w {tuple(w_H.shape)} does not fit the last dimension of x {tuple(x_TH.shape)}")
    if x_TH.dtype not in DTYPES or w_H.dtype != x_TH.dtype:
        raise TypeError(f"rmsnorm: x is {x_TH.dtype} and w {w_H.dtype}; both are float32 or both bfloat16")
    if residual_TH is not None and (residual_TH.shape != x_TH.shape or residual_TH.dtype != x_TH.dtype):
        raise ValueError(
            f"add_rmsnorm: residual {tuple(residual_TH.shape)} {residual_TH.dtype} is not like x "
            f"{tuple(x_TH.shape)} {x_TH.dtype}"
        )
