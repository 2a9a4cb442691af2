"""The Hopper kernels in Triton's interpreter, on small shapes: indices, masks, orders and bounds, without a GPU.

The interpreter has float64 sums where the chip has a tensor core, so bits across tiles show how elements are placed and
in which order leaves, blocks and partitions are added; the order inside a tensor core is shown by `tests/gpu`.
"""

import importlib
import os
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton")
INTERPRETED = bool(triton.knobs.runtime.interpret)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the subprocess of test_in_the_interpreter")
BF16 = torch.bfloat16


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


@interpreted
@pytest.mark.parametrize(
    "name, function, definition",
    [
        ("rmsnorm", "add_rmsnorm", "reference_sm90"),
        ("rope", "rope", "reference"),
        ("swiglu", "silu_mul", "reference"),
        ("embedding", "embedding", "reference"),
    ],
)
def test_elementwise_and_norms_have_the_bits_of_their_definition(name, function, definition, same_bits):
    for case in op(name, "cases").cases(BF16).values():
        arguments = (*case, 1e-6) if name == "rmsnorm" else case
        ours, theirs = (getattr(op(name, file), function)(*arguments) for file in ("kernel", definition))
        for a, b in zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]:
            same_bits(a, b)


@interpreted
@pytest.mark.parametrize("name, function", [("rmsnorm", "rmsnorm"), ("rope", "rope"), ("swiglu", "silu_mul")])
def test_gradients(name, function, check_backward):
    cases = op(name, "cases").cases(BF16)
    arguments = cases[{"rmsnorm": "width 250", "rope": "head of 64", "swiglu": "wide"}[name]]
    if name == "rmsnorm":
        definition = op(name, "reference_sm90").rmsnorm
        check_backward(lambda x, w: op(name).rmsnorm(x, w, 1e-6), lambda x, w: definition(x, w, 1e-6), *arguments[::2])
    elif name == "rope":
        ours, theirs = (getattr(op(name, file), function) for file in ("kernel", "reference"))
        check_backward(lambda x: ours(x, *arguments[1:]), lambda x: theirs(x, *arguments[1:]), arguments[0])
    else:
        check_backward(getattr(op(name), function), getattr(op(name, "reference"), function), *arguments)


@interpreted
@pytest.mark.parametrize(
    "tile", ["swap 16 16 32 w4 s2 x1", "rows 16 32 64 w4 s2 x1", "tma 16 16 64 w4 s2 x1", "tma 16 48 32 w4 s2 x1"]
)
def test_linear(tile, same_bits):
    from skyrl_isoexec.kernels.numeric.sm90_product import Tile

    x, w, bias = torch.randn(37, 128).to(BF16), torch.randn(24, 128).to(BF16), torch.randn(24).to(BF16)
    exact = (x.double() @ w.double().T).float()
    same_bits(op("linear").forward(x, w, None, torch.float32, Tile.parse(tile)), exact)
    rounded = (exact.to(BF16).float() + bias.float()).to(BF16)
    same_bits(op("linear").forward(x, w, bias, BF16, Tile.parse(tile)), rounded)
    same_bits(op("linear").forward(x[20:21], w, bias, BF16, Tile.parse(tile)), rounded[20:21])


