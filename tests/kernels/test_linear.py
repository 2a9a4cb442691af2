"""What a linear refuses, packs and differentiates; its bits are proved by its gate."""

import pytest
import torch

from skyrl_isoexec.kernels.linear import cpu, reference
from skyrl_isoexec.kernels.linear.cases import cases
from skyrl_isoexec.kernels.numeric.inputs import normal


@pytest.mark.parametrize("name", cases(torch.float32))
def test_the_definition_reads_a_packed_weight(name, dtype, same_bits):
    x, w, bias = cases(dtype)[name]
    same_bits(reference.linear(x, w, bias, None, reference.pack(w)), reference.linear(x, w, bias))


def test_pack_keeps_its_address(dtype, same_bits):
    """A refresh writes into the old buffer, and a buffer of another shape is refused."""
    old, new = normal(1, 37, 20, dtype=dtype), normal(2, 37, 20, dtype=dtype)
    packed = cpu.pack(old)
    address = packed.data_ptr()
    assert cpu.pack(new, packed).data_ptr() == address
    same_bits(packed, cpu.pack(new))
    with pytest.raises(ValueError, match="pack: out"):
        cpu.pack(new[:, :19], packed)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((torch.ones(2, 3, 4), torch.ones(5, 4)), ValueError),
        ((torch.ones(3, 4), torch.ones(5, 6)), ValueError),
        ((torch.ones(3, 4), torch.ones(5, 4).bfloat16()), TypeError),
        ((torch.ones(3, 4).half(), torch.ones(5, 4).half()), TypeError),
        ((torch.ones(3, 4), torch.ones(5, 4), torch.ones(6)), ValueError),
        ((torch.ones(3, 4), torch.ones(5, 4), None, torch.float64), TypeError),
        ((torch.ones(3, 4), torch.ones(5, 4), None, None, torch.ones(1, 4, 8)), ValueError),
        ((torch.ones(3, 4, device="meta"), torch.ones(5, 4, device="meta")), ValueError),
    ],
)
def test_refusals(arguments, error):
    """Three dimensions, shapes and dtypes that do not fit, and memory that is not the CPU's."""
    with pytest.raises(error):
        cpu.linear(*arguments)


def test_backward(dtype, check_backward):
    check_backward(cpu.linear, reference.linear, *(a[:17] for a in cases(dtype)["odd"]))


def test_backward_of_an_fp32_result(dtype, check_backward):
    """The head: fp32 gradients come back for operands of either dtype."""
    x, w, _ = cases(dtype)["odd"]
    ours, theirs = (lambda x, w, op=op: op(x, w, None, torch.float32) for op in (cpu.linear, reference.linear))
    check_backward(ours, theirs, x, w)


def test_only_wanted_gradients(dtype):
    """A frozen weight gets none."""
    x, w, bias = cases(dtype)["odd"]
    cpu.linear(x.requires_grad_(), w, bias).sum().backward()
    assert x.grad is not None and w.grad is None and bias.grad is None


def test_products_round_before_they_are_added():
    """x * x - round(x * x) is 0, and would not be if product and sum were fused."""
    x = normal(1, 64, 1)
    rounded = x * x
    assert (rounded.double() != x.double() ** 2).any()
    for t in range(64):
        y = cpu.linear(torch.cat([x[t], -rounded[t]])[None], torch.stack([torch.cat([x[t], torch.ones(1)])]))
        assert y.item() == 0.0
