"""RMSNorm in eager PyTorch in the order of the Hopper kernel: the definition of its bits.

As `reference.py`, but the squares of a row are added by one balanced tree over neighbours, the width filled up with
zeros to a power of two, instead of 16 ascending lanes: a tree is as deep as it is parallel.
"""

from torch import Tensor
from torch.nn.functional import pad

from skyrl_isoexec.kernels.numeric import lane_tree, narrow
from skyrl_isoexec.kernels.numeric.sm90 import power_of_two
from skyrl_isoexec.kernels.rmsnorm import spec
from skyrl_isoexec.kernels.rmsnorm.reference import gated, normed, weighted


def row_tree(x_TH: Tensor) -> Tensor:
    """fp32 sums over the last dimension."""
    width = x_TH.shape[-1]
    return lane_tree(pad(x_TH, (0, power_of_two(width) - width)))


def rmsnorm(x_TH: Tensor, w_H: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Normalised x, of its shape and dtype. Refuses what `spec` refuses."""
    spec.check(x_TH, w_H, None, offset)
    x = x_TH.float()
    return weighted(normed(x, row_tree(x * x), eps), w_H, offset)


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
