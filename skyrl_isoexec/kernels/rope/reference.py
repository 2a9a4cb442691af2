"""Rotation in eager PyTorch: the definition of the order.

With a the first and b the second half of a head's first R dimensions, and c, s the cosines and sines of the token's
position (the two halves of a row of R numbers of the table): a c - b s and b c + a s, in fp32, each product and each
sum rounded, then one rounding to x's dtype. Dimensions from R on are copied.
"""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric import narrow
from skyrl_isoexec.kernels.rope import spec


def rope(x_TND: Tensor, positions_T: Tensor, cos_sin_PR: Tensor) -> Tensor:
    """x with its first R dimensions rotated, of its shape and dtype. Refuses what `spec` refuses."""
    spec.check(x_TND, positions_T, cos_sin_PR)
    outside = ((positions_T < 0) | (positions_T >= cos_sin_PR.shape[0])).nonzero()
    if outside.numel():
        spec.refuse_position(positions_T, int(outside[0]), cos_sin_PR.shape[0])
    rotated = cos_sin_PR.shape[1]
    c, s = cos_sin_PR[positions_T][:, None, :].chunk(2, dim=-1)
    turned, rest = x_TND.split((rotated, x_TND.shape[2] - rotated), dim=-1)
    a, b = turned.float().chunk(2, dim=-1)
    y = narrow(torch.cat((a * c - b * s, b * c + a * s), dim=-1), x_TND.dtype)
    return torch.cat((y, rest), dim=-1)
