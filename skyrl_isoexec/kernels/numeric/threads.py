"""One call's rows or heads on several threads, as many as torch has in this process: `torch.set_num_threads`.

Notable: the parts of a call write different memory and each is computed as it would be alone, so neither how many there
are nor which thread has which can change a bit. The threads are made when they are first needed; a forked process makes
its own. They round as the thread that made them did then, which `kernels.witness` reads back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
_POOLS: dict[tuple[int, int], ThreadPoolExecutor] = {}
"""(process, number of threads beside the caller's) -> these threads."""


def _pool() -> ThreadPoolExecutor:
    key = (os.getpid(), torch.get_num_threads() - 1)
    if key not in _POOLS:
        _POOLS[key] = ThreadPoolExecutor(key[1], thread_name_prefix="isoexec")
    return _POOLS[key]


def spread(count: int, least: int, work: Callable[[int, int], T]) -> list[T]:
    """What work(first, last) returns for neighbouring parts of range(count), in order; the first is done here.

    There are as many parts as threads, or fewer, so that each has at least `least`. The first failure is raised again
    when all have ended.
    """
    parts = max(1, min(torch.get_num_threads(), count // max(least, 1)))
    if parts == 1:
        return [work(0, count)]
    bounds = [count * i // parts for i in range(parts + 1)]
    others = [_pool().submit(work, lo, hi) for lo, hi in zip(bounds[1:-1], bounds[2:], strict=True)]
    try:
        own = work(0, bounds[1])
    finally:
        errors = [other.exception() for other in others]  # waits
    for error in errors:
        if error is not None:
            raise error
    return [own, *(other.result() for other in others)]


def everywhere(ask: Callable[[], T]) -> list[T]:
    """What `ask` returns in this thread and in each of those that share its work."""
    others = torch.get_num_threads() - 1
    if not others:
        return [ask()]
    met = threading.Barrier(others, timeout=60)

    def answer() -> T:
        met.wait()  # so that no thread answers twice
        return ask()

    futures = [_pool().submit(answer) for _ in range(others)]
    return [ask(), *(future.result() for future in futures)]
