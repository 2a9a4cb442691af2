"""A resharding plan moves every element exactly once, between any two degrees."""

import itertools

import pytest
import torch

from skyrl_isoexec.model.reshard import plan
from skyrl_isoexec.model.shard import Shard


@pytest.mark.parametrize(
    "have, want, dim", [(*sizes, dim) for sizes in itertools.product((1, 2, 3, 4), repeat=2) for dim in (0, 1)]
)
def test_every_element_moves_once(have, want, dim) -> None:
    full = torch.arange(24.0 * 12).view(24, 12)
    source, destination = Shard(dim=dim, parts=have), Shard(dim=dim, parts=want)
    held = [source.slice(full, rank) for rank in range(have)]
    wanted = [torch.full_like(destination.slice(full, rank), float("nan")) for rank in range(want)]
    moved = 0
    for piece in plan(full.shape, source, destination):
        assert wanted[piece.destination].narrow(dim, piece.destination_start, piece.length).isnan().all()
        part = piece.read(held[piece.source])
        piece.write(wanted[piece.destination], part)
        moved += part.numel()
    assert moved == full.numel()
    for rank, tensor in enumerate(wanted):
        assert torch.equal(tensor, destination.slice(full, rank))


@pytest.mark.parametrize("have, want", itertools.product((1, 2, 4), repeat=2))
@pytest.mark.parametrize("dim", [0, 1])
def test_blocks_are_cut_one_by_one(have, want, dim) -> None:
    blocks = (4, 4, 12)
    full = torch.arange(20.0 * 20).view(20, 20)
    source, destination = (Shard(dim=dim, parts=parts, blocks=blocks) for parts in (have, want))
    held = [source.slice(full, rank) for rank in range(have)]
    wanted = [torch.full_like(destination.slice(full, rank), float("nan")) for rank in range(want)]
    for piece in plan(full.shape, source, destination):
        assert wanted[piece.destination].narrow(dim, piece.destination_start, piece.length).isnan().all()
        piece.write(wanted[piece.destination], piece.read(held[piece.source]))
    for rank, tensor in enumerate(wanted):
        assert torch.equal(tensor, destination.slice(full, rank))


def test_whole_tensors_go_to_every_replica() -> None:
    pieces = plan((5,), Shard(), Shard(), replicas=3)
    assert [piece.destination for piece in pieces] == [0, 1, 2]
    target = torch.zeros(5)
    pieces[2].write(target, pieces[2].read(torch.arange(5.0)))
    assert torch.equal(target, torch.arange(5.0))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="dim 0.*dim 1"):
        plan((4, 4), Shard(dim=0, parts=2), Shard(dim=1, parts=2))
    with pytest.raises(ValueError, match=r"blocks \(2, 2\).*blocks \(\)"):
        plan((4, 4), Shard(dim=0, parts=2, blocks=(2, 2)), Shard(dim=0, parts=2))
    with pytest.raises(ValueError, match="not the sum of blocks"):
        plan((6, 4), *[Shard(dim=0, parts=2, blocks=(2, 2))] * 2)
    with pytest.raises(ValueError, match="not divisible by 3"):
        plan((4, 4), Shard(dim=0, parts=3), Shard(dim=0, parts=2))
    with pytest.raises(ValueError, match="replicated|whole"):
        Shard(parts=2)
    piece = plan((4,), Shard(dim=0), Shard(dim=0, parts=2))[1]
    with pytest.raises(ValueError, match="bfloat16"):
        piece.write(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
