"""A norm's row depends on itself alone, in the order that the reference states."""

import pytest
import torch

from skyrl_isoexec.kernels.numeric.inputs import normal
from skyrl_isoexec.kernels.rmsnorm import cpu, reference
from skyrl_isoexec.kernels.rmsnorm.cases import EPS, cases
from skyrl_isoexec.schedule.bits import count_mismatches


@pytest.mark.parametrize("name", cases(torch.float32))
def test_bits_of_the_reference(name, dtype, same_bits):
    x, residual, w = cases(dtype)[name]
    same_bits(cpu.rmsnorm(x, w, EPS), reference.rmsnorm(x, w, EPS))
    for ours, theirs in zip(
        cpu.add_rmsnorm(x, residual, w, EPS), reference.add_rmsnorm(x, residual, w, EPS), strict=True
    ):
        same_bits(ours, theirs)


def test_the_sum_is_rounded_before_it_is_normalised(dtype, same_bits):
    """`add_rmsnorm` is the sum, then the norm of what was stored."""
    x, residual, w = cases(dtype)["width 250"]
    y, total = cpu.add_rmsnorm(x, residual, w, EPS)
    same_bits(total, (residual.float() + x.float()).to(dtype))
    same_bits(y, cpu.rmsnorm(total, w, EPS))


def test_a_row_keeps_its_bits(dtype, same_bits):
    rows, anchor, w = normal(1, 257, 250, dtype=dtype), normal(2, 1, 250, dtype=dtype), normal(3, 250, dtype=dtype)
    expected = cpu.rmsnorm(anchor, w, EPS)
    for count in (1, 2, 17, 33, 64, 128, 257):
        for place in {0, count // 2, count - 1}:
            x = rows[:count].clone()
            x[place] = anchor[0]
            same_bits(cpu.rmsnorm(x, w, EPS)[place], expected[0])


def test_strides_do_not_matter(dtype, same_bits):
    x, w = normal(1, 6, 50, dtype=dtype), normal(2, 50, dtype=dtype)
    same_bits(cpu.rmsnorm(x.t().contiguous().t(), w, EPS), cpu.rmsnorm(x, w, EPS))


def test_close_to_float64(dtype):
    x, _, w = cases(dtype)["width 1024"]
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * w.double()
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    assert (cpu.rmsnorm(x, w, EPS) - exact).abs().max() <= bound * exact.abs().max()


@pytest.mark.parametrize("name", ["width 17", "width 250", "heads"])
def test_backward(name, dtype, check_backward):
    x, residual, w = cases(dtype)[name]
    check_backward(*(lambda x, w, op=op: op(x, w, EPS) for op in (cpu.rmsnorm, reference.rmsnorm)), x, w)
    both = (lambda x, r, w, op=op: op(x, r, w, EPS) for op in (cpu.add_rmsnorm, reference.add_rmsnorm))
    check_backward(*both, x, residual, w)


@pytest.mark.parametrize("used", [0, 1])
def test_backward_of_one_result(used, dtype, check_backward):
    """The last layer drops the sum, and a stage boundary drops the norm."""
    x, residual, w = cases(dtype)["width 64"]
    if used == 1:
        w = w.detach()
    ours, theirs = (lambda x, r, op=op: op(x, r, w, EPS)[used] for op in (cpu.add_rmsnorm, reference.add_rmsnorm))
    check_backward(ours, theirs, x, residual)


def test_the_gate_can_fail():
    """Exchanging two elements of different lanes changes bits of the sum of squares."""
    x, w = normal(1, 64, 250), torch.ones(250)
    order = torch.arange(250)
    order[[3, 101]] = order[[101, 3]]
    assert count_mismatches(cpu.rmsnorm(x, w, EPS)[:, order], cpu.rmsnorm(x[:, order].contiguous(), w, EPS))[0] > 0


def test_refusals():
    x, w = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(NotImplementedError, match="zero_centered"):
        cpu.rmsnorm(x, w, EPS, zero_centered=True)
    with pytest.raises(ValueError, match="does not fit"):
        cpu.rmsnorm(x, torch.ones(7), EPS)
    with pytest.raises(TypeError, match="bfloat16"):
        cpu.rmsnorm(x, w.bfloat16(), EPS)
    with pytest.raises(ValueError, match="residual"):
        cpu.add_rmsnorm(x, torch.ones(3, 8), w, EPS)
