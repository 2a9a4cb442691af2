"""What silu(gate) * up refuses and differentiates; its bits are proved by its gate."""

import pytest
import torch

from skyrl_isoexec.kernels.swiglu import cpu, reference
from skyrl_isoexec.kernels.swiglu.cases import cases


def test_backward(dtype, check_backward):
    check_backward(cpu.silu_mul, reference.silu_mul, *cases(dtype)["7 by 33"])
    check_backward(cpu.silu_mul, reference.silu_mul, *cases(dtype)["stacked"])


def test_backward_is_finite_in_the_tails(dtype, gradients):
    assert all(g.isfinite().all() for g in gradients(cpu.silu_mul, *cases(dtype)["tails"]))


def test_refusals():
    with pytest.raises(ValueError, match="differ in shape"):
        cpu.silu_mul(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(TypeError, match="bfloat16"):
        cpu.silu_mul(torch.ones(2), torch.ones(2).bfloat16())
