"""All ranks of an axis, or of several, in one process, one thread each: for tests and for checks that need no cluster.

Only one rank runs at a time; ranks change places at each exchange. So kernels need not be thread-safe, and a run is
repeatable. A rank that fails releases the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from skyrl_isoexec.model.axes import Axis

T = TypeVar("T")


class _Group:
    """Ranks that exchange with each other; `turn` is that of all ranks, of whatever group."""

    def __init__(self, size: int, turn: threading.Lock, timeout: float) -> None:
        self.slots: list[torch.Tensor | None] = [None] * size
        self.turn = turn
        self.barrier = threading.Barrier(size, timeout=timeout)

    def meet(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


class ThreadAxis(Axis):
    """One rank of `run_ranks`; valid only inside its own thread."""

    def __init__(self, group: _Group, rank: int, size: int) -> None:
        self.rank, self.size, self._group = rank, size, group
        self.exchanges = 0

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """See `Axis.exchange`; counts its calls in `exchanges`."""
        self.exchanges += 1
        self._group.slots[self.rank] = x.detach()
        self._group.meet()
        out = torch.stack(self._group.slots)
        self._group.meet()
        return out


def run_ranks(size: int, fn: Callable[[Axis], T], *, timeout: float = 60.0) -> list[T]:
    """Call fn(axis) once per rank and return the results in rank order.

    The first failure is raised again here; ranks that wait longer than `timeout` seconds for another fail.
    """
    return run_mesh(size, (size,), fn, timeout=timeout)


def run_mesh(size: int, degrees: Sequence[int], fn: Callable[..., T], *, timeout: float = 60.0) -> list[T]:
    """As `run_ranks`, with fn(*axes): an axis for each degree, over so many neighbouring ranks of all `size`.

    Megatron lays its tensor- and its expert-parallel groups out so. ValueError for a degree that does not divide.
    """
    if any(size % degree for degree in degrees):
        raise ValueError(f"degrees {tuple(degrees)} do not all divide {size} ranks")
    turn = threading.Lock()
    groups = [[_Group(degree, turn, timeout) for _ in range(size // degree)] for degree in degrees]
    results: list[T | None] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        pairs = zip(groups, degrees, strict=True)
        axes = [ThreadAxis(along[rank // degree], rank % degree, degree) for along, degree in pairs]
        with turn:
            try:
                results[rank] = fn(*axes)
            except BaseException as error:
                errors.append(error)
                for group in (group for along in groups for group in along):
                    group.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return results
