"""RMSNorm in eager PyTorch: the definition of the order.

fp32: squares are summed in 16 lanes (element d to lane d % 16, from +0, ascending), lanes by a balanced tree; the sum
is divided by the width, eps is added, and inv = 1 / sqrt(...), each rounded. Then, each product rounded to fp32:

    offset 0    n = x * inv rounded to x's dtype; n * w, rounded again
    offset 1    (x * inv) * (w + 1), rounded to x's dtype once
    gated       n * w as with offset 0; times silu(z) = z / (exp(-z) + 1) with the shared `exp`, rounded a third time
"""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric import exp, lane_sum, narrow, sqrt
from skyrl_isoexec.kernels.rmsnorm import spec


def normed(x: Tensor, sum_of_squares: Tensor, eps: float) -> Tensor:
    """fp32 x * inv, from the sum over the last dimension."""
    mean = sum_of_squares / torch.tensor(float(x.shape[-1]), device=x.device)
    inv = 1.0 / sqrt(mean + eps)
    return x * inv[..., None]


def weighted(n: Tensor, w_H: Tensor, offset: float) -> Tensor:
    """fp32 n, what is normalised, times the weight, of the weight's dtype."""
    if offset:
        return narrow(n * (w_H.float() + offset), w_H.dtype)
    return narrow(narrow(n, w_H.dtype).float() * w_H.float(), w_H.dtype)


def gated(y_RD: Tensor, z_RD: Tensor) -> Tensor:
    """y * silu(z), of their dtype."""
    z = z_RD.float()
    return narrow(y_RD.float() * (z / (exp(-z) + 1.0)), y_RD.dtype)


def rmsnorm(x_TH: Tensor, w_H: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Normalised x, of its shape and dtype. Refuses what `spec` refuses."""
    spec.check(x_TH, w_H, None, offset)
    x = x_TH.float()
    return weighted(normed(x, lane_sum(x * x), eps), w_H, offset)


def add_rmsnorm(
    x_TH: Tensor, residual_TH: Tensor, w_H: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rmsnorm of s, s) with s = residual + x in fp32, rounded to x's dtype before it is normalised."""
    spec.check(x_TH, w_H, residual_TH, offset)
    total_TH = narrow(residual_TH.float() + x_TH.float(), x_TH.dtype)
    return rmsnorm(total_TH, w_H, eps, offset), total_TH


def gated_rmsnorm(x_RD: Tensor, z_RD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    """rmsnorm of x, times silu(z), of x's shape and dtype. Refuses what `spec` refuses."""
    spec.check_gated(x_RD, z_RD, w_D)
    return gated(rmsnorm(x_RD, w_D, eps), z_RD)
