"""Latent attention's Hopper kernels in Triton's interpreter, on small shapes: indices, masks, orders and bounds.

The interpreter has float64 sums where the chip has a tensor core, so bits across tiles show how elements are placed and
in which order blocks and partitions are added; the order inside a tensor core is shown by `tests/gpu`.
"""

import os
import subprocess
import sys

import pytest
import torch

from skyrl_isoexec.kernels.mla import cases
from skyrl_isoexec.kernels.mla.cases import Case
from skyrl_isoexec.schedule import Schedule

triton = pytest.importorskip("triton")
INTERPRETED = bool(triton.knobs.runtime.interpret)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the subprocess of test_in_the_interpreter")
BF16 = torch.bfloat16
SCHEDULE = Schedule(kv_block=16, kv_partition=32)


@pytest.fixture
def kernel():
    from skyrl_isoexec.kernels.mla import kernel

    return kernel


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="is the subprocess")
def test_in_the_interpreter():
    """The other tests of this file, in a process whose Triton interprets."""
    command = [sys.executable, "-W", "ignore", "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def exact(q, c, case):
    """(result, log-sum-exp) of one sequence in float64."""
    s = torch.einsum("tnq,cq->tnc", q.double(), c.double()) * case.scale
    s = s.masked_fill(torch.ones(len(q), len(q), dtype=torch.bool).triu(1)[:, None], float("-inf"))
    return torch.einsum("tnc,cl->tnl", s.softmax(-1), c[:, : case.latent].double()), s.logsumexp(-1)


@interpreted
@pytest.mark.parametrize("heads, latent, rotated", [(2, 16, 16), (1, 20, 4)])
def test_prefill_pages_and_decode_are_one_arithmetic(heads, latent, rotated, kernel, same_bits):
    case = Case(kind="normal", lengths=(1, 35, 0), num_heads=heads, latent=latent, rotated=rotated)
    q, c, cu = cases.rows(case, BF16)
    assert cases.reached(case, q, c, cu, SCHEDULE)
    whole, lse = kernel.forward(q, c, cu, case.scale, latent, SCHEDULE, (64, 4, 2))
    for a, b in zip(kernel.forward(q, c, cu, case.scale, latent, SCHEDULE, (16, 4, 2)), (whole, lse), strict=True):
        same_bits(a, b)
    result, sums = exact(q[1:], c[1:], case)
    assert (whole[1:].double() - result).abs().max() < 2e-2
    assert (lse[1:].double() * torch.tensor(2.0).log() - sums).abs().max() < 1e-2
    cache, table, slots = cases.pages(c, case.lengths, 32)
    kernel.write_latent(c, cache, slots)
    assert cache.isnan().any()
    lengths, last, starts = torch.tensor(case.lengths).int(), torch.tensor([0, 35]), torch.tensor([0, 1, 2, 2]).int()
    for split in (0, 2):
        options = (case.scale, latent)
        out = torch.full_like(whole, float("nan"))
        same_bits(kernel.paged(q, cache, table, cu, lengths, *options, out, SCHEDULE, (16, 4, 2), split), whole)
        out = torch.full_like(whole[last], float("nan"))
        kernel.paged(q[last], cache, table, starts, lengths, *options, out, SCHEDULE, None, split)
        same_bits(out, whole[last])


@interpreted
def test_a_short_request_beside_a_long_one(kernel, same_bits):
    """In one step, two tokens at the end of a context go to the split kernels and twelve others to the tiled one."""
    case = Case(kind="normal", lengths=(40, 12), num_heads=3)
    q, c, cu = cases.rows(case, BF16)
    whole, _ = kernel.forward(q, c, cu, case.scale, case.latent, SCHEDULE)
    cache, table, slots = cases.pages(c, case.lengths, 16)
    kernel.write_latent(c, cache, slots)
    rows, starts, lengths = q[38:], torch.tensor([0, 2, 14]).int(), torch.tensor(case.lengths).int()
    out = torch.full_like(whole[38:], float("nan"))
    kernel.paged(rows, cache, table, starts, lengths, case.scale, case.latent, out, SCHEDULE, None, 2)
    same_bits(out, whole[38:])


@interpreted
@pytest.mark.parametrize("kind", ["minus_inf", "nan"])
def test_hazards(kind, kernel, same_bits):
    """A context's last row as a decode step; and NaN stands where the definition has it."""
    case = Case(kind=kind, lengths=(47,), num_heads=2)
    q, c, cu = cases.rows(case, BF16)
    assert cases.reached(case, q, c, cu, SCHEDULE)
    whole, _ = kernel.forward(q, c, cu, case.scale, case.latent, SCHEDULE)
    row = torch.arange(47)
    expected = row < 40 if kind == "minus_inf" else row >= 20
    assert (whole.isnan() == expected[:, None, None]).all()
    cache, table, slots = cases.pages(c, case.lengths, 16)
    kernel.write_latent(c, cache, slots)
    for row in (18, 46):
        starts, lengths = torch.tensor([0, 1]).int(), torch.tensor([row + 1]).int()
        given = (q[row : row + 1], cache, table, starts, lengths, case.scale, case.latent)
        same_bits(kernel.mla_paged(*given, schedule=SCHEDULE), whole[row : row + 1])


@interpreted
def test_gradients(kernel, same_bits):
    """Over several tiles of rows and of keys, and of rows that share a tile of keys' program."""
    case = Case(kind="normal", lengths=(1, 66), num_heads=2)
    q, c, cu = cases.rows(case, BF16)
    weight = torch.randn(67, 2, case.latent, generator=torch.Generator().manual_seed(1)).to(BF16)

    def gradients(rows, cu):
        leaves = [x[rows].clone().requires_grad_() for x in (q, c)]
        kernel.mla(*leaves, cu, case.scale, case.latent, schedule=SCHEDULE).backward(weight[rows])
        return [x.grad for x in leaves]

    ours = gradients(slice(None), cu)
    leaves = [x[1:].double().requires_grad_() for x in (q, c)]
    exact(*leaves, case)[0].backward(weight[1:].double())
    for a, alone, leaf in zip(ours, gradients(slice(1, 67), torch.tensor([0, 66])), leaves, strict=True):
        same_bits(a[1:], alone)
        assert ((a[1:].double() - leaf.grad).norm() / leaf.grad.norm()).item() < 1e-2


@interpreted
@pytest.mark.parametrize("name", ["odd", "transposed", "part of a weight"])
def test_head_linear(name, kernel, same_bits):
    x, w = cases.heads(BF16)[name]
    rounded = torch.einsum("tnk,nmk->tnm", x.double(), w.double()).float().to(BF16)
    for tile in kernel.HEAD_TILES:
        same_bits(kernel.forward_heads(x, w, tile), rounded)
    x, w = (t.clone().requires_grad_() for t in (x, w))
    y = kernel.head_linear(x, w)
    y.backward(torch.ones_like(y))
    same_bits(x.grad, w.detach().double().sum(1).to(BF16).expand_as(x).contiguous())


@interpreted
def test_refusals_name_what_they_refuse(kernel):
    q, c, cu = torch.zeros(2, 3, 20), torch.zeros(2, 20), torch.tensor([0, 2])
    with pytest.raises(TypeError, match="mla: the sm90 implementation takes bfloat16, not torch.float32"):
        kernel.mla(q, c, cu, 1.0, 16, schedule=SCHEDULE)
    q, c = q.to(BF16), c.to(BF16)
    with pytest.raises(ValueError, match="no kv_block 128; it has 16, 32 and 64"):
        kernel.mla(q, c, cu, 1.0, 16, schedule=Schedule(kv_block=128, kv_partition=128))
    wide = torch.zeros(2, 700, dtype=BF16)
    with pytest.raises(ValueError, match=r"no keys of 600 \+ 100, only up to 512 \+ 128"):
        kernel.mla(wide[:, None], wide, cu, 1.0, 600, schedule=SCHEDULE)
