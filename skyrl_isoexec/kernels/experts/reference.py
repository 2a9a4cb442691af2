"""Grouped linear in eager PyTorch: the definition of the order.

A row of expert e is the linear of that row and w[e]: y = ((+0 + x_0 w_0) + x_1 w_1) + ... in fp32, k ascending, each
product and sum rounded; rounded once to the result's dtype. What other rows there are, and of which experts, does not
enter. A row of no expert is +0.
"""

from itertools import pairwise

import torch
from torch import Tensor

from skyrl_isoexec.kernels.experts import spec
from skyrl_isoexec.kernels.numeric import dot, narrow


def grouped_linear(x_SK: Tensor, w_ENK: Tensor, starts_E1: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """y_SN in `out_dtype` (x's by default). Refuses what `spec` refuses."""
    out_dtype = spec.check(x_SK, w_ENK, starts_E1, out_dtype)
    bounds, num_n = spec.bounds(starts_E1, x_SK.shape[0]), w_ENK.shape[1]
    parts = [torch.zeros(bounds[0], num_n)]
    for (first, last), w_NK in zip(pairwise(bounds), w_ENK, strict=True):
        parts.append(dot(x_SK[first:last].float(), w_NK.float()))
    parts.append(torch.zeros(x_SK.shape[0] - bounds[-1], num_n))
    return narrow(torch.cat(parts), out_dtype)
