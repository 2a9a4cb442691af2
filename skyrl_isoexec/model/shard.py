"""How a parameter is cut over a mesh axis, as data that travels with the parameter (`parameter.shard`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Equal contiguous parts of one dim over one mesh axis; rank r owns part r.

    With `blocks`, the dim is a sequence of blocks that are each cut so: rank r owns part r of every block, end to end.
    """

    dim: int | None = None
    """Tensor dim that is cut; None means that every rank holds the whole tensor."""
    parts: int = 1
    axis: str = "tp"
    """`tp`, or `ep` for experts whose tokens travel to them."""
    blocks: tuple[int, ...] = ()
    """Sizes in the whole tensor; empty for one block."""

    def __post_init__(self) -> None:
        if self.parts < 1 or (self.dim is None and self.parts != 1):
            raise ValueError(f"Shard(dim={self.dim}, parts={self.parts}): whole tensors have 1 part, others at least 1")
        if self.blocks and (self.dim is None or any(size < 1 or size % self.parts for size in self.blocks)):
            raise ValueError(f"blocks {self.blocks} of dim {self.dim} are not each divisible by {self.parts} parts")

    def full_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole tensor from the shape of one part."""
        return tuple(size * self.parts if d == self.dim else size for d, size in enumerate(local))

    def local_shape(self, full: Sequence[int]) -> tuple[int, ...]:
        """Shape of one part; ValueError if the dim does not divide, or is not the sum of its blocks."""
        if self.blocks and full[self.dim] != sum(self.blocks):
            raise ValueError(f"dim {self.dim} of shape {tuple(full)} is not the sum of blocks {self.blocks}")
        if self.dim is not None and full[self.dim] % self.parts:
            raise ValueError(f"dim {self.dim} of shape {tuple(full)} is not divisible by {self.parts} parts")
        return tuple(size // self.parts if d == self.dim else size for d, size in enumerate(full))

    def slice(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """Rank's part of the whole tensor: a view, unless it has several blocks."""
        if self.dim is None:
            return full
        size = self.local_shape(full.shape)[self.dim]
        if not self.blocks:
            return full.narrow(self.dim, rank * size, size)
        blocks = full.split(self.blocks, self.dim)
        return torch.cat([_part(block, self.dim, self.parts, rank) for block in blocks], self.dim)

    def split(self, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of a part's blocks; the part itself where it is one."""
        if not self.blocks:
            return (local,)
        return local.split([size // self.parts for size in self.blocks], self.dim)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor from all ranks' parts, in order of rank: the inverse of `slice`."""
        if self.dim is None:
            return parts[0]
        by_block = zip(*(self.split(part) for part in parts), strict=True)
        return torch.cat([piece for block in by_block for piece in block], self.dim)


def _part(block: torch.Tensor, dim: int, parts: int, rank: int) -> torch.Tensor:
    size = block.shape[dim] // parts
    return block.narrow(dim, rank * size, size)
