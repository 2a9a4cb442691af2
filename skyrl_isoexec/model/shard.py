"""How a parameter is cut over a mesh axis, as data that travels with the parameter (`parameter.shard`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Equal contiguous parts of one dim over one mesh axis; rank r owns part r."""

    dim: int | None = None
    """Tensor dim that is cut; None means that every rank holds the whole tensor."""
    parts: int = 1
    axis: str = "tp"

    def __post_init__(self) -> None:
        if self.parts < 1 or (self.dim is None and self.parts != 1):
            raise ValueError(f"Shard(dim={self.dim}, parts={self.parts}): whole tensors have 1 part, others at least 1")

    def full_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole tensor from the shape of one part."""
        return tuple(size * self.parts if d == self.dim else size for d, size in enumerate(local))

    def local_shape(self, full: Sequence[int]) -> tuple[int, ...]:
        """Shape of one part; ValueError if the dim does not divide."""
        if self.dim is not None and full[self.dim] % self.parts:
            raise ValueError(f"dim {self.dim} of shape {tuple(full)} is not divisible by {self.parts} parts")
        return tuple(size // self.parts if d == self.dim else size for d, size in enumerate(full))

    def slice(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """View of rank's part of the whole tensor."""
        if self.dim is None:
            return full
        size = self.local_shape(full.shape)[self.dim]
        return full.narrow(self.dim, rank * size, size)
