"""Tensors of single experts on their way into the one tensor that the decoder has of all of them.

Whole tensors are [E, N, K]: a matrix for each expert. A piece is such a matrix, or one of equal parts of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from skyrl_isoexec.model.families.base import Family

NAMED = 3
"""Missing pieces of one tensor that are named."""


class Pieces:
    """Collects pieces, and gives each whole tensor when its last one has come."""

    def __init__(self, family: Family, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`shapes`: of every tensor of the decoder, as `weights.layout` gives them."""
        self.problems: list[str] = []
        self._shapes = shapes
        self._homes = {
            piece: (name, expert, part, len(parts))
            for name, shape in shapes.items()
            for expert, parts in enumerate(family.pieces_of(name, shape[0]))
            for part, piece in enumerate(parts)
        }
        self._begun: dict[str, tuple[torch.Tensor, set[str]]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """What to go on with: the tensor given, where it is no piece, or the whole one that it completes.

        A repeated, misshapen or wrongly typed piece becomes a line of `problems`.
        """
        if name not in self._homes:
            return name, tensor
        home, expert, part, parts = self._homes[name]
        num_experts, num_rows, width = self._shapes[home]
        size = num_rows // parts
        if tuple(tensor.shape) != (size, width):
            self.problems.append(f"{name} has shape {tuple(tensor.shape)}, the configuration gives {(size, width)}")
            return None
        if home not in self._begun:
            self._begun[home] = tensor.new_empty(self._shapes[home]), set()
        whole, have = self._begun[home]
        if name in have or tensor.dtype != whole.dtype:
            why = "was given twice" if name in have else f"is {tensor.dtype}, and others of its layer are {whole.dtype}"
            self.problems.append(f"{name} {why}")
            return None
        whole[expert, part * size : (part + 1) * size].copy_(tensor)
        have.add(name)
        if len(have) < num_experts * parts:
            return None
        del self._begun[home]
        return home, whole

    def missing(self) -> dict[str, str]:
        """Each tensor that has only some of its pieces -> the names of those that have not come."""
        found = {}
        for home, (_, have) in self._begun.items():
            lost = [piece for piece, (name, *_) in self._homes.items() if name == home and piece not in have]
            more = f" and {len(lost) - NAMED} more of this layer" if len(lost) > NAMED else ""
            found[home] = ", ".join(lost[:NAMED]) + more
        return found
