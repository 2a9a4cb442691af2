"""What the way to the experts and back refuses and differentiates, and how zeros sum; its bits: its gate."""

import pytest
import torch

from skyrl_isoexec.kernels.combine import cpu, reference
from skyrl_isoexec.kernels.combine.cases import cases, chosen, weighing
from skyrl_isoexec.kernels.numeric.inputs import normal


def test_rows_are_sorted_by_expert_and_then_by_token():
    experts = torch.tensor([[1, 3], [0, 1], [1, 2]]).int()
    for op in (cpu, reference):
        order, starts = op.dispatch(experts, 5)
        assert order.tolist() == [2, 0, 3, 4, 5, 1] and starts.tolist() == [0, 1, 4, 5, 6, 6]


@pytest.mark.parametrize("name", ["odd", "many experts", "wide", "one at a time"])
def test_backward(name, dtype, check_backward):
    """Of y, weights and the shared row, and of the tokens' rows."""
    y, experts, num_experts, weights, shared = cases(dtype)[name]
    order, _ = cpu.dispatch(experts, num_experts)
    ours, theirs = (lambda y, w, s, op=op: op.combine(y, order, w, s) for op in (cpu, reference))
    check_backward(ours, theirs, y, weights, shared)
    ours, theirs = (lambda y, w, op=op: op.combine(y, order, w) for op in (cpu, reference))
    check_backward(ours, theirs, y, weights)
    ours, theirs = (lambda x, op=op: op.expand(x, order) for op in (cpu, reference))
    check_backward(ours, theirs, shared)


def test_only_wanted_gradients(dtype):
    y, experts, num_experts, weights, shared = (t.clone() if hasattr(t, "clone") else t for t in cases(dtype)["odd"])
    order, _ = cpu.dispatch(experts, num_experts)
    cpu.combine(y, order, weights.requires_grad_(), shared).sum().backward()
    assert weights.grad is not None and y.grad is None and shared.grad is None


def test_a_sum_starts_with_its_first_product():
    """-0 stays -0 through every expert and the shared row; beside one +0 the sum is +0."""
    order = torch.arange(4)
    y, weights, shared = torch.full((4, 1), -0.0), torch.full((2, 2), 0.5), torch.full((2, 1), -0.0)
    y[3] = 0.0
    for out in (cpu.combine(y, order, weights), cpu.combine(y, order, weights, shared)):
        assert out.signbit().tolist() == [[True], [False]] and not out.any()
    assert not cpu.combine(y, order, weights, -shared).signbit().any()


def test_products_round_before_they_are_added():
    """w y - round(w y) is 0, and would not be if product and sum were fused."""
    w, y = normal(1, 64, 1).abs(), normal(2, 64, 1)
    rounded = w * y
    assert (rounded.double() != w.double() * y.double()).any()
    rows = torch.stack([-rounded, y], 1).flatten(0, 1)
    out = cpu.combine(rows, torch.arange(128), torch.cat([torch.ones(64, 1), w], 1))
    assert not out.any()


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ([[0, 1], [2, 2]], "experts \\[2, 2\\] of token 1"),
        ([[1, 0], [2, 3]], "experts \\[1, 0\\] of token 0"),
        ([[0, 1], [-1, 3]], "experts \\[-1, 3\\] of token 1"),
        ([[0, 1], [2, 4]], "experts \\[2, 4\\] of token 1"),
    ],
)
def test_experts_that_do_not_ascend_are_refused(experts, message):
    """A duplicate, another order, experts that there are not."""
    for op in (cpu, reference):
        with pytest.raises(ValueError, match=message):
            op.dispatch(torch.tensor(experts).int(), 4)


@pytest.mark.parametrize(("order", "place"), [([0, 1, 1, 3], 2), ([0, 4, 1, 3], 1), ([0, 1, 2, -1], 3)])
def test_an_order_that_is_no_permutation_is_refused(order, place):
    for op in (cpu, reference):
        with pytest.raises(ValueError, match=f"order at row {place}"):
            op.combine(torch.ones(4, 3), torch.tensor(order), torch.ones(2, 2))
        with pytest.raises(ValueError, match=f"order at row {place}"):
            op.expand(torch.ones(2, 3), torch.tensor(order))


@pytest.mark.parametrize(
    ("function", "operands", "error"),
    [
        ("dispatch", (torch.zeros(3).int(), 4), ValueError),
        ("dispatch", (torch.zeros(3, 5).int(), 4), ValueError),
        ("dispatch", (torch.zeros(3, 1), 4), TypeError),
        ("expand", (torch.ones(3, 4), torch.arange(7)), ValueError),
        ("expand", (torch.ones(3, 4).half(), torch.arange(6)), TypeError),
        ("combine", (torch.ones(4, 3), torch.arange(4), torch.ones(3, 2)), ValueError),
        ("combine", (torch.ones(4, 3), torch.arange(4).int(), torch.ones(2, 2)), ValueError),
        ("combine", (torch.ones(4, 3), torch.arange(3), torch.ones(2, 2)), ValueError),
        ("combine", (torch.ones(4, 3), torch.arange(4), torch.ones(2, 2).bfloat16()), TypeError),
        ("combine", (torch.ones(4, 3), torch.arange(4), torch.ones(2, 2), torch.ones(2, 4)), ValueError),
        ("combine", (torch.ones(4, 3), torch.arange(4), torch.ones(2, 2), torch.ones(2, 3).bfloat16()), ValueError),
        ("combine", (torch.ones(4, 3, device="meta"), torch.arange(4), torch.ones(2, 2)), ValueError),
    ],
)
def test_refusals(function, operands, error):
    for op in (cpu, reference) if error is not ValueError or "meta" not in str(operands[0]) else (cpu,):
        with pytest.raises(error):
            getattr(op, function)(*operands)


def test_a_token_alone_has_the_row_that_it_has_among_others(dtype, same_bits):
    """Its experts' rows then lie elsewhere."""
    experts, weights = chosen(1, 30, 3, 4), weighing(2, 30, 3)
    y = normal(3, 30, 3, 20, dtype=dtype)
    order, _ = cpu.dispatch(experts, 4)
    whole = cpu.combine(y.flatten(0, 1)[order], order, weights)
    for t in range(30):
        own, _ = cpu.dispatch(experts[t : t + 1], 4)
        same_bits(cpu.combine(y[t][own], own, weights[t : t + 1]), whole[t : t + 1])
