"""What a rotation refuses and differentiates; its bits are proved by its gate."""

import pytest
import torch

from skyrl_isoexec.kernels.rope import cpu, reference
from skyrl_isoexec.kernels.rope.cases import NUM_POSITIONS, cases, table


@pytest.mark.parametrize("name", ["head of 64", "16 of 64", "4 of 7"])
def test_backward(name, dtype, check_backward, gradients, same_bits):
    """The rest of a head gets its gradient bit by bit."""
    x, positions, cos_sin = cases(dtype)[name]
    ours, theirs = (lambda x, op=op: op(x, positions, cos_sin) for op in (cpu.rope, reference.rope))
    check_backward(ours, theirs, x)
    rotated = cos_sin.shape[1]
    if rotated < x.shape[2]:
        upstream = gradients(lambda x: x * 1.0, x)[0]
        same_bits(gradients(ours, x)[0][..., rotated:], upstream[..., rotated:])


def test_a_partial_rotation_is_a_whole_one_of_its_part(dtype, same_bits):
    x, positions, cos_sin = cases(dtype)["64 of 256"]
    y = cpu.rope(x, positions, cos_sin)
    same_bits(y[..., :64], cpu.rope(x[..., :64].contiguous(), positions, cos_sin))
    same_bits(y[..., 64:], x[..., 64:])


@pytest.mark.parametrize("position", [-1, NUM_POSITIONS])
@pytest.mark.parametrize("implementation", [cpu, reference])
def test_a_position_outside_the_table_is_refused(position, implementation):
    positions = torch.tensor([0, position])
    with pytest.raises(IndexError, match=f"position {position} of token 1"):
        implementation.rope(torch.ones(2, 1, 8), positions, table(8))


def test_refusals():
    x, positions = torch.ones(2, 1, 8), torch.arange(2)
    for width in (0, 7, 9, 10):
        with pytest.raises(ValueError, match=f"table \\(300, {width}\\) are not .* even R from 2 to D"):
            cpu.rope(x, positions, torch.ones(NUM_POSITIONS, width))
    with pytest.raises(ValueError, match="even R"):
        cpu.rope(torch.ones(2, 1, 1), positions, table(2))
    with pytest.raises(ValueError, match="int64"):
        cpu.rope(x, positions.int(), table(8))
    with pytest.raises(TypeError, match="float32"):
        cpu.rope(x, positions, table(8).bfloat16())
