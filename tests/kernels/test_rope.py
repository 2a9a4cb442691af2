"""What a rotation refuses and differentiates; its bits are proved by its gate."""

import pytest
import torch

from skyrl_isoexec.kernels.rope import cpu, reference
from skyrl_isoexec.kernels.rope.cases import NUM_POSITIONS, cases, table


def test_backward(dtype, check_backward):
    x, positions, cos_sin = cases(dtype)["head of 64"]
    ours, theirs = (lambda x, op=op: op(x, positions, cos_sin) for op in (cpu.rope, reference.rope))
    check_backward(ours, theirs, x)


@pytest.mark.parametrize("position", [-1, NUM_POSITIONS])
@pytest.mark.parametrize("implementation", [cpu, reference])
def test_a_position_outside_the_table_is_refused(position, implementation):
    positions = torch.tensor([0, position])
    with pytest.raises(IndexError, match=f"position {position} of token 1"):
        implementation.rope(torch.ones(2, 1, 8), positions, table(8))


def test_refusals():
    x, positions = torch.ones(2, 1, 8), torch.arange(2)
    with pytest.raises(ValueError, match="even D"):
        cpu.rope(x, positions, table(6))
    with pytest.raises(ValueError, match="int64"):
        cpu.rope(x, positions.int(), table(8))
    with pytest.raises(TypeError, match="float32"):
        cpu.rope(x, positions, table(8).bfloat16())
