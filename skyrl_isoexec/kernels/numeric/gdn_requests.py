"""Requests of a gated delta rule in a gate or a test: their rows, step by step, over pages that are full of NaN.

Shapes: T tokens, V value heads, D their width, R requests, P pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric import gdn_cases
from skyrl_isoexec.kernels.numeric.gdn_cases import Case
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.kernels.numeric.proof import Proof
from skyrl_isoexec.schedule import Schedule

Live = Callable[[Sequence[Tensor], Tensor, int, Schedule], tuple[Tensor, ...]]
Span = tuple[int, int, int]
"""Request, and its positions from and to."""


def ints(*values: int) -> Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is proved."""

    proof: Proof
    impl: ModuleType
    schedule: Schedule
    label: str
    dtype: torch.dtype
    definition: ModuleType | None
    live: Live | None
    """Of `states`, `pages` and `position`: what pages that hold the state after as many tokens carry."""
    heads: GdnHeads
    """Four key heads or a multiple."""

    @property
    def few(self) -> GdnHeads:
        """One key head of `heads`, for proofs of many rows."""
        return replace(self.heads, num_key_heads=1, num_value_heads=self.heads.group)

    def packed(self, case: Case) -> Tensor:
        """o [T, V, D] of a case."""
        given, cu = gdn_cases.rows(case, self.dtype)
        return self.impl.gdn(*given, cu, case.heads, schedule=self.schedule)

    def equal(self, name: str, expected: Tensor, found: Tensor, at: str = "") -> None:
        """Compare bits under this label."""
        self.proof.equal(f"{self.label} {name}", expected, found, at=at)

    def reached(self, name: str, count: int) -> None:
        """Say how often a hazard occurred, under this label."""
        self.proof.reached(f"{self.label} {name}", count)


class Paged:
    """The requests of a case, whose states go on in shuffled pages among memory full of NaN."""

    def __init__(self, s: Subject, case: Case, page_size: int, impl: ModuleType | None = None, **kind: bool) -> None:
        self.impl, self.case, self.page_size, self.schedule = impl or s.impl, case, page_size, s.schedule
        self.rows, cu = gdn_cases.rows(case, s.dtype)
        self.starts = cu.tolist()
        shapes = self.impl.gdn_states(case.heads, case.conv_width, s.dtype, schedule=s.schedule)
        self.states, self.table = gdn_cases.pages(shapes, case.lengths, page_size, **kind)

    def of(self, whole: Tensor, spans: Sequence[Span]) -> Tensor:
        """The rows of some spans."""
        return torch.cat([whole[self.starts[r] + lo : self.starts[r] + hi] for r, lo, hi in spans])

    def step(self, spans: Sequence[Span], table: Tensor | None = None) -> Tensor:
        """One step of some requests, through pages of their own or those of `table`: o of the spans' rows."""
        starts = torch.tensor([0, *(hi - lo for _, lo, hi in spans)]).cumsum(0).int()
        table = self.table[[r for r, _, _ in spans]] if table is None else table
        rows = [self.of(t, spans) for t in self.rows[:3]]
        return self.advance(rows, table, starts, ints(*(hi for _, _, hi in spans)))

    def advance(
        self, rows: Sequence[Tensor], table: Tensor, starts: Tensor, lengths: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """The same of x, a, b and a batch that are given."""
        return self.impl.gdn_paged(
            *rows, *self.rows[3:], self.states, table, starts, lengths, self.page_size, self.case.heads, out,
            schedule=self.schedule,
        )  # fmt: skip

    def whole(self) -> list[Span]:
        """Every request from its start to its end."""
        return [(r, 0, n) for r, n in enumerate(self.case.lengths)]

    def unused(self) -> list[int]:
        """Pages that no request has."""
        used = set(self.table.flatten().tolist())
        return [page for page in range(len(self.states[0])) if page not in used]

    def carried(self, live: Live, length: int) -> tuple[Tensor, ...]:
        """What all pages carry of requests that are all `length` long."""
        found: list[Tensor] = []
        for j in range(-(-length // self.page_size)):
            position = min(length, (j + 1) * self.page_size)
            found += live(self.states, self.table[:, j].long(), position, self.schedule)
        return tuple(found)
