"""The sum over K of a row-parallel linear is one tree, whoever owns which leaves."""

import pytest
import torch

from skyrl_isoexec.kernels.linear.cpu import linear, pack
from skyrl_isoexec.kernels.numeric.inputs import normal
from skyrl_isoexec.kernels.row_linear import cpu, reference
from skyrl_isoexec.kernels.row_linear.cases import NUM_LEAVES, cases
from skyrl_isoexec.schedule import ReductionTree
from skyrl_isoexec.schedule.bits import count_mismatches


@pytest.mark.parametrize("name", cases(torch.float32))
def test_bits_of_the_reference(name, dtype, same_bits):
    """With and without a packed weight."""
    x, w = cases(dtype)[name]
    expected = reference.row_linear(x, w, NUM_LEAVES)
    assert expected.dtype == torch.float32
    same_bits(cpu.row_linear(x, w, NUM_LEAVES), expected)
    same_bits(cpu.row_linear(x, w, NUM_LEAVES, pack(w)), expected)
    same_bits(reference.row_linear(x, w, NUM_LEAVES, pack(w)), expected)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_degree_computes_the_same_tree(size, dtype, same_bits):
    """Ranks of a tensor-parallel group own subtrees of the leaves; their roots finish the tree."""
    x, w = normal(1, 33, 512, dtype=dtype), normal(2, 70, 512, dtype=dtype)
    tree = ReductionTree(num_leaves=NUM_LEAVES)
    bounds = tree.leaf_bounds(512)
    roots = []
    for rank in range(size):
        owned = tree.owned(rank, size)
        part = slice(bounds[owned[0]][0], bounds[owned[-1]][1])
        roots.append(cpu.row_linear(x[:, part], w[:, part], len(owned), pack(w[:, part])))
    same_bits(cpu.tree_sum(torch.stack(roots)), cpu.row_linear(x, w, NUM_LEAVES))


def test_one_leaf_is_a_linear(dtype, same_bits):
    x, w = cases(dtype)["odd leaf"]
    same_bits(cpu.row_linear(x, w, 1), linear(x, w, None, torch.float32))


def test_a_row_keeps_its_bits(dtype, same_bits):
    """An anchor row first, in the middle and last."""
    w, rows, anchor = normal(1, 64, 512, dtype=dtype), normal(2, 257, 512, dtype=dtype), normal(3, 1, 512, dtype=dtype)
    expected = cpu.row_linear(anchor, w, NUM_LEAVES)
    for count in (1, 2, 17, 33, 64, 128, 257):
        for place in {0, count // 2, count - 1}:
            x = rows[:count].clone()
            x[place] = anchor[0]
            same_bits(cpu.row_linear(x, w, NUM_LEAVES)[place], expected[0])


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
