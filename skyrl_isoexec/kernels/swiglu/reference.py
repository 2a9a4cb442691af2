"""silu(gate) * up and x * sigmoid(gate) in eager PyTorch: the definition of the order.

fp32, with the shared `exp`, each operation rounded to fp32:

    silu_mul       s = g / (exp(-g) + 1), rounded to the operands' dtype; then s * u, rounded again
    sigmoid_mul    s = 1 / (exp(-g) + 1); then x * s, rounded to the operands' dtype once
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


def sigmoid(gate: Tensor) -> Tensor:
    """fp32; a gate below -88.7 is closed: exactly 0."""
    return 1.0 / (exp(-gate.float()) + 1.0)


def sigmoid_mul(x_TF: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), of x's shape and dtype; gate is [T, F] or [T, 1]. Refuses what `spec` refuses."""
    spec.check_sigmoid(x_TF, gate)
    return narrow(x_TF.float() * sigmoid(gate), x_TF.dtype)
