"""A row of a grouped linear is the linear of its expert's weight; what it refuses and differentiates."""

from itertools import pairwise

import pytest
import torch

from skyrl_isoexec.kernels.experts import cpu, reference
from skyrl_isoexec.kernels.experts.cases import SPREADS, cases, starts_of
from skyrl_isoexec.kernels.linear import cpu as linear
from skyrl_isoexec.kernels.numeric.inputs import normal


def test_every_row_is_the_linears(dtype, same_bits):
    """For every case and result's dtype, with the linear's packed weight and without."""
    rows = 0
    for x, w, starts in cases(dtype).values():
        for out_dtype in (torch.float32, torch.bfloat16):
            y = cpu.grouped_linear(x, w, starts, out_dtype)
            for e, (first, last) in enumerate(pairwise(starts.tolist())):
                packed = linear.pack(w[e])
                for row in range(first, last):
                    same_bits(y[row : row + 1], linear.linear(x[row : row + 1], w[e], None, out_dtype))
                    same_bits(y[row : row + 1], linear.linear(x[row : row + 1], w[e], None, out_dtype, packed))
                    rows += 1
    assert rows > 300


@pytest.mark.parametrize("name", SPREADS)
def test_backward(name, dtype, check_backward):
    x, w, starts = cases(dtype)[name]
    ours, theirs = (lambda x, w, op=op: op.grouped_linear(x, w, starts) for op in (cpu, reference))
    check_backward(ours, theirs, x, w)


def test_backward_of_an_fp32_result(dtype, check_backward):
    x, w, starts = cases(dtype)["rows of nobody"]
    ours, theirs = (lambda x, w, op=op: op.grouped_linear(x, w, starts, torch.float32) for op in (cpu, reference))
    check_backward(ours, theirs, x, w)


def test_nobodys_rows_have_no_gradient(dtype):
    """Nor has an expert without a row, and both are zeros."""
    x, w, starts = (t.clone() for t in cases(dtype)["rows of nobody"])
    y = cpu.grouped_linear(x.requires_grad_(), w.requires_grad_(), starts)
    y.float().sum().backward()
    first, last = int(starts[0]), int(starts[-1])
    assert first > 0 and last < len(x) and not x.grad[:first].any() and not x.grad[last:].any()
    assert x.grad[first:last].all() and not w.grad[1].any() and w.grad[0].any()


def test_only_wanted_gradients(dtype):
    """A frozen weight gets none."""
    x, w, starts = (t.clone() for t in cases(dtype)["ragged"])
    cpu.grouped_linear(x.requires_grad_(), w, starts).sum().backward()
    assert x.grad is not None and w.grad is None


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (torch.tensor([0, 3, 2, 5]), "3, then 2"),
        (torch.tensor([-1, 3, 3, 5]), "0, then -1"),
        (torch.tensor([0, 3, 3, 6]), "6, then 5"),
    ],
)
def test_starts_that_do_not_ascend_within_the_rows_are_refused(starts, message):
    for op in (cpu, reference):
        with pytest.raises(ValueError, match=message):
            op.grouped_linear(normal(1, 5, 4), normal(2, 3, 6, 4), starts.int())


@pytest.mark.parametrize(
    ("operands", "error"),
    [
        ((torch.ones(2, 3, 4), torch.ones(1, 5, 4), starts_of([2])), ValueError),
        ((torch.ones(3, 4), torch.ones(5, 4), starts_of([3])), ValueError),
        ((torch.ones(3, 4), torch.ones(1, 5, 6), starts_of([3])), ValueError),
        ((torch.ones(3, 4), torch.ones(0, 5, 4), starts_of([])), ValueError),
        ((torch.ones(3, 4), torch.ones(1, 5, 4).bfloat16(), starts_of([3])), TypeError),
        ((torch.ones(3, 4), torch.ones(1, 5, 4), starts_of([3]).long()), ValueError),
        ((torch.ones(3, 4), torch.ones(1, 5, 4), starts_of([1, 2])), ValueError),
        ((torch.ones(3, 4), torch.ones(1, 5, 4), starts_of([3]), torch.float64), TypeError),
        ((torch.ones(3, 4, device="meta"), torch.ones(1, 5, 4), starts_of([3])), ValueError),
    ],
)
def test_refusals(operands, error):
    with pytest.raises(error):
        cpu.grouped_linear(*operands)
