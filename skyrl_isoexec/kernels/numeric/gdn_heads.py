"""Heads of one rank's gated delta rule: how its channels are cut."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GdnHeads:
    """Value head j uses key head j // `group`; channels are ordered queries, keys, values."""

    num_key_heads: int
    num_value_heads: int
    key_width: int
    value_width: int

    def __post_init__(self) -> None:
        for name in ("num_key_heads", "num_value_heads", "key_width", "value_width"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"GdnHeads.{name} = {value!r} is not a positive integer")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"GdnHeads.num_value_heads = {self.num_value_heads} is not a multiple of num_key_heads = "
                f"{self.num_key_heads}"
            )

    @property
    def group(self) -> int:
        """Value heads of one key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of the queries, of the keys and of the values."""
        key = self.num_key_heads * self.key_width
        return key, key, self.num_value_heads * self.value_width

    @property
    def channels(self) -> int:
        """All channels: C = 2 Hk Dk + Hv Dv."""
        return sum(self.widths)
