"""Linear in eager PyTorch: the definition of the order.

Operands are widened to fp32 exactly. y = ((+0 + x_0 w_0) + x_1 w_1) + ..., k ascending, every product and every sum
rounded to fp32; rounded once to the result's dtype; then the bias is added in fp32 and the sum rounded again.
"""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.linear import spec
from skyrl_isoexec.kernels.numeric import dot, narrow
from skyrl_isoexec.kernels.numeric.panels import pack, unpack

__all__ = ["linear", "pack"]


def linear(
    x_TK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    packed: Tensor | None = None,
) -> Tensor:
    """y_TN in `out_dtype` (x's by default); with `packed`, the weight is read from it. Refuses what `spec` refuses."""
    out_dtype = spec.check(x_TK, w_NK, bias_N, out_dtype, packed)
    if packed is not None:
        w_NK = unpack(packed, w_NK.shape[0])
    y_TN = narrow(dot(x_TK.float(), w_NK.float()), out_dtype)
    return y_TN if bias_N is None else narrow(y_TN.float() + bias_N.float(), out_dtype)
