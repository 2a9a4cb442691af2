"""A balanced binary tree over contiguous leaves of a dimension: how a sum that crosses ranks is ordered.

What must stay equal: the tree is a function of the dimension and the number of leaves, never of the number of ranks. A
rank owns a subtree, so that its partial sum is one node of the same tree at every degree.
"""

from dataclasses import dataclass


def is_power_of_two(n: int) -> bool:
    """Whether n is 1, 2, 4, ..."""
    return n > 0 and n & (n - 1) == 0


@dataclass(frozen=True, kw_only=True)
class ReductionTree:
    """Leaves are summed on their own, then added as neighbours, lower index on the left, until one is left."""

    num_leaves: int
    """A power of two, at least the largest parallel degree of either side."""

    def __post_init__(self) -> None:
        if not is_power_of_two(self.num_leaves):
            raise ValueError(f"num_leaves {self.num_leaves} is not a power of two")

    def leaf_bounds(self, size: int) -> list[tuple[int, int]]:
        """Half-open intervals of the leaves of a dimension of `size`; ValueError unless num_leaves divides it."""
        if size % self.num_leaves:
            raise ValueError(f"a dimension of {size} cannot be cut into num_leaves {self.num_leaves} equal leaves")
        width = size // self.num_leaves
        return [(leaf * width, (leaf + 1) * width) for leaf in range(self.num_leaves)]

    def owned(self, rank: int, size: int) -> range:
        """Leaves of `rank` of `size` ranks: a subtree. ValueError unless size is a power of two <= num_leaves."""
        if not is_power_of_two(size) or size > self.num_leaves:
            raise ValueError(
                f"{size} ranks cannot own subtrees of num_leaves {self.num_leaves}: not a smaller power of two"
            )
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of {size} ranks")
        width = self.num_leaves // size
        return range(rank * width, (rank + 1) * width)
