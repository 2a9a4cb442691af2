"""One arithmetic of attention: a query row has the same bits in a prefill, a cut prefill and a decode."""

import pytest
import torch

from skyrl_isoexec.schedule import Schedule

SCHEDULE = Schedule(kv_block=64, kv_partition=512)
SHAPES = ((32, 8, 128), (16, 2, 256), (9, 3, 64))
"""(query heads, key-value heads, head dimension) of MiMo-7B, Qwen3.5-35B-A3B and SmolLM2-135M."""
PAGE = 64


class Paged:
    """One sequence's keys and values in shuffled pages of a cache whose unused slots are NaN, beside a neighbour's."""

    def __init__(self, kernel, k, v, neighbour=0):
        length, kv, d = k.shape
        self.kernel, self.length, self.neighbour = kernel, length, neighbour
        pages, more = -(-length // PAGE), -(-max(neighbour, 1) // PAGE)
        order = torch.randperm(pages + more + 3, generator=torch.Generator().manual_seed(1))
        shape = kernel.kv_cache_shape(len(order), PAGE, kv, d, schedule=SCHEDULE)
        self.cache = torch.full(shape, float("nan"), device="cuda", dtype=torch.bfloat16)
        self.table = torch.full((2, max(pages, more)), -1, dtype=torch.int32)
        self.table[0, :pages], self.table[1, :more] = order[:pages], order[pages : pages + more]
        self.table = self.table.cuda()
        self._write(0, k, v)
        if neighbour:
            self._write(1, *(torch.randn(neighbour, kv, d, device="cuda").bfloat16() for _ in range(2)))

    def _write(self, request, k, v):
        position = torch.arange(k.shape[0], device="cuda")
        page = self.table[request].long()[position // PAGE]
        self.kernel.write_kv(k, v, self.cache, page * PAGE + position % PAGE)

    def rows(self, q, first, last, scale, **options):
        """Attention of rows first .. last-1, the context ending at `last`; the neighbour's rows are all of its own."""
        mine, n = q[first:last], self.neighbour
        others = torch.randn(n, *q.shape[1:], device="cuda").bfloat16()
        starts = torch.tensor([0, last - first, last - first + n], dtype=torch.int32, device="cuda")
        lengths = torch.tensor([last, n], dtype=torch.int32, device="cuda")
        both, count = torch.cat((mine, others)), 2 if n else 1
        out = torch.full_like(both, float("nan"))
        arguments = (both, self.cache, self.table[:count], starts[: count + 1], lengths[:count], scale, out, SCHEDULE)
        return self.kernel.paged(*arguments, **options)[: last - first]


@pytest.fixture
def made(op, normal):
    """made(shape, length) -> q, k, v, scale, all rows' output."""

    def make(shape, length):
        heads, kv, d = shape
        q, k, v = (
            normal(length, n, d, seed=n + s, scale=x) for s, n, x in ((1, heads, 2.0), (2, kv, 1.0), (3, kv, 1.0))
        )
        bounds = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        return q, k, v, d**-0.5, op("attention").attention(q, k, v, bounds, d**-0.5, schedule=SCHEDULE)

    return make


@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_packing_and_bound(shape, op, made, differing):
    kernel, (q, k, v, scale, whole) = op("attention"), made(shape, 1300)
    group = shape[0] // shape[1]
    wide = [x.double().transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))]
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, scale=scale).transpose(0, 1)
    assert ((whole.double() - exact).norm() / exact.norm()).item() < 5e-3
    bounds = torch.tensor([0, 1300], dtype=torch.int32, device="cuda")
    for choice in ((16, 4, 3), (64, 4, 2), (128, 8, 2), (128, 4, 2), (64, 8, 2)):
        assert differing(kernel.forward(q, k, v, bounds, scale, SCHEDULE, choice)[0], whole) == 0, choice
    packed = torch.tensor([0, 700, 700, 2000, 2001], dtype=torch.int32, device="cuda")
    rows = [torch.cat((x[:700], x, x[:1])) for x in (q, k, v)]
    out = kernel.attention(*rows, packed, scale, schedule=SCHEDULE)
    for a, b in ((out[:700], whole[:700]), (out[700:2000], whole), (out[2000:], whole[:1])):
        assert differing(a, b) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_at_every_position(shape, op, made, differing):
    """All positions in one pure decode step of as many requests, with and without programs per partition."""
    kernel, (q, k, v, scale, whole) = op("attention"), made(shape, 1100)
    paged = Paged(kernel, k, v)
    table = paged.table[:1].expand(1100, -1)
    starts = torch.arange(1101, dtype=torch.int32, device="cuda")
    lengths = torch.arange(1, 1101, dtype=torch.int32, device="cuda")
    for split in (0, 1, 2, 3):
        out = torch.full_like(q, float("nan"))
        kernel.paged(q, paged.cache, table, starts, lengths, scale, out, SCHEDULE, split=split)
        assert differing(out, whole) == 0, split


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_cut_around_blocks_and_partitions(shape, op, made, differing):
    kernel, (q, k, v, scale, whole) = op("attention"), made(shape, 1100)
    paged = Paged(kernel, k, v)
    for cut in (1, 7, 63, 64, 65, 127, 128, 511, 512, 513, 575, 576, 577, 1023, 1024, 1025, 1099):
        for split in (None, 0, 2):
            head, tail = (paged.rows(q, *part, scale, split=split) for part in ((0, cut), (cut, 1100)))
            assert differing(torch.cat((head, tail)), whole) == 0, (cut, split)


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_beside_neighbours(shape, op, made, differing, replayed):
    kernel, (q, k, v, scale, whole) = op("attention"), made(shape, 600)
    for neighbour in (0, 1, 9, 10, 129, 8192):
        paged = Paged(kernel, k, v, neighbour)
        for last in (300, 600):
            for first in (last - 1, last - 3):
                for split in (None, 0, 2):
                    out = paged.rows(q, first, last, scale, split=split)
                    assert differing(out, whole[first:last]) == 0, (neighbour, first, last, split)
    starts, lengths = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 1], [600]))
    paged, row = Paged(kernel, k, v), q[599:]
    run = lambda: kernel.attention_paged(row, paged.cache, paged.table[:1], starts, lengths, scale, schedule=SCHEDULE)  # noqa: E731
    assert differing(replayed(run), whole[599:]) == 0
    assert all(torch.equal(run(), whole[599:]) for _ in range(200))


