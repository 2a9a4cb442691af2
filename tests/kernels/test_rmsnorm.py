"""How close a norm is, what it refuses and differentiates; its bits are proved by its gate."""

import pytest
import torch

from skyrl_isoexec.kernels.rmsnorm import cpu, reference
from skyrl_isoexec.kernels.rmsnorm.cases import EPS, cases, gated_cases

OFFSETS = pytest.mark.parametrize("offset", [0.0, 1.0])


def exact_norm(x, w, offset):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (w.double() + offset)


@OFFSETS
def test_close_to_float64(dtype, offset):
    x, z, w = cases(dtype)["width 1024"]
    exact = exact_norm(x, w, offset)
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    assert (cpu.rmsnorm(x, w, EPS, offset) - exact).abs().max() <= bound * exact.abs().max()
    gated = exact_norm(x, w, 0.0) * torch.nn.functional.silu(z.double())
    assert (cpu.gated_rmsnorm(x, z, w, EPS) - gated).abs().max() <= bound * gated.abs().max()


def test_the_offset_is_0_unless_given(dtype, same_bits):
    x, residual, w = cases(dtype)["width 250"]
    for op in (cpu, reference):
        same_bits(op.rmsnorm(x, w, EPS), op.rmsnorm(x, w, EPS, 0.0))
        same_bits(op.add_rmsnorm(x, residual, w, EPS)[0], op.add_rmsnorm(x, residual, w, EPS, 0.0)[0])
        assert not torch.equal(op.rmsnorm(x, w, EPS), op.rmsnorm(x, w, EPS, 1.0))


@OFFSETS
@pytest.mark.parametrize("name", ["width 17", "width 250", "heads"])
def test_backward(name, offset, dtype, check_backward):
    x, residual, w = cases(dtype)[name]
    check_backward(*(lambda x, w, op=op: op(x, w, EPS, offset) for op in (cpu.rmsnorm, reference.rmsnorm)), x, w)
    both = (lambda x, r, w, op=op: op(x, r, w, EPS, offset) for op in (cpu.add_rmsnorm, reference.add_rmsnorm))
    check_backward(*both, x, residual, w)


@pytest.mark.parametrize("name", ["width 17", "width 250", "heads"])
def test_backward_with_a_gate(name, dtype, check_backward):
    ours, theirs = (lambda x, z, w, op=op: op.gated_rmsnorm(x, z, w, EPS) for op in (cpu, reference))
    check_backward(ours, theirs, *gated_cases(dtype)[name])


@OFFSETS
def test_gradients_are_close_to_float64(offset, gradients):
    x, z, w = cases(torch.float32)["width 250"]

    def exact_gated(x, z, w):
        return exact_norm(x, w, 0.0) * torch.nn.functional.silu(z.double())

    for ours, theirs, operands in (
        (lambda x, w: cpu.rmsnorm(x, w, EPS, offset), lambda x, w: exact_norm(x, w, offset), (x, w)),
        (lambda x, z, w: cpu.gated_rmsnorm(x, z, w, EPS), exact_gated, (x, z, w)),
    ):
        exact = gradients(theirs, *(t.double() for t in operands))
        for a, b in zip(gradients(ours, *operands), exact, strict=True):
            assert (a - b).abs().max() <= 2e-6 * b.abs().max()


def test_backward_is_finite_in_the_tails(dtype, gradients):
    """Where the gate's exponential overflows."""
    operands = gated_cases(dtype)["tails"]
    assert (operands[1] < -89).any()
    assert all(g.isfinite().all() for g in gradients(lambda *t: cpu.gated_rmsnorm(*t, EPS), *operands))


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
    for offset in (0.5, -1.0, 1, True, float("nan"), None):
        for call in (lambda o: cpu.rmsnorm(x, w, EPS, o), lambda o: reference.add_rmsnorm(x, x, w, EPS, o)):
            with pytest.raises(ValueError, match=f"offset {offset!r} is none of"):
                call(offset)
    with pytest.raises(ValueError, match="does not fit"):
        cpu.rmsnorm(x, torch.ones(7), EPS)
    with pytest.raises(TypeError, match="bfloat16"):
        cpu.rmsnorm(x, w.bfloat16(), EPS)
    with pytest.raises(ValueError, match="residual"):
        cpu.add_rmsnorm(x, torch.ones(3, 8), w, EPS)
    with pytest.raises(ValueError, match="z \\(2, 1\\) torch.float32 is not like x \\(2, 8\\)"):
        cpu.gated_rmsnorm(x, x[:, :1], w, EPS)
    with pytest.raises(ValueError, match="z .* torch.bfloat16 is not like x .* torch.float32"):
        cpu.gated_rmsnorm(x, x.bfloat16(), w, EPS)
    with pytest.raises(ValueError, match="gated_rmsnorm: w .* does not fit"):
        cpu.gated_rmsnorm(x, x, torch.ones(7), EPS)
