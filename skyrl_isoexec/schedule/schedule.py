"""The numbers that decide the order of arithmetic of every operator: both sides of a run must hold the same ones."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from skyrl_isoexec.schedule.tree import ReductionTree


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Order of arithmetic of one run; two runs with different schedules may differ in every bit."""

    num_leaves: int = 1
    """Leaves of the reduction tree over K of a row-parallel linear, and over the vocabulary (a power of two)."""
    kv_block: int = 16
    """Positions per block of the online softmax."""
    kv_partition: int = 512
    """Positions per partition of the softmax, counted from the sequence's start; a multiple of `kv_block`."""
    gdn_chunk: int = 64
    """Rows per chunk of a gated delta rule, counted from the sequence's start; a power of two, at least 16."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ValueError(f"schedule.{field.name} {value!r} is not a positive integer")
        if self.kv_partition % self.kv_block:
            raise ValueError(
                f"schedule.kv_partition {self.kv_partition} is not a multiple of schedule.kv_block {self.kv_block}"
            )
        if self.gdn_chunk < 16 or self.gdn_chunk & (self.gdn_chunk - 1):
            raise ValueError(f"schedule.gdn_chunk {self.gdn_chunk} is not a power of two of at least 16")
        _ = self.tree

    @property
    def tree(self) -> ReductionTree:
        """The tree over `num_leaves`."""
        return ReductionTree(num_leaves=self.num_leaves)

    def to_dict(self) -> dict[str, int]:
        """Plain data, for a contract."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Schedule":
        """The inverse of `to_dict`; ValueError names every unknown and every missing key."""
        known = {field.name for field in fields(cls)}
        unknown, missing = sorted(data.keys() - known), sorted(known - data.keys())
        if unknown or missing:
            raise ValueError(f"schedule: unknown keys {unknown}, missing keys {missing}; known are {sorted(known)}")
        return cls(**data)
