"""Rows on their way to the ranks that have their experts, and back.

Every rank sorts its rows by expert, so that those of one owner are neighbours. An owner sorts what comes by expert and,
within one, by the rank that it comes from. Only bytes move: a row of an expert is computed as if it were alone, and the
rows come back in the order in which they went.

Shapes: E experts, of which each of R ranks has F = E / R; S rows of this rank's tokens; P rows that come to its
experts; H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from skyrl_isoexec.model.axes import Axis


class Travel:
    """One way out and back. Any number of rows may be 0, of a rank, of an expert or between two ranks."""

    def __init__(self, axis: Axis, starts_E1: torch.Tensor, expand: Callable[..., torch.Tensor]) -> None:
        """`starts_E1` (int32): where each expert's rows begin among this rank's. Collective; the host waits for counts.

        `expand` is the operator's: with an order of as many rows, it puts them in that order.
        """
        counts_E = starts_E1.diff()
        counts_RF = axis.exchange(counts_E).unflatten(1, (axis.size, -1))[:, axis.rank]  # what comes, from whom
        self.sent: list[int] = counts_E.unflatten(0, (axis.size, -1)).sum(1).tolist()
        self.received: list[int] = counts_RF.sum(1).tolist()
        num_ranks, num_own = counts_RF.shape
        expert_P = torch.arange(num_own, device=counts_E.device).repeat(num_ranks)
        expert_P = expert_P.repeat_interleave(counts_RF.flatten().long(), output_size=sum(self.received))
        self._axis, self._expand = axis, expand
        self._sorted_P = expert_P.argsort(stable=True)
        self._unsorted_P = self._sorted_P.argsort()
        self.starts_F1 = torch.nn.functional.pad(counts_RF.sum(0).cumsum(0), (1, 0)).int()
        """Where the rows of each expert of this rank begin among those that `out` brings."""

    def out(self, x_SH: torch.Tensor) -> torch.Tensor:
        """x_PH: the rows of this rank's experts, sorted by expert."""
        return self._expand(self._axis.all_to_all(x_SH, self.sent, self.received), self._sorted_P)

    def back(self, y_PH: torch.Tensor) -> torch.Tensor:
        """y_SH: the rows of this rank's tokens, where they were."""
        return self._axis.all_to_all(self._expand(y_PH, self._unsorted_P), self.received, self.sent)
