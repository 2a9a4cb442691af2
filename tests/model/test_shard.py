"""How a tensor is cut: every rank's part, the blocks of a part, and the whole again."""

import pytest
import torch

from skyrl_isoexec.model.shard import Shard
from skyrl_isoexec.model.threads import run_ranks

BLOCKS = (4, 8, 12)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("blocks", [(), (24,), BLOCKS])
def test_slices_join_to_the_whole(parts, dim, blocks) -> None:
    full = torch.arange(24.0 * 24).view(24, 24)
    shard = Shard(dim=dim, parts=parts, blocks=blocks)
    slices = [shard.slice(full, rank) for rank in range(parts)]
    assert all(tuple(part.shape) == shard.local_shape(full.shape) for part in slices)
    assert shard.full_shape(slices[0].shape) == full.shape
    assert torch.equal(shard.join(slices), full)
    if parts > 1:  # end to end they are something else, so that a block that is missed shows
        assert torch.equal(torch.cat(slices, dim), full) == (len(blocks) < 2)


def test_a_rank_owns_its_part_of_every_block() -> None:
    full = torch.arange(24)
    shard = Shard(dim=0, parts=4, blocks=BLOCKS)
    assert shard.slice(full, 0).tolist() == [0, 4, 5, 12, 13, 14]
    assert shard.slice(full, 3).tolist() == [3, 10, 11, 21, 22, 23]
    views = shard.split(shard.slice(full, 3))
    assert [view.tolist() for view in views] == [[3], [10, 11], [21, 22, 23]]


def test_parts_are_views_where_they_can_be() -> None:
    full = torch.zeros(24, 2)
    assert Shard(dim=0, parts=2).slice(full, 1).data_ptr() == full[12].data_ptr()
    assert Shard().slice(full, 0) is full and Shard().join([full]) is full
    shard = Shard(dim=0, parts=2, blocks=BLOCKS)
    part = shard.slice(full, 1)
    for view in shard.split(part):
        view += 1
    assert part.sum() == part.numel() and full.sum() == 0
    assert Shard(dim=0, parts=2).split(part)[0] is part


def test_a_gathered_parameter_joins(m) -> None:
    """As an export does it: what the ranks of an axis exchange, in their order."""
    full = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))

    def run(axis):
        shard = Shard(dim=0, parts=axis.size, blocks=BLOCKS)
        return shard.join(axis.stack_gather(shard.slice(full, axis.rank)).unbind(0))

    for size in (1, 2, 4):
        for joined in run_ranks(size, run):
            m.assert_same_bits(joined, full)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"dim": 0, "parts": 0}, "at least 1"),
        ({"dim": 0, "parts": 0, "blocks": (2, 2)}, "at least 1"),
        ({"parts": 2}, "whole tensors have 1 part"),
        ({"blocks": (2, 2)}, "of dim None"),
        ({"dim": 0, "parts": 2, "blocks": (2, 3)}, r"blocks \(2, 3\).*divisible by 2"),
        ({"dim": 0, "parts": 2, "blocks": (4, 0)}, r"blocks \(4, 0\)"),
    ],
)
def test_impossible_cuts_are_refused(fields, words) -> None:
    with pytest.raises(ValueError, match=words):
        Shard(**fields)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(5, 4\) is not divisible by 2"):
        Shard(dim=0, parts=2).local_shape((5, 4))
    with pytest.raises(ValueError, match=r"\(24, 4\) is not the sum of blocks \(4, 8\)"):
        Shard(dim=0, parts=2, blocks=(4, 8)).slice(torch.zeros(24, 4), 0)
    with pytest.raises(RuntimeError):
        Shard(dim=0, parts=2, blocks=(4, 8)).split(torch.zeros(8))
