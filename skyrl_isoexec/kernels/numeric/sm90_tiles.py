"""The table of admitted tiles of an operator: a plain lookup by shape, made offline, the same in every process.

Notable: nothing is timed or chosen in a run. A table is JSON beside the operator: "made" says on what card and by what
command; for a shape "N K leaves" it has rows [largest M, tiles], and "default" serves the shapes that are not listed.
The first tile that suits the operands is taken. What must stay equal: nothing here, because every tile of a table has
been shown to give the same bits (`scripts/tune_sm90.py`).
"""

import json
from functools import lru_cache
from pathlib import Path

from skyrl_isoexec.kernels.numeric.sm90_product import Tile

LARGEST = 1 << 62
"""Stands for "any M" in the last row of a shape."""


class Table:
    """The tiles of one operator, read once from its file."""

    def __init__(self, path: Path) -> None:
        data = json.loads(path.read_text(encoding="utf-8"))
        self.name = path.parent.name
        self.shapes = {
            shape: [(LARGEST if last is None else last, [Tile.parse(t) for t in tiles]) for last, tiles in rows]
            for shape, rows in data["shapes"].items()
        }
        self.choose = lru_cache(maxsize=65536)(self._choose)

    def tiles(self, num_n: int, num_k: int, num_leaves: int, aligned: bool) -> list[Tile]:
        """Every tile of the table that suits a shape, once, in the order of their names."""
        known = {tile for rows in self.shapes.values() for _last, tiles in rows for tile in tiles}
        return sorted((tile for tile in known if tile.suits(num_n, num_k, num_leaves, aligned)), key=str)

    def _choose(self, num_m: int, num_n: int, num_k: int, num_leaves: int, aligned: bool) -> Tile:
        for shape in (f"{num_n} {num_k} {num_leaves}", "default"):
            for last, tiles in self.shapes.get(shape, ()):
                if num_m <= last:
                    for tile in tiles:
                        if tile.suits(num_n, num_k, num_leaves, aligned):
                            return tile
                    break
        raise ValueError(
            f"{self.name}: no admitted tile for M {num_m}, N {num_n}, K {num_k} in {num_leaves} leaves, "
            f"operands {'' if aligned else 'not '}aligned to 16 bytes"
        )
