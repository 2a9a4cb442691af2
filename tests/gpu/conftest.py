"""What the tests on a Hopper GPU share. They need torch, triton, numpy and pytest.

Without one they are skipped among others, and refused where they alone were asked for: that nothing failed would say
nothing.
"""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyrl_isoexec.schedule.bits import canonical, count_mismatches

HERE = Path(__file__).parent


def _lacking() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    return None if capability == (9, 0) else f"the device's compute capability is {capability}, a Hopper GPU's (9, 0)"


def pytest_configure(config: pytest.Config) -> None:
    """Refuse `-m gpu` where every test would be skipped."""
    lacking = _lacking()
    if config.option.markexpr == "gpu" and lacking is not None:
        raise pytest.UsageError(f"-m gpu: {lacking}; run these tests on a host with a Hopper GPU")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark and skip: only what lies in this folder."""
    ready = _lacking() is None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not ready:
                item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))


@pytest.fixture
def op() -> Callable:
    """op(name, file="kernel"): a module of an operator."""
    return lambda name, file="kernel": importlib.import_module(f"skyrl_isoexec.kernels.{name}.{file}")


@pytest.fixture
def normal() -> Callable[..., Tensor]:
    """normal(*shape, seed=0, scale=1.0): bf16 on the device, the same numbers on every call."""

    def make(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(torch.bfloat16)

    return make


@pytest.fixture
def differing() -> Callable[[Tensor, Tensor], int]:
    """Number of elements whose bits differ; the payload of a NaN is free."""
    return lambda a, b: count_mismatches(canonical(a), canonical(b))[0]


@pytest.fixture
def replayed() -> Callable[[Callable[[], Tensor]], Tensor]:
    """The result of a function captured in a CUDA graph and replayed twice, over a result filled with NaN."""

    def run(function: Callable[[], Tensor]) -> Tensor:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = function()
        result.fill_(float("nan"))
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        return result.clone()

    return run
