"""Axes move bytes and add gradients in a fixed order; the one-process double behaves like ranks."""

import threading

import pytest
import torch

from skyrl_isoexec.model.axes import SingleAxis
from skyrl_isoexec.model.threads import run_ranks


def given(axis) -> torch.Tensor:
    """[2, 3], different on every rank."""
    return torch.arange(6.0).view(2, 3) + 100 * axis.rank


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gathers_and_maximum(size) -> None:
    whole = torch.stack([torch.arange(6.0).view(2, 3) + 100 * rank for rank in range(size)])

    def run(axis):
        x = given(axis)
        return axis.stack_gather(x), axis.all_gather(x, 0), axis.all_gather(x, 1), axis.max(x), axis.sum(x)

    for stacked, rows, columns, largest, total in run_ranks(size, run):
        assert torch.equal(stacked, whole)
        assert torch.equal(rows, whole.flatten(0, 1))
        assert torch.equal(columns, torch.cat(whole.unbind(0), 1))
        assert torch.equal(largest, whole.amax(0)) and torch.equal(total, whole.sum(0))


def test_gather_takes_the_local_slice_of_the_gradient() -> None:
    weights = torch.arange(24.0).view(4, 2, 3)

    def run(axis):
        x = given(axis).requires_grad_()
        (axis.stack_gather(x) * weights).sum().backward()
        y = given(axis).requires_grad_()
        (axis.all_gather(y, 1) * torch.cat(weights.unbind(0), 1)).sum().backward()
        return x.grad, y.grad

    for rank, (stacked, joined) in enumerate(run_ranks(4, run)):
        assert torch.equal(stacked, weights[rank]) and torch.equal(joined, weights[rank])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_in_adds_the_gradients_by_a_tree(dtype) -> None:
    parts = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(dtype)

    def run(axis):
        x = torch.ones(50, dtype=dtype, requires_grad=True)
        (axis.copy_in(x) * parts[axis.rank]).sum().backward()
        return x.grad

    a, b, c, d = parts.float()
    expected = ((a + b) + (c + d)).to(dtype)
    step_by_step = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert (step_by_step != expected).any()  # so the order, or the single rounding, shows
    for gradient in run_ranks(4, run):
        assert torch.equal(gradient, expected)


def test_maximum_carries_no_gradient() -> None:
    def run(axis):
        return axis.max(given(axis).requires_grad_()).requires_grad

    assert run_ranks(2, run) == [False, False] and run_ranks(1, run) == [False]


def test_one_rank_moves_nothing() -> None:
    x = torch.ones(2, requires_grad=True)
    axis = SingleAxis()
    assert axis.copy_in(x) is x and axis.all_gather(x, 0) is x and axis.stack_gather(x).shape == (1, 2)


def test_one_rank_runs_at_a_time() -> None:
    busy, overlaps = [], []

    def run(axis):
        for _ in range(20):
            overlaps.append(len(busy))
            busy.append(axis.rank)
            threading.Event().wait(0.0001)
            busy.remove(axis.rank)
            axis.exchange(torch.zeros(1))

    run_ranks(3, run)
    assert not any(overlaps)


def test_a_failing_rank_releases_the_others() -> None:
    def run(axis):
        if axis.rank == 1:
            raise KeyError("rank 1")
        axis.exchange(torch.zeros(1))

    with pytest.raises(KeyError, match="rank 1"):
        run_ranks(3, run)


def test_ranks_that_disagree_are_refused() -> None:
    def shapes(axis):
        axis.exchange(torch.zeros(axis.rank + 1))

    def counts(axis):
        for _ in range(axis.rank + 1):
            axis.exchange(torch.zeros(1))

    with pytest.raises(RuntimeError, match="equal size"):
        run_ranks(2, shapes)
    with pytest.raises(threading.BrokenBarrierError):
        run_ranks(2, counts, timeout=0.2)