@pytest.mark.parametrize("kind", ["tails", "ties", "zeros", "minus_inf", "nan"])
def test_hazards_decode_like_the_prefill(kind, op, differing):
    kernel, cases = op("attention"), op("attention", "cases")
    case = cases.Case(kind=kind, lengths=(130, 1, 700), num_heads=4, num_kv_heads=2, head_dim=64)
    q, k, v, bounds = cases.rows(case, torch.bfloat16)
    assert cases.reached(case, q, k, v, bounds, SCHEDULE)
    q, k, v = q.cuda(), k.cuda(), v.cuda()
    whole = kernel.attention(q, k, v, bounds.cuda(), case.scale, schedule=SCHEDULE)
    paged, length = Paged(kernel, k[131:], v[131:]), 700
    starts = torch.arange(length + 1, dtype=torch.int32, device="cuda")
    lengths = torch.arange(1, length + 1, dtype=torch.int32, device="cuda")
    for split in (0, 2):
        out = torch.full_like(q[131:], float("nan"))
        table = paged.table[:1].expand(length, -1)
        kernel.paged(q[131:], paged.cache, table, starts, lengths, case.scale, out, SCHEDULE, split=split)
        assert differing(out, whole[131:]) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_backward_repeats_and_holds_a_bound(shape, op, normal):
    kernel, (heads, kv, d), group = op("attention"), shape, shape[0] // shape[1]
    bounds = torch.tensor([0, 300, 301, 1000], dtype=torch.int32, device="cuda")
    q, k, v, dy = (normal(1000, n, d, seed=s) for s, n in enumerate((heads, kv, kv, heads)))

    def gradients():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        kernel.attention(*leaves, bounds, d**-0.5, schedule=SCHEDULE).backward(dy)
        return [x.grad for x in leaves]

    first = gradients()
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    for lo, hi in ((0, 300), (300, 301), (301, 1000)):
        repeats = zip(wide, (1, group, group), strict=True)
        a, b, c = (x[lo:hi].repeat_interleave(r, 1).transpose(0, 1) for x, r in repeats)
        out = torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True, scale=d**-0.5)
        out.transpose(0, 1).backward(dy[lo:hi].double())
    for ours, theirs in zip(first, wide, strict=True):
        assert ((ours.double() - theirs.grad).norm() / theirs.grad.norm()).item() < 1e-2
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(gradients(), first, strict=True))
