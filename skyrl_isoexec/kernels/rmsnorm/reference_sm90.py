"""RMSNorm in eager PyTorch in the order of the Hopper kernel: the definition of its bits.

As `reference.py`, but the squares of a row are added by one balanced tree over neighbours, the width filled up with
zeros to a power of two, instead of 16 ascending lanes: a tree is as deep as it is parallel.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from skyrl_isoexec.kernels.numeric import lane_tree, narrow, sqrt
from skyrl_isoexec.kernels.numeric.sm90 import power_of_two
from skyrl_isoexec.kernels.rmsnorm import spec


def row_tree(x_TH: Tensor) -> Tensor:
    """fp32 sums over the last dimension."""
    width = x_TH.shape[-1]
    return lane_tree(pad(x_TH, (0, power_of_two(width) - width)))


def rmsnorm(x_TH: Tensor, w_H: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Normalised x, of its shape and dtype. Refuses what `spec` refuses."""
    spec.check(x_TH, w_H, None, zero_centered)
    x = x_TH.float()
    mean = row_tree(x * x) / torch.tensor(float(x.shape[-1]), device=x.device)
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
