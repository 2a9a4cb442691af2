"""Rotation in eager PyTorch: the definition of the order.

With a the first and b the second half of a head, and c, s the cosines and sines of the token's position (the two halves
of a row of the table): a c - b s and b c + a s, in fp32, each product and each sum rounded, then one rounding to x's
dtype.
"""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric import narrow
from skyrl_isoexec.kernels.rope import spec


def rope(x_TND: Tensor, positions_T: Tensor, cos_sin_PD: Tensor) -> Tensor:
    """Rotated x, of its shape and dtype. Refuses what `spec` refuses."""
    spec.check(x_TND, positions_T, cos_sin_PD)
    outside = ((positions_T < 0) | (positions_T >= cos_sin_PD.shape[0])).nonzero()
    if outside.numel():
        spec.refuse_position(positions_T, int(outside[0]), cos_sin_PD.shape[0])
    c, s = cos_sin_PD[positions_T][:, None, :].chunk(2, dim=-1)
    a, b = x_TND.float().chunk(2, dim=-1)
    return narrow(torch.cat((a * c - b * s, b * c + a * s), dim=-1), x_TND.dtype)
