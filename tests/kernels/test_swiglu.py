"""silu(gate) * up has the bits of the reference in the tails of the sigmoid as well."""

import pytest
import torch

from skyrl_isoexec.kernels.numeric.inputs import normal
from skyrl_isoexec.kernels.swiglu import cpu, reference
from skyrl_isoexec.kernels.swiglu.cases import cases
from skyrl_isoexec.schedule.bits import count_mismatches


@pytest.mark.parametrize("name", cases(torch.float32))
def test_bits_of_the_reference(name, dtype, same_bits):
    same_bits(cpu.silu_mul(*cases(dtype)[name]), reference.silu_mul(*cases(dtype)[name]))


def test_tails_are_reached(dtype):
    """Subnormal results and exact zeros."""
    y = cpu.silu_mul(*cases(dtype)["tails"])
    assert ((y != 0) & (y.abs() < 1.17e-38)).any() and (y == 0).sum() > 1


def test_an_element_keeps_its_bits(dtype, same_bits):
    """In the vector body of the loop or in its remainder."""
    gate, up = normal(1, 67, dtype=dtype, scale=5.0), normal(2, 67, dtype=dtype)
    whole = cpu.silu_mul(gate, up)
    for i in range(67):
        same_bits(cpu.silu_mul(gate[i : i + 1], up[i : i + 1]), whole[i : i + 1])
    same_bits(cpu.silu_mul(gate[3:], up[3:]), whole[3:])


def test_backward(dtype, check_backward):
    check_backward(cpu.silu_mul, reference.silu_mul, *cases(dtype)["7 by 33"])
    check_backward(cpu.silu_mul, reference.silu_mul, *cases(dtype)["stacked"])


def test_backward_is_finite_in_the_tails(dtype, gradients):
    assert all(g.isfinite().all() for g in gradients(cpu.silu_mul, *cases(dtype)["tails"]))


def test_the_gate_can_fail():
    """Rounding silu to bf16 before the product is part of the order."""
    gate, up = normal(1, 200, dtype=torch.bfloat16), normal(2, 200, dtype=torch.bfloat16)
    once = cpu.silu_mul(gate.float(), up.float()).bfloat16()
    assert count_mismatches(cpu.silu_mul(gate, up), once)[0] > 0


def test_refusals():
    with pytest.raises(ValueError, match="differ in shape"):
        cpu.silu_mul(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(TypeError, match="bfloat16"):
        cpu.silu_mul(torch.ones(2), torch.ones(2).bfloat16())