@interpreted
def test_row_linear_is_the_same_tree_under_every_tile_split_and_degree(same_bits):
    from skyrl_isoexec.kernels.numeric import tree
    from skyrl_isoexec.kernels.numeric.sm90_product import Tile

    x, w, leaves = torch.randn(5, 256).to(BF16), torch.randn(24, 256).to(BF16), 8
    parts = zip(x.double().chunk(leaves, 1), w.double().chunk(leaves, 1), strict=True)
    root = tree(torch.stack([(a @ b.T).float() for a, b in parts]))
    for tile in ("swap 16 16 32 w4 s2 x1", "rows 16 32 32 w4 s2 x1", "tma 16 16 32 w4 s2 x1", "rows 16 32 16 w4 s2 x4"):
        same_bits(op("row_linear").forward(x, w, leaves, Tile.parse(tile)), root)
    for fewer in (1, 2, 4):
        nodes = zip(x.double().chunk(fewer, 1), w.double().chunk(fewer, 1), strict=True)
        some = tree(torch.stack([(a @ b.T).float() for a, b in nodes]))
        same_bits(op("row_linear").forward(x, w, fewer, Tile.parse("tma 16 32 32 w4 s2 x1")), some)
    for degree in (2, 8):
        tile = Tile.parse("swap 16 16 32 w4 s2 x1")
        nodes = [
            op("row_linear").forward(a, b, leaves // degree, tile)
            for a, b in zip(x.chunk(degree, 1), w.chunk(degree, 1), strict=True)
        ]
        same_bits(op("row_linear").tree_sum(torch.stack(nodes)), root)


@interpreted
@pytest.mark.parametrize("kind", ["tails", "ties", "zeros", "minus_inf", "refused"])
def test_logprob(kind, same_bits):
    kernel, definition, cases = op("logprob"), op("logprob", "reference_sm90"), op("logprob", "cases")
    size = 8400 if kind == "tails" else 40
    x, ids = cases.rows(kind, 3, size), torch.tensor([0, 3, size - 1])
    assert cases.reached(kind, x)
    leaves, temperature = (1, 1.0) if kind == "tails" else (4, torch.tensor([0.7, 1.0, 1.5]))
    m = definition.row_max(x, temperature)
    sums = definition.leaf_sums(x, m, leaves, temperature)
    same_bits(kernel.row_max(x, temperature), m)
    same_bits(kernel.leaf_sums(x, m, leaves, temperature), sums)
    same_bits(kernel.total(sums), definition.total(sums))
    whole = definition.logprobs(x, temperature, num_leaves=leaves)
    same_bits(kernel.logprobs(x, temperature, num_leaves=leaves), whole)
    same_bits(kernel.token_logprobs(x, ids, temperature, num_leaves=leaves), whole.gather(1, ids[:, None])[:, 0])
    arguments = (torch.ones(3), x, ids, m, definition.total(sums), temperature)
    same_bits(kernel.grad_logits(*arguments), definition.grad_logits(*arguments))


@interpreted
def test_attention_prefill_pages_and_decode_are_one_arithmetic(same_bits):
    from skyrl_isoexec.schedule import Schedule

    kernel, cases, schedule = op("attention"), op("attention", "cases"), Schedule(kv_block=16, kv_partition=32)
    case = cases.Case(kind="normal", lengths=(1, 39, 0), num_heads=3, num_kv_heads=1)
    q, k, v, cu = cases.rows(case, BF16)
    assert cases.reached(case, q, k, v, cu, schedule)
    whole, lse = kernel.forward(q, k, v, cu, case.scale, schedule, (64, 4, 2))
    s = torch.einsum("tnd,cd->ntc", q[1:].double(), k[1:, 0].double()) * case.scale
    s = s.masked_fill(torch.ones(39, 39, dtype=torch.bool).triu(1), float("-inf"))
    exact = torch.einsum("ntc,cd->tnd", s.softmax(-1), v[1:, 0].double())
    assert (whole[1:].double() - exact).abs().max() < 2e-2
    assert (lse[:, 1:].double() - s.logsumexp(-1)).abs().max() < 1e-2
    cache, table, slots = cases.pages(k, case.lengths, 32, schedule)
    kernel.write_kv(k, v, cache, slots)
    lengths = torch.tensor(case.lengths).int()
    for split in (0, 2):
        out = torch.full_like(q, float("nan"))
        same_bits(kernel.paged(q, cache, table, cu, lengths, case.scale, out, schedule, (16, 4, 2), split), whole)
        last, starts = torch.tensor([0, 39]), torch.tensor([0, 1, 2, 2]).int()
        out = torch.full_like(q[last], float("nan"))
        kernel.paged(q[last], cache, table, starts, lengths, case.scale, out, schedule, None, split)
        same_bits(out, whole[last])


@interpreted
def test_refusals_name_what_they_refuse():
    x = torch.zeros(2, 16)
    with pytest.raises(TypeError, match="linear: the sm90 implementation takes bfloat16, not torch.float32"):
        op("linear").linear(x, x)
    with pytest.raises(ValueError, match="linear: no admitted tile"):
        op("linear").TABLE.choose(1, 16, 16, 64, True)
    assert op("linear").pack(x) is None
