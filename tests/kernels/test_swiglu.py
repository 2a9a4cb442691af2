"""What silu(gate) * up and x * sigmoid(gate) refuse and differentiate; their bits are proved by their gate."""

import pytest
import torch

from skyrl_isoexec.kernels.numeric import lane_sum
from skyrl_isoexec.kernels.swiglu import cpu, reference
from skyrl_isoexec.kernels.swiglu.cases import cases, sigmoid_cases


def test_backward(dtype, check_backward):
    check_backward(cpu.silu_mul, reference.silu_mul, *cases(dtype)["7 by 33"])
    check_backward(cpu.silu_mul, reference.silu_mul, *cases(dtype)["stacked"])


@pytest.mark.parametrize("kind", ["elements", "tokens"])
@pytest.mark.parametrize("name", ["1 by 1", "7 by 33", "3 by 1100", "stacked"])
def test_backward_of_a_sigmoid(kind, name, dtype, check_backward):
    check_backward(cpu.sigmoid_mul, reference.sigmoid_mul, *sigmoid_cases(dtype)[f"{kind}, {name}"])


@pytest.mark.parametrize("kind", ["elements", "tokens"])
def test_gradients_of_a_sigmoid_are_close_to_float64(kind, gradients):
    operands = sigmoid_cases(torch.float32)[f"{kind}, 7 by 33"]
    exact = gradients(lambda x, gate: x * gate.sigmoid(), *(t.double() for t in operands))
    for a, b in zip(gradients(cpu.sigmoid_mul, *operands), exact, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() <= 2e-6 * b.abs().max()


def test_a_gate_per_token_adds_its_gradient_in_order(gradients, same_bits):
    """16 lanes, then the tree, of products rounded to fp32: a cut of the row would give other bits."""
    x, gate = sigmoid_cases(torch.float32)["tokens, 3 by 1100"]
    _, found = gradients(cpu.sigmoid_mul, x, gate)
    upstream = gradients(lambda x: x * 1.0, x)[0]
    sigmoid = reference.sigmoid(gate)[:, 0]
    same_bits(found[:, 0], lane_sum(upstream * x) * (sigmoid * (1.0 - sigmoid)))
    halves = lane_sum((upstream * x)[:, :550]) + lane_sum((upstream * x)[:, 550:])
    assert not torch.equal(found[:, 0], halves * (sigmoid * (1.0 - sigmoid)))


def test_backward_without_features(gradients):
    dx, dgate = gradients(cpu.sigmoid_mul, torch.ones(3, 0), torch.ones(3, 1))
    assert dx.shape == (3, 0) and dgate.tolist() == [[0.0]] * 3


def test_backward_is_finite_in_the_tails(dtype, gradients):
    assert all(g.isfinite().all() for g in gradients(cpu.silu_mul, *cases(dtype)["tails"]))
    for kind in ("elements", "tokens"):
        assert all(g.isfinite().all() for g in gradients(cpu.sigmoid_mul, *sigmoid_cases(dtype)[f"{kind}, tails"]))


def test_refusals():
    with pytest.raises(ValueError, match="differ in shape"):
        cpu.silu_mul(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(TypeError, match="bfloat16"):
        cpu.silu_mul(torch.ones(2), torch.ones(2).bfloat16())
    for shape in ((3,), (3, 2), (1, 4), (3, 4, 1), (4,), ()):
        with pytest.raises(ValueError, match="neither \\[T, F\\] nor \\[T, 1\\] of x \\(3, 4\\)"):
            cpu.sigmoid_mul(torch.ones(3, 4), torch.ones(shape))
    with pytest.raises(ValueError, match="neither"):
        cpu.sigmoid_mul(torch.tensor(1.0), torch.ones(1))
    with pytest.raises(TypeError, match="x is torch.float32 and gate torch.bfloat16"):
        cpu.sigmoid_mul(torch.ones(3, 4), torch.ones(3, 1).bfloat16())
