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
tl = triton.language
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
    "name, function, definition, cases, constants",
    [
        ("rmsnorm", "add_rmsnorm", "reference_sm90", "cases", (1e-6,)),
        ("rmsnorm", "add_rmsnorm", "reference_sm90", "cases", (1e-6, 1.0)),
        ("rmsnorm", "gated_rmsnorm", "reference_sm90", "gated_cases", (1e-6,)),
        ("rope", "rope", "reference", "cases", ()),
        ("swiglu", "silu_mul", "reference", "cases", ()),
        ("swiglu", "sigmoid_mul", "reference", "sigmoid_cases", ()),
        ("embedding", "embedding", "reference", "cases", ()),
    ],
)
def test_elementwise_and_norms_have_the_bits_of_their_definition(
    name, function, definition, cases, constants, same_bits
):
    for case in getattr(op(name, "cases"), cases)(BF16).values():
        ours, theirs = (getattr(op(name, file), function)(*case, *constants) for file in ("kernel", definition))
        for a, b in zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]:
            same_bits(a, b)


@interpreted
def test_the_rest_of_a_head_is_copied_with_every_payload():
    cases, rotated = op("rope", "cases"), 8
    x = cases.payloads(BF16)
    y = op("rope").rope(x, torch.arange(len(x)), cases.table(rotated))
    assert torch.equal(y.view(torch.int16)[..., rotated:], x.view(torch.int16)[..., rotated:])
    outside = op("rope").rope(torch.ones(2, 1, 22).to(BF16), torch.tensor([-1, 300]), cases.table(rotated))
    assert outside[..., :rotated].isnan().all() and (outside[..., rotated:] == 1).all()


@interpreted
@pytest.mark.parametrize("case", ["head of 64", "16 of 64", "4 of 7"])
def test_gradients_of_a_rotation(case, check_backward):
    x, *rest = op("rope", "cases").cases(BF16)[case]
    check_backward(*(lambda x, file=file: op("rope", file).rope(x, *rest) for file in ("kernel", "reference")), x)


@interpreted
@pytest.mark.parametrize("case", ["width 17", "heads"])
def test_gradients_of_norms(case, check_backward):
    x, residual, w = op("rmsnorm", "cases").cases(BF16)[case]
    files = [op("rmsnorm", file) for file in ("kernel", "reference_sm90")]
    for offset in (0.0, 1.0):
        check_backward(*(lambda x, w, f=f, o=offset: f.rmsnorm(x, w, 1e-6, o) for f in files), x, w)
        check_backward(*(lambda x, r, w, f=f, o=offset: f.add_rmsnorm(x, r, w, 1e-6, o) for f in files), x, residual, w)
    check_backward(*(lambda x, z, w, f=f: f.gated_rmsnorm(x, z, w, 1e-6) for f in files), x, residual, w)


@interpreted
def test_gradients_of_a_gated_norm_over_many_rows(check_backward, monkeypatch):
    """More rows than one pass of all programs takes, the last tile not full; the weight's gradient wanted or not."""
    monkeypatch.setattr(op("rmsnorm"), "STRIDES", 2)
    x, z, w = torch.randn(19, 128).to(BF16), torch.randn(19, 128).to(BF16), torch.randn(128).to(BF16)
    ours, theirs = (op("rmsnorm", file).gated_rmsnorm for file in ("kernel", "reference_sm90"))
    check_backward(lambda *t: ours(*t, 1e-6), lambda *t: theirs(*t, 1e-6), x, z, w)
    check_backward(lambda x, z: ours(x, z, w, 1e-6), lambda x, z: theirs(x, z, w, 1e-6), x[:9], z[:9])


@interpreted
def test_gradients_of_products(check_backward, gradients):
    kernel, definition, cases = op("swiglu"), op("swiglu", "reference"), op("swiglu", "cases")
    check_backward(kernel.silu_mul, definition.silu_mul, *cases.cases(BF16)["wide"])
    for name, case in cases.sigmoid_cases(BF16).items():
        if "no rows" in name:
            assert all(not g.numel() for g in gradients(kernel.sigmoid_mul, *case))
        elif "hazards" not in name:
            check_backward(kernel.sigmoid_mul, definition.sigmoid_mul, *case)
    dx, dgate = gradients(kernel.sigmoid_mul, torch.ones(3, 0).to(BF16), torch.ones(3, 1).to(BF16))
    assert dx.shape == (3, 0) and dgate.tolist() == [[0.0]] * 3


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
        same_bits(op("row_linear").forward(x, w, leaves, Tile.parse(tile), torch.bfloat16), root.bfloat16())
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
    assert (lse[:, 1:].double() - s.logsumexp(-1)).abs().max() < 1e-5  # weights are summed before they are rounded
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


@triton.jit
def _row_sums(lane_sums, folded, x, out, BKV: tl.constexpr, G: tl.constexpr):
    at = tl.arange(0, 4)[:, None] * BKV + tl.arange(0, BKV)[None, :]
    lanes = lane_sums(tl.load(x + at), 4, BKV)
    tl.store(out + tl.arange(0, 4), folded(lanes, 4, G))


@interpreted
@pytest.mark.parametrize("kv_block", [16, 32, 64, 128])
def test_attention_adds_weights_in_lanes(kv_block, same_bits):
    loops, lanes = op("attention", "triton_loops"), min(4, kv_block // 8)
    x = torch.randn(4, kv_block, generator=torch.Generator().manual_seed(kv_block)).exp2() ** 4
    out = torch.empty(4)
    _row_sums[(1,)](loops.lane_sums, loops.folded, x, out, kv_block, lanes)
    groups = list(x.view(4, -1, 4, 2).unbind(1))
    while len(groups) > lanes:
        half = len(groups) // 2
        groups = [a + b for a, b in zip(groups[:half], groups[half:], strict=True)]
    groups = [g[..., 0] + g[..., 1] for g in groups]
    while len(groups) > 1:
        half = len(groups) // 2
        groups = [a + b for a, b in zip(groups[:half], groups[half:], strict=True)]
    pairs = groups[0][:, 0::2] + groups[0][:, 1::2]
    same_bits(out, pairs[:, 0] + pairs[:, 1])
    assert (out != x.sum(1)).any() or kv_block < 64


@interpreted
def test_refusals_name_what_they_refuse():
    x = torch.zeros(2, 16)
    with pytest.raises(TypeError, match="linear: the sm90 implementation takes bfloat16, not torch.float32"):
        op("linear").linear(x, x)
    with pytest.raises(ValueError, match="linear: no admitted tile"):
        op("linear").TABLE.choose(1, 16, 16, 64, True)
    assert op("linear").pack(x) is None
    with pytest.raises(TypeError, match="gated_rmsnorm: the sm90 implementation takes bfloat16, not torch.float32"):
        op("rmsnorm").gated_rmsnorm(x, x, x[0], 1e-6)
    wide = torch.zeros(1, 16385).to(BF16)
    for call in (
        lambda: op("rmsnorm").rmsnorm(wide, wide[0], 1e-6),
        lambda: op("rmsnorm").gated_rmsnorm(wide, wide, wide[0], 1e-6),
    ):
        with pytest.raises(ValueError, match="rmsnorm: the sm90 implementation holds a row of 16384, not 16385"):
            call()
    with pytest.raises(TypeError, match="sigmoid_mul: the sm90 implementation takes bfloat16, not torch.float32"):
        op("swiglu").sigmoid_mul(x, x)
