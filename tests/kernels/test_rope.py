"""A token's rotation depends on its position alone."""

import pytest
import torch

from skyrl_isoexec.kernels.numeric.inputs import normal
from skyrl_isoexec.kernels.rope import cpu, reference
from skyrl_isoexec.kernels.rope.cases import NUM_POSITIONS, cases, table
from skyrl_isoexec.schedule.bits import count_mismatches


@pytest.mark.parametrize("name", cases(torch.float32))
def test_bits_of_the_reference(name, dtype, same_bits):
    same_bits(cpu.rope(*cases(dtype)[name]), reference.rope(*cases(dtype)[name]))


def test_a_row_keeps_its_bits(dtype, same_bits):
    """Alone or among others, contiguous or a slice of a wider tensor."""
    x, positions, cos_sin = normal(1, 257, 4, 64, dtype=dtype), torch.arange(257), table(64)
    whole = cpu.rope(x, positions, cos_sin)
    for t in (0, 1, 128, 256):
        same_bits(cpu.rope(x[t : t + 1], positions[t : t + 1], cos_sin), whole[t : t + 1])
    same_bits(cpu.rope(x[:, 1:3], positions, cos_sin), whole[:, 1:3])
    same_bits(cpu.rope(x.flip(0), positions.flip(0), cos_sin), whole.flip(0))


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


def test_the_gate_can_fail():
    """The neighbouring position gives other bits."""
    x, positions = normal(1, 9, 2, 64), torch.arange(9)
    assert count_mismatches(cpu.rope(x, positions, table(64)), cpu.rope(x, positions + 1, table(64)))[0] > 0
