"""Medians of CUDA-event times of replayed graphs, so that the time of a launch from Python decides nothing.

A graph holds one call for each copy of the operands; the copies together exceed the L2 cache.
"""

from collections.abc import Callable

import torch

L2_BYTES = 60_000_000
REPEATS = 20
BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.8e12, 989e12
"""Ceilings of an H200 by its datasheet: memory, and dense bf16."""


def copies(make: Callable[[], tuple], num_bytes: int) -> list[tuple]:
    """As many operands as exceed the cache, at most 24."""
    return [make() for _ in range(max(1, min(24, 2 * L2_BYTES // max(1, num_bytes) + 1)))]


def milliseconds(function: Callable, operands: list[tuple], repeats: int = REPEATS) -> float:
    """Median time of one call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function(*operands[0])
        function(*operands[-1])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in operands:
            function(*each)
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / len(operands))
    return sorted(times)[len(times) // 2]


def floor_ms(num_bytes: float, flops: float) -> float:
    """No version can be quicker: bytes over bandwidth or operations over rate, whichever is more."""
    return 1e3 * max(num_bytes / BYTES_PER_SECOND, flops / FLOPS_PER_SECOND)
