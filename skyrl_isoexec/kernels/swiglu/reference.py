"""silu(gate) * up in eager PyTorch: the definition of the order.

fp32: s = g / (exp(-g) + 1) with the shared `exp`, rounded to the operands' dtype; then s * u in fp32, rounded again.
"""

from torch import Tensor

from skyrl_isoexec.kernels.numeric import exp, narrow
from skyrl_isoexec.kernels.swiglu import spec


def silu_mul(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) * up, of the operands' shape and dtype. Refuses what `spec` refuses."""
    spec.check(gate_TF, up_TF)
    gate = gate_TF.float()
    silu = narrow(gate / (exp(-gate) + 1.0), gate_TF.dtype)
    return narrow(silu.float() * up_TF.float(), gate_TF.dtype)
