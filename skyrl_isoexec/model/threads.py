"""All ranks of an axis in one process, one thread each: for tests and for checks that need no cluster.

Only one rank runs at a time; ranks change places at each exchange. So kernels need not be thread-safe, and a run is
repeatable. A rank that fails releases the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from skyrl_isoexec.model.axes import Axis

T = TypeVar("T")


class _Group:
    def __init__(self, size: int, timeout: float) -> None:
        self.slots: list[torch.Tensor | None] = [None] * size
        self.turn = threading.Lock()
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
    group = _Group(size, timeout)
    results: list[T | None] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        with group.turn:
            try:
                results[rank] = fn(ThreadAxis(group, rank, size))
            except BaseException as error:
                errors.append(error)
                group.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return results
