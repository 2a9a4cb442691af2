"""How close a norm is, what it refuses and differentiates; its bits are proved by its gate."""

import pytest
import torch

from skyrl_isoexec.kernels.rmsnorm import cpu, reference
from skyrl_isoexec.kernels.rmsnorm.cases import EPS, cases


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
