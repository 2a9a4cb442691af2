"""The order of arithmetic is data that refuses what it cannot express."""

import dataclasses

import pytest
import torch

from skyrl_isoexec.schedule import ReductionTree, Schedule
from skyrl_isoexec.schedule.bits import bit_view, canonical, count_mismatches


def test_leaves_are_contiguous_and_ranks_own_subtrees():
    tree = ReductionTree(num_leaves=8)
    assert tree.leaf_bounds(24) == [(i * 3, i * 3 + 3) for i in range(8)]
    for size in (1, 2, 4, 8):
        assert [leaf for rank in range(size) for leaf in tree.owned(rank, size)] == list(range(8))
    assert tree.owned(1, 4) == range(2, 4)


@pytest.mark.parametrize("num_leaves", [0, 3, -2, 12])
def test_leaves_are_a_power_of_two(num_leaves):
    with pytest.raises(ValueError, match=f"num_leaves {num_leaves}"):
        ReductionTree(num_leaves=num_leaves)


def test_tree_refusals_name_both_values():
    tree = ReductionTree(num_leaves=4)
    with pytest.raises(ValueError, match="10.*num_leaves 4"):
        tree.leaf_bounds(10)
    for size in (3, 8, 0):
        with pytest.raises(ValueError, match=f"{size} ranks.*num_leaves 4"):
            tree.owned(0, size)
    with pytest.raises(ValueError, match="rank 2"):
        tree.owned(2, 2)


def test_schedule_round_trip():
    schedule = Schedule(num_leaves=4, kv_block=32, kv_partition=256)
    assert Schedule.from_dict(schedule.to_dict()) == schedule
    assert schedule.tree == ReductionTree(num_leaves=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.num_leaves = 2


def test_schedule_is_strict():
    data = Schedule().to_dict()
    with pytest.raises(ValueError, match="unknown keys \\['kv_blocks'\\], missing keys \\['kv_block'\\]"):
        Schedule.from_dict({**{k: v for k, v in data.items() if k != "kv_block"}, "kv_blocks": 16})
    for wrong in ({"kv_partition": 24}, {"num_leaves": 3}, {"kv_block": 0}, {"kv_block": True}, {"kv_block": 16.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Schedule.from_dict({**data, **wrong})


def test_bits_see_what_floats_do_not():
    zeros, minus = torch.zeros(3), -torch.zeros(3)
    assert count_mismatches(zeros, minus) == (3, 3)
    nan = torch.full((2,), float("nan"))
    other = (bit_view(nan) | 1).view(torch.float32)
    assert count_mismatches(nan, nan) == (0, 2) and count_mismatches(nan, other) == (2, 2)
    assert count_mismatches(canonical(nan), canonical(other)) == (0, 2)
    assert bit_view(torch.zeros(2, dtype=torch.bfloat16)).dtype == torch.int16


def test_comparisons_that_prove_nothing_are_refused():
    with pytest.raises(ValueError, match="empty"):
        count_mismatches(torch.zeros(0), torch.zeros(0))
    with pytest.raises(ValueError, match="cannot compare"):
        count_mismatches(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="cannot compare"):
        count_mismatches(torch.zeros(2), torch.zeros(2).double())
