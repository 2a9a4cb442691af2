"""Which bytes go where when a tensor cut in one way is wanted cut in another: trainer to engine, any two degrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skyrl_isoexec.model.shard import Shard


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One contiguous run of rows (of `dim`) that source rank holds and destination rank wants."""

    source: int
    destination: int
    dim: int | None
    """None: the whole tensor."""
    source_start: int
    destination_start: int
    length: int

    def read(self, local: torch.Tensor) -> torch.Tensor:
        """View of the piece in the source rank's part."""
        return local if self.dim is None else local.narrow(self.dim, self.source_start, self.length)

    def write(self, local: torch.Tensor, piece: torch.Tensor) -> None:
        """Copy the piece into the destination rank's part."""
        target = local if self.dim is None else local.narrow(self.dim, self.destination_start, self.length)
        if target.shape != piece.shape or target.dtype != piece.dtype:
            raise ValueError(f"piece {piece.dtype} {tuple(piece.shape)} into {target.dtype} {tuple(target.shape)}")
        target.copy_(piece)


def plan(full_shape: Sequence[int], source: Shard, destination: Shard, *, replicas: int | None = None) -> list[Piece]:
    """Pieces that fill every destination rank, each element once, ordered by destination, then by start.

    Both shards must cut the same dim (or none) and the same blocks of it. A whole tensor comes from source rank 0 and
    goes to each of `replicas` destination ranks (default: the destination's parts).
    """
    if source.dim is None and destination.dim is None:
        count = destination.parts if replicas is None else replicas
        whole = {"source": 0, "dim": None, "source_start": 0, "destination_start": 0, "length": 0}
        return [Piece(destination=rank, **whole) for rank in range(count)]
    if (source.dim, source.blocks) != (destination.dim, destination.blocks):
        raise ValueError(
            f"source cuts dim {source.dim} in blocks {source.blocks}, destination dim {destination.dim} in blocks "
            f"{destination.blocks}"
        )
    dim = source.dim
    for shard in (source, destination):
        shard.local_shape(full_shape)  # refuses what does not divide
    pieces = []
    for rank in range(destination.parts):
        offset = 0
        for size in source.blocks or (full_shape[dim],):
            have, want = size // source.parts, size // destination.parts
            start, stop = rank * want, (rank + 1) * want
            while start < stop:
                owner = start // have
                end = min(stop, (owner + 1) * have)
                pieces.append(
                    Piece(
                        source=owner,
                        destination=rank,
                        dim=dim,
                        source_start=offset // source.parts + start - owner * have,
                        destination_start=offset // destination.parts + start - rank * want,
                        length=end - start,
                    )
                )
                start = end
            offset += size
    return pieces
