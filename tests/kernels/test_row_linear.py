"""What leaves mean to a row-parallel linear, what it refuses and differentiates; its bits are proved by its gate."""

import pytest
import torch

from skyrl_isoexec.kernels.linear.cpu import linear, pack
from skyrl_isoexec.kernels.numeric.inputs import normal
from skyrl_isoexec.kernels.row_linear import cpu, reference
from skyrl_isoexec.kernels.row_linear.cases import NUM_LEAVES, cases
from skyrl_isoexec.schedule.bits import count_mismatches


def test_the_definition_reads_a_packed_weight(dtype, same_bits):
    x, w = cases(dtype)["odd leaf"]
    same_bits(reference.row_linear(x, w, 8, pack(w)), reference.row_linear(x, w, 8))


def test_one_leaf_is_a_linear(dtype, same_bits):
    x, w = cases(dtype)["odd leaf"]
    same_bits(cpu.row_linear(x, w, 1), linear(x, w, None, torch.float32))


def test_leaves_matter():
    """Another number of leaves is another order: the gate can fail."""
    x, w = normal(1, 8, 256), normal(2, 32, 256)
    for other in (1, 2, 4):
        assert count_mismatches(cpu.row_linear(x, w, 8), cpu.row_linear(x, w, other))[0] > 0
    order = torch.arange(256)
    order[[3, 200]] = order[[200, 3]]
    assert count_mismatches(cpu.row_linear(x, w, 8), cpu.row_linear(x[:, order], w[:, order], 8))[0] > 0


def test_refusals():
    """A K that the leaves do not divide, a number of parts that is no power of two, rounded parts."""
    with pytest.raises(ValueError, match="10.*num_leaves 4"):
        cpu.row_linear(torch.ones(2, 10), torch.ones(3, 10), 4)
    with pytest.raises(ValueError, match="not a power of two"):
        cpu.row_linear(torch.ones(2, 12), torch.ones(3, 12), 3)
    with pytest.raises(ValueError, match="not \\[T, K\\]"):
        cpu.row_linear(torch.ones(2, 2, 12), torch.ones(3, 12), 2)
    with pytest.raises(ValueError, match="not a power of two"):
        cpu.tree_sum(torch.ones(3, 2, 2))
    with pytest.raises(TypeError, match="not float32"):
        cpu.tree_sum(torch.ones(2, 2, 2).bfloat16())


def test_backward(dtype, check_backward):
    x, w = cases(dtype)["odd leaf"]
    check_backward(
        lambda x, w: cpu.row_linear(x, w, NUM_LEAVES), lambda x, w: reference.row_linear(x, w, NUM_LEAVES), x, w
    )
    check_backward(cpu.tree_sum, lambda parts: parts.sum(0), normal(1, 4, 3, 5))
