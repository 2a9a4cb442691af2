"""The Hopper kernels of a mixture of experts in Triton's interpreter: indices, masks, orders and ties, without a GPU.

The interpreter has float64 sums where the chip has a tensor core, so bits across tiles show which rows meet which
weight; that a row has the chip's linear's bits is shown by `tests/gpu`.
"""

import importlib
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

triton = pytest.importorskip("triton")
INTERPRETED = bool(triton.knobs.runtime.interpret)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the subprocess of test_in_the_interpreter")
BF16 = torch.bfloat16
TILES = ["swap 16 16 32 w4 s2 x1", "rows 16 32 64 w4 s2 x1", "tma 16 16 64 w4 s2 x1"]


def op(name: str, file: str = "kernel"):
    return importlib.import_module(f"skyrl_isoexec.kernels.{name}.{file}")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="is the subprocess")
def test_in_the_interpreter():
    """The other tests of this file, in a process whose Triton interprets."""
    command = [sys.executable, "-W", "ignore", "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.fixture
def same(same_bits):
    """As `same_bits`, for tuples and integers as well."""

    def check(a, b):
        pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
        for x, y in pairs:
            if x.is_floating_point():
                same_bits(x, y)
            else:
                assert x.dtype == y.dtype and torch.equal(x, y)

    return check


@interpreted
def test_router_has_the_bits_of_its_definition(same):
    for name, (logits, top_k, rule, bias) in op("router", "cases").cases().items():
        logits = logits[: 8 if "ties" in name else 2]
        operands = (logits, top_k, rule, bias)
        same(op("router").route(*operands), op("router", "reference").route(*operands))


@interpreted
def test_router_of_a_row_that_cannot_be_compared(same):
    """The first experts and NaN for every weight, beside rows that keep theirs."""
    cases, inf, nan = op("router", "cases"), float("inf"), float("nan")
    for rule, values in ((cases.SOFTMAX, (nan, inf)), (cases.SIGMOID, (nan,)), (cases.GROUPS, (nan,))):
        logits = cases.steps(1, 3, 8)
        whole = op("router").route(logits, 3, rule)
        for value in values:
            logits[1, 5] = value
            weights, experts = op("router").route(logits, 3, rule)
            assert weights[1].isnan().all() and experts[1].tolist() == [0, 1, 2]
            same((weights[::2], experts[::2]), tuple(x[::2] for x in whole))
    barred = torch.tensor([inf, -inf, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    weights, experts = op("router").route(torch.zeros(1, 8), 2, cases.GROUPS, barred)  # inf - inf of one group
    assert weights.isnan().all() and experts.tolist() == [[0, 1]]


@interpreted
@pytest.mark.parametrize("name", ["SOFTMAX", "RAW", "SIGMOID", "GROUPS"])
def test_router_gradients(name, check_backward):
    cases = op("router", "cases")
    rule, bias = getattr(cases, name), None if name in ("SOFTMAX", "RAW") else torch.linspace(0, 1, 20)
    ours, theirs = (lambda x, f=f: op("router", f).route(x, 5, rule, bias)[0] for f in ("kernel", "reference"))
    check_backward(ours, theirs, torch.randn(9, 20))


def exact(x, w, starts):
    """fp32 rows of float64 sums; rows of nobody are +0."""
    y = torch.zeros(x.shape[0], w.shape[1])
    for expert, (first, last) in zip(w, pairwise(starts.tolist()), strict=True):
        y[first:last] = (x[first:last].double() @ expert.double().T).float()
    return y


@interpreted
@pytest.mark.parametrize("tile", TILES)
def test_experts(tile, same_bits):
    """Several tiles of one expert, experts without rows, rows of nobody, some of the experts."""
    from skyrl_isoexec.kernels.numeric.sm90_product import Tile

    tile, forward, starts_of = Tile.parse(tile), op("experts").forward, op("experts", "cases").starts_of
    x, w = torch.randn(20, 40).to(BF16), torch.randn(5, 24, 40).to(BF16)
    for starts in (starts_of([0, 1, 17, 0, 2]), starts_of([0, 0, 20, 0, 0]), starts_of([3, 0, 1, 5, 2], first=4)):
        whole = exact(x, w, starts)
        same_bits(forward(x, w, starts, torch.float32, tile), whole)
    same_bits(forward(x, w, starts, BF16, tile), whole.to(BF16))
    same_bits(forward(x, w[2:4], starts[2:5], torch.float32, tile), exact(x, w[2:4], starts[2:5]))


@interpreted
def test_experts_gradients(check_backward):
    """Sizes that no tile divides, an expert without rows, rows of nobody."""
    x, w = torch.randn(20, 40).to(BF16), torch.randn(4, 24, 40).to(BF16)
    starts = torch.tensor([2, 2, 15, 19, 19]).int()
    ours, theirs = (lambda x, w, f=f: op("experts", f).grouped_linear(x, w, starts) for f in ("kernel", "reference"))
    check_backward(ours, theirs, x, w)


@interpreted
def test_combine_has_the_bits_of_its_definition(same):
    kernel, definition, cases = op("combine"), op("combine", "reference"), op("combine", "cases").cases(BF16)
    for name in ("one", "odd", "wide", "no tokens", "hazards", "zeros", "subnormal weights alone"):
        y, experts, num_experts, weights, shared = cases[name]
        order, starts = definition.dispatch(experts, num_experts)
        same(kernel.dispatch(experts, num_experts), (order, starts))
        same(kernel.expand(shared, order), definition.expand(shared, order))
        for also in (None, shared):
            operands = (y[order], order, weights, also)
            same(kernel.combine(*operands), definition.combine(*operands))


@interpreted
def test_both_ways_of_sorting_give_the_same_places(monkeypatch, same):
    experts = op("combine", "cases").chosen(1, 90, 4, 17)
    counted = op("combine").dispatch(experts, 17)
    same(counted, op("combine", "reference").dispatch(experts, 17))
    monkeypatch.setattr(op("combine"), "COUNTED", 0)
    same(counted, op("combine").dispatch(experts, 17))


@interpreted
def test_experts_that_there_are_not_sort_outside():
    """Whatever stands in `experts`, no place is outside the rows, and those of other experts are right."""
    experts = torch.tensor([[-3, 1, 9], [0, 1, 70000]]).int()
    order, starts = op("combine").dispatch(experts, 3)
    assert sorted(order.tolist()) == list(range(6)) and starts.tolist() == [1, 2, 4, 4]
    assert order[1:4].tolist() == [3, 1, 4]


@interpreted
def test_combine_gradients(check_backward):
    y, experts, num_experts, weights, shared = op("combine", "cases").cases(BF16)["wide"]
    order, _ = op("combine").dispatch(experts, num_experts)
    ours, theirs = (lambda y, w, s, f=f: op("combine", f).combine(y, order, w, s) for f in ("kernel", "reference"))
    check_backward(ours, theirs, y, weights, shared)
    ours, theirs = (lambda x, f=f: op("combine", f).expand(x, order) for f in ("kernel", "reference"))
    check_backward(ours, theirs, shared)


@interpreted
def test_refusals_name_what_they_refuse():
    x = torch.zeros(2, 16)
    with pytest.raises(TypeError, match="grouped_linear: the sm90 implementation takes bfloat16, not torch.float32"):
        op("experts").grouped_linear(x, torch.zeros(1, 16, 16), torch.zeros(2).int())
    with pytest.raises(TypeError, match="combine: the sm90 implementation takes bfloat16, not torch.float32"):
        op("combine").combine(x, torch.arange(2), torch.ones(2, 1))
    with pytest.raises(ValueError, match="router: the sm90 implementation holds 4096 experts"):
        op("router").route(torch.zeros(1, 5000), 1, op("router", "cases").SOFTMAX)
