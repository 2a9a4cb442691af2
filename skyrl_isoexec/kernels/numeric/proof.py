"""What a gate collects while it proves: comparisons of bits by name, and how often each hazard occurred.

Nothing is within a tolerance: bits are compared as integers, and only the payload of a NaN is free. A comparison of
nothing and a hazard that did not occur are errors, because such a gate would prove less than it says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from skyrl_isoexec.schedule.bits import bit_view, canonical, count_mismatches

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Name in a check -> dtype that it runs for."""
ROW_COUNTS = (1, 2, 17, 33, 64, 128, 257, 1024)
"""Rows of a batch in which one row must keep its bits."""
DEGREES = (1, 2, 4, 8)
"""Tensor-parallel degrees."""
REPEATS, THREADS = 200, 4
"""Calls that must all give the same bits, some of them at the same time."""

Results = Tensor | tuple[Tensor, ...]


class ProofError(ValueError):
    """A gate that proves nothing: an empty comparison, or a hazard that did not occur."""


@dataclass(kw_only=True)
class Check:
    """All comparisons of one name."""

    comparisons: int = 0
    elements: int = 0
    differing: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    """Of the bits that were expected, in the order of the comparisons."""

    def to_dict(self) -> dict[str, int | str]:
        """Plain data, for a record."""
        return {"comparisons": self.comparisons, "elements": self.elements, "digest": self.digest.hexdigest()}


def _tensors(results: Results) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


class Proof:
    """Checks of one gate. `progress` is told one line when a check is complete, which is when the next one begins."""

    def __init__(self, progress: Callable[[str], None] | None = None) -> None:
        self.checks: dict[str, Check] = {}
        self.hazards: dict[str, int] = {}
        self.failures: list[str] = []
        self._progress, self._current = progress, None

    def equal(self, name: str, expected: Results, found: Results, at: str = "") -> None:
        """Compare bits; what differs is counted and kept in `failures`, `at` says where. ProofError for no elements."""
        self._enter(name)
        pairs = zip(_tensors(expected), _tensors(found), strict=True)
        for a, b in pairs:
            a, b = a.detach(), b.detach()
            if not a.numel():
                raise ProofError(f"{name} {at}: comparing {tuple(a.shape)} with {tuple(b.shape)} proves nothing")
            check = self.checks[name]
            check.comparisons += 1
            check.elements += a.numel()
            check.digest.update(f"{a.dtype} {tuple(a.shape)}\n".encode() + _bytes(a))
            if a.shape != b.shape or a.dtype != b.dtype:
                different, what = a.numel(), f"{b.dtype} {tuple(b.shape)} for {a.dtype} {tuple(a.shape)}"
            else:
                different, _ = count_mismatches(_comparable(a), _comparable(b))
                what = f"{different} of {a.numel()} elements differ"
            check.differing += different
            if different:
                self.failures.append(f"{name}{f', {at}' if at else ''}: {what}")

    def within(self, name: str, found: Tensor, exact: Tensor, bound: Tensor, at: str = "") -> None:
        """Elements no further from their exact values than their bound, all float64; counts as a hazard of the name."""
        far = ~((found.double() - exact).abs() <= bound)
        if far.any():
            self.failures.append(f"{name}{f', {at}' if at else ''}: {int(far.sum())} of {far.numel()} exceed the bound")
        self.reached(name, far.numel())

    def empty(self, name: str, expected: Results, found: Results) -> None:
        """Results of no rows: equal shape and dtype, and no elements; counts as the hazard "<name>: empty"."""
        for a, b in zip(_tensors(expected), _tensors(found), strict=True):
            if a.shape != b.shape or a.dtype != b.dtype or a.numel():
                self.failures.append(f"{name}: {b.dtype} {tuple(b.shape)} for {a.dtype} {tuple(a.shape)}")
        self.reached(f"{name}: empty", 1)

    def reached(self, name: str, count: int | Tensor) -> None:
        """Say how often a hazard occurred; ProofError if it did not."""
        count = int(count)
        if count < 1:
            raise ProofError(f"hazard {name!r} did not occur, so nothing is shown for it")
        self.hazards[name] = self.hazards.get(name, 0) + count

    def autograd(self, name: str, function: Callable[..., Results], *operands: Tensor) -> None:
        """The forward that records a graph gives the bits of the one that does not."""
        with torch.no_grad():
            plain = _tensors(function(*operands))
        recorded = _tensors(function(*(x.detach().clone().requires_grad_() for x in operands)))
        self.reached(f"{name}: graphs recorded", sum(x.requires_grad for x in recorded))
        self.equal(name, plain, recorded)

    def rows(
        self, name: str, function: Callable[..., Results], pool: tuple[Tensor, ...], anchor: tuple[Tensor, ...]
    ) -> None:
        """An anchor row keeps its bits first, in the middle and last among each number of rows of the pool."""
        alone = _tensors(function(*anchor))
        for count in ROW_COUNTS:
            places = sorted({0, count // 2, count - 1})
            batch = [x[:count].clone() for x in pool]
            for x, row in zip(batch, anchor, strict=True):
                x[places] = row
            found = tuple(y[places] for y in _tensors(function(*batch)))
            self.equal(name, tuple(y.expand(len(places), *y.shape[1:]) for y in alone), found, at=f"{count} rows")

    def repeats(self, name: str, function: Callable[[], Results]) -> None:
        """Many calls, some at the same time in other threads, give the bits of the first one."""
        first = function()
        with ThreadPoolExecutor(THREADS) as threads:
            for other in threads.map(lambda _: function(), range(REPEATS)):
                self.equal(name, first, other)

    def finish(self) -> None:
        """Report the last check. ProofError if there was none."""
        if not self.checks:
            raise ProofError("no check was made")
        self._enter(None)

    def _enter(self, name: str | None) -> None:
        if name == self._current:
            return
        if self._current is not None and self._progress is not None:
            check = self.checks[self._current]
            result = f"{check.differing} DIFFER" if check.differing else "equal"
            self._progress(f"{self._current}: {check.comparisons} comparisons, {check.elements} elements: {result}")
        self._current = name
        if name is not None:
            self.checks.setdefault(name, Check())


def _comparable(t: Tensor) -> Tensor:
    return canonical(t) if t.is_floating_point() else t


def _bytes(t: Tensor) -> bytes:
    return bit_view(_comparable(t)).cpu().numpy().tobytes()
