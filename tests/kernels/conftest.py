"""What the tests of operators share: the dtypes they run for, and equality of bits with NaN in the same places.

They find `hopper_source` beside them.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyrl_isoexec.schedule.bits import canonical, count_mismatches

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The dtype of weights and activations."""
    return request.param


@pytest.fixture(autouse=True)
def one_thread():
    """The eager references are quickest on one thread, and so are small operands of the compiled loops."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def same_bits() -> Callable[[Tensor, Tensor], None]:
    """Assert equal shape, dtype and bits; the payload of a NaN is free."""

    def check(a: Tensor, b: Tensor) -> None:
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.numel():
            mismatched, compared = count_mismatches(canonical(a), canonical(b))
            assert mismatched == 0, f"{mismatched} of {compared} elements differ"

    return check


@pytest.fixture
def gradients() -> Callable[..., list[Tensor]]:
    """Gradients of the float arguments of an operator for fixed upstream gradients."""

    def run(operator: Callable, *arguments: Tensor) -> list[Tensor]:
        leaves = [a.clone().requires_grad_(a.is_floating_point()) for a in arguments]
        results = operator(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(r.shape, generator=generator).to(r.dtype) for r in results]
        torch.autograd.backward(results, upstream)
        return [leaf.grad for leaf in leaves if leaf.requires_grad]

    return run


@pytest.fixture
def check_backward(gradients, same_bits) -> Callable[..., None]:
    """Gradients repeat to the bit and stay within a bound of autograd through the reference, dtype by dtype."""

    def check(operator: Callable, reference: Callable, *arguments: Tensor) -> None:
        ours, again, theirs = (gradients(op, *arguments) for op in (operator, operator, reference))
        for a, b, c in zip(ours, again, theirs, strict=True):
            same_bits(a, b)
            bound = 2e-6 if a.dtype == torch.float32 else 2e-2
            assert a.dtype == c.dtype and (a - c).abs().max() <= bound * c.abs().max()

    return check
