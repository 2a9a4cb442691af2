"""Which case the step in hand is, and what computed it: Python, or a captured graph that runs no Python.

vLLM describes every batch to the attention backend's builder, then calls the model or replays a graph of it, and then
asks for logits. These three calls are all that is needed: `begin`, `forward`, `end`. Needs no vLLM.

What must stay equal: a step that a graph computes is held to the same readiness, and counted for the same operators, as
one that Python computes. Those operators were recorded when the graph was captured, in a rehearsal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from skyrl_isoexec.kernels.bundle import Kernels

REHEARSED = "rehearsed"
"""In the place of a case: what was computed on dummy rows, to warm up or to be captured. It serves nobody."""


class Steps:
    """The steps of one engine worker. `ready` raises if the weights in place must not be computed with."""

    def __init__(self, kernels: Kernels, ready: Callable[[], None]) -> None:
        self.kernels, self.ready = kernels, ready
        self.replays = 0
        """Steps that a captured graph has computed."""
        self.rehearsing = False
        """Whether batches are dummies now."""
        self._replayed_case: str | None = None

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Batches of this context are dummies: nobody is served by them."""
        self.rehearsing = True
        try:
            yield
        finally:
            self.rehearsing, self._replayed_case, self.kernels.case = False, None, None

    def begin(self, case: str) -> None:
        """A batch was described; either `forward` follows, or a graph is replayed."""
        if self.rehearsing:
            return
        self.ready()
        self.kernels.case = self._replayed_case = case

    def forward(self, case: str | None) -> None:
        """The model's Python runs, for a batch of `case`; None for a dummy without a cache."""
        self._replayed_case = None
        if case is not None:
            self.ready()
        self.kernels.case = REHEARSED if self.rehearsing and case is not None else case

    def end(self) -> None:
        """The layers have been computed. RuntimeError if that was neither by Python nor by a graph of a rehearsal."""
        if self.rehearsing:
            self.kernels.case = None  # logits are computed outside of graphs, and counted in the steps themselves
        if self._replayed_case is None:
            return
        cases = self.kernels.tally.cases
        if not cases.get(REHEARSED):
            raise RuntimeError(
                "a step was computed by a graph of which no operator was recorded; start the engine anew"
            )
        cases[self._replayed_case].update(cases[REHEARSED])
        self.replays, self._replayed_case = self.replays + 1, None


def without_rehearsal(served: Mapping[str, str]) -> dict[str, str]:
    """Served facts of steps alone."""
    return {name: module for name, module in served.items() if not name.endswith(f".{REHEARSED}")}
