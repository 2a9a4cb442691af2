"""RMSNorm in eager PyTorch: the definition of the order.

fp32: squares are summed in 16 lanes (element d to lane d % 16, from +0, ascending), lanes by a balanced tree; the sum
is divided by the width, eps is added, and inv = 1 / sqrt(...), each rounded. y = x * inv rounded to x's dtype, then
y * w in fp32 rounded again: the weight multiplies an already rounded value, as Hugging Face models do.
"""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric import lane_sum, narrow, sqrt
from skyrl_isoexec.kernels.rmsnorm import spec


def rmsnorm(x_TH: Tensor, w_H: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Normalised x, of its shape and dtype. Refuses what `spec` refuses."""
    spec.check(x_TH, w_H, None, zero_centered)
    x = x_TH.float()
    mean = lane_sum(x * x) / torch.tensor(float(x.shape[-1]))
    inv = 1.0 / sqrt(mean + eps)
    y = narrow(x * inv[..., None], x_TH.dtype)
    return narrow(y.float() * w_H.float(), x_TH.dtype)


def add_rmsnorm(
    x_TH: Tensor, residual_TH: Tensor, w_H: Tensor, eps: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """(rmsnorm of s, s) with s = residual + x in fp32, rounded to x's dtype before it is normalised."""
    spec.check(x_TH, w_H, residual_TH, zero_centered)
    total_TH = narrow(residual_TH.float() + x_TH.float(), x_TH.dtype)
    return rmsnorm(total_TH, w_H, eps), total_TH
