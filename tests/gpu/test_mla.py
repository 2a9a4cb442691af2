"""One arithmetic of latent attention: a query row has the same bits in a prefill, a cut prefill and a decode."""

import pytest
import torch

from skyrl_isoexec.kernels.numeric.bound import product_bound
from skyrl_isoexec.schedule import Schedule

SCHEDULE = Schedule(kv_block=64, kv_partition=512)
SHAPES = ((20, 512, 64), (10, 512, 64), (5, 512, 64), (3, 96, 32))
"""(query heads, latent, rotated) of GLM-4.7-Flash whole, on two and on four ranks, and of a small model."""
SCALE = 256**-0.5
PAGE = 64


class Paged:
    """One sequence's keys in shuffled pages of a cache whose unused slots are NaN, beside a neighbour's."""

    def __init__(self, kernel, c, latent, neighbour=0):
        length, width = c.shape
        self.kernel, self.latent, self.neighbour = kernel, latent, neighbour
        pages, more = -(-length // PAGE), -(-max(neighbour, 1) // PAGE)
        order = torch.randperm(pages + more + 3, generator=torch.Generator().manual_seed(1))
        shape = kernel.mla_cache_shape(len(order), PAGE, width)
        self.cache = torch.full(shape, float("nan"), device="cuda", dtype=torch.bfloat16)
        self.table = torch.full((2, max(pages, more)), -1, dtype=torch.int32)
        self.table[0, :pages], self.table[1, :more] = order[:pages], order[pages : pages + more]
        self.table = self.table.cuda()
        self._write(0, c)
        if neighbour:
            self._write(1, torch.randn(neighbour, width, device="cuda").bfloat16())

    def _write(self, request, c):
        position = torch.arange(c.shape[0], device="cuda")
        page = self.table[request].long()[position // PAGE]
        self.kernel.write_latent(c, self.cache, page * PAGE + position % PAGE)

    def rows(self, q, first, last, **options):
        """Attention of rows first .. last-1, the context ending at `last`; the neighbour's rows are all of its own."""
        mine, n = q[first:last], self.neighbour
        starts = torch.tensor([0, last - first, last - first + n], dtype=torch.int32, device="cuda")
        lengths = torch.tensor([last, n], dtype=torch.int32, device="cuda")
        both, count = torch.cat((mine, torch.randn(n, *q.shape[1:], device="cuda").bfloat16())), 2 if n else 1
        out = torch.full((*both.shape[:2], self.latent), float("nan"), device="cuda", dtype=torch.bfloat16)
        given = (both, self.cache, self.table[:count], starts[: count + 1], lengths[:count], SCALE, self.latent, out)
        return self.kernel.paged(*given, SCHEDULE, **options)[: last - first]

    def every_position(self, q, **options):
        """All rows of a sequence in one pure decode step of as many requests."""
        length = q.shape[0]
        starts = torch.arange(length + 1, dtype=torch.int32, device="cuda")
        lengths = torch.arange(1, length + 1, dtype=torch.int32, device="cuda")
        out = torch.full((*q.shape[:2], self.latent), float("nan"), device="cuda", dtype=torch.bfloat16)
        table = self.table[:1].expand(length, -1)
        given = (q, self.cache, table, starts, lengths, SCALE, self.latent, out)
        return self.kernel.paged(*given, SCHEDULE, **options)


@pytest.fixture
def made(op, normal):
    """made(shape, length) -> q, c, all rows' output."""

    def make(shape, length):
        heads, latent, rotated = shape
        q = normal(length, heads, latent + rotated, seed=length + 1)
        c = normal(length, latent + rotated, seed=length + 2)
        bounds = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        return q, c, op("mla").mla(q, c, bounds, SCALE, latent, schedule=SCHEDULE)

    return make


def attended(q, c, latent):
    """Causal latent attention of one sequence by matrix products in the dtype of the inputs."""
    s = torch.einsum("tnq,cq->ntc", q, c) * SCALE
    s = s.masked_fill(torch.ones(len(c), len(c), dtype=torch.bool, device="cuda").triu(1), float("-inf"))
    return torch.einsum("ntc,cl->tnl", s.softmax(-1), c[:, :latent])


@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_packing_and_bound(shape, op, made, differing):
    kernel, (q, c, whole), latent = op("mla"), made(shape, 1300), shape[1]
    exact = attended(q.double(), c.double(), latent)
    assert ((whole.double() - exact).norm() / exact.norm()).item() < 5e-3
    bounds = torch.tensor([0, 1300], dtype=torch.int32, device="cuda")
    tiles = [tile for tile in kernel.TILES if kernel.fits(tile, latent, latent + shape[2], SCHEDULE)]
    assert len(tiles) >= 4 and (kernel.GROUPED in tiles) == (latent == 512)
    for tile in tiles:
        assert differing(kernel.forward(q, c, bounds, SCALE, latent, SCHEDULE, tile)[0], whole) == 0, tile
    packed = torch.tensor([0, 700, 700, 2000, 2001], dtype=torch.int32, device="cuda")
    rows = [torch.cat((x[:700], x, x[:1])) for x in (q, c)]
    out = kernel.mla(*rows, packed, SCALE, latent, schedule=SCHEDULE)
    for a, b in ((out[:700], whole[:700]), (out[700:2000], whole), (out[2000:], whole[:1])):
        assert differing(a, b) == 0
    for heads in (1, shape[0] - 1):  # of another rank
        found = kernel.mla(q[:, :heads], c, bounds, SCALE, latent, schedule=SCHEDULE)
        assert differing(found, whole[:, :heads].contiguous()) == 0, heads


@pytest.mark.parametrize("kv_block", [16, 32])
def test_short_blocks(kv_block, op, made, differing):
    """Tiles agree for blocks whose scores are no product of a warp group."""
    kernel, (q, c, _), latent = op("mla"), made(SHAPES[0], 600), 512
    bounds, order = torch.tensor([0, 600], dtype=torch.int32, device="cuda"), Schedule(kv_block=kv_block)
    whole = kernel.mla(q, c, bounds, SCALE, latent, schedule=order)
    for tile in kernel.TILES:
        if kernel.fits(tile, latent, q.shape[2], order):
            assert differing(kernel.forward(q, c, bounds, SCALE, latent, order, tile)[0], whole) == 0, tile


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_at_every_position(shape, op, made, differing):
    """With and without programs per partition."""
    kernel, (q, c, whole) = op("mla"), made(shape, 1100)
    paged = Paged(kernel, c, shape[1])
    for split in (None, 0, 1, 2, 3):
        assert differing(paged.every_position(q, split=split), whole) == 0, split
    assert differing(paged.every_position(q, choice=(32, 4, 2)), whole) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_cut_around_blocks_and_partitions(shape, op, made, differing):
    kernel, (q, c, whole) = op("mla"), made(shape, 1100)
    paged = Paged(kernel, c, shape[1])
    for cut in (1, 2, 7, 63, 64, 65, 127, 128, 511, 512, 513, 575, 576, 577, 1023, 1024, 1025, 1099):
        for split in (None, 0, 2):
            parts = [paged.rows(q, *part, split=split) for part in ((0, cut), (cut, 1100))]
            assert differing(torch.cat(parts), whole) == 0, (cut, split)
    parts = [paged.rows(q, *part, choice=(64, 8, 2), split=0) for part in ((0, 500), (500, 1100))]
    assert differing(torch.cat(parts), whole) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_beside_neighbours(shape, op, made, differing, replayed):
    kernel, (q, c, whole), latent = op("mla"), made(shape, 600), shape[1]
    for neighbour in (0, 1, 9, 10, 129, 8192):
        paged = Paged(kernel, c, latent, neighbour)
        for last in (300, 600):
            for first in (last - 1, last - 3):
                for split in (None, 0, 2):
                    out = paged.rows(q, first, last, split=split)
                    assert differing(out, whole[first:last]) == 0, (neighbour, first, last, split)
    starts, lengths = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 1], [600]))
    paged = Paged(kernel, c, latent)
    given = (q[599:], paged.cache, paged.table[:1], starts, lengths, SCALE, latent)
    run = lambda: kernel.mla_paged(*given, schedule=SCHEDULE)  # noqa: E731
    assert differing(replayed(run), whole[599:]) == 0
    assert all(torch.equal(run(), whole[599:]) for _ in range(200))


@pytest.mark.parametrize("latent, rotated", [(64, 16), (512, 64)])
@pytest.mark.parametrize("kind", ["tails", "ties", "zeros", "minus_inf", "nan"])
def test_hazards_decode_like_the_prefill(kind, latent, rotated, op, differing, monkeypatch):
    kernel, cases = op("mla"), op("mla", "cases")
    case = cases.Case(kind=kind, lengths=(130, 1, 700), num_heads=5, latent=latent, rotated=rotated)
    q, c, bounds = cases.rows(case, torch.bfloat16)
    assert cases.reached(case, q, c, bounds, SCHEDULE)
    monkeypatch.setitem(globals(), "SCALE", case.scale)
    whole = kernel.mla(q.cuda(), c.cuda(), bounds.cuda(), case.scale, case.latent, schedule=SCHEDULE)
    paged = Paged(kernel, c[131:].cuda(), case.latent)
    for split in (0, 2):
        assert differing(paged.every_position(q[131:].cuda(), split=split), whole[131:]) == 0


def gradients(function, upstream, *leaves):
    """Gradients of leaves for an upstream gradient."""
    leaves = [x.clone().requires_grad_() for x in leaves]
    function(*leaves).backward(upstream)
    return [x.grad for x in leaves]


@pytest.mark.parametrize("shape", SHAPES)
def test_backward_repeats_and_holds_a_bound(shape, op, normal):
    kernel, (heads, latent, rotated) = op("mla"), shape
    bounds = torch.tensor([0, 300, 301, 1000], dtype=torch.int32, device="cuda")
    q, c, dy = (normal(1000, *x, seed=s) for s, x in enumerate(((heads, latent + rotated), (latent + rotated,),
                                                                (heads, latent))))  # fmt: skip
    run = lambda: gradients(lambda q, c: kernel.mla(q, c, bounds, SCALE, latent, schedule=SCHEDULE), dy, q, c)  # noqa: E731
    first = run()

    def exact(q, c):
        return torch.cat([attended(q[lo:hi], c[lo:hi], latent) for lo, hi in ((0, 300), (300, 301), (301, 1000))])

    for ours, theirs in zip(first, gradients(exact, dy.double(), q.double(), c.double()), strict=True):
        assert ((ours.double() - theirs).norm() / theirs.norm()).item() < 1e-2
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


@pytest.mark.parametrize("heads, nope, value, latent", [(20, 192, 256, 512), (5, 192, 256, 512), (3, 40, 72, 96)])
def test_head_linear_is_one_arithmetic(heads, nope, value, latent, op, normal, differing):
    """Both parts of a weight as they lie: under every tile, for every number of rows, and as a linear of each head."""
    kernel, linear = op("mla"), op("linear")
    kv_b = normal(heads, nope + value, latent, seed=1, scale=latent**-0.5)
    for weight, wide in ((kv_b[:, :nope].mT, nope), (kv_b[:, nope:], latent)):
        x = normal(300, heads, wide + 64, seed=2)[..., :wide]
        y = kernel.head_linear(x, weight)
        for n in (0, heads - 1):
            exact, bound = product_bound(x[:, n], weight[n])
            assert ((y[:, n].double() - exact).abs() <= bound + exact.abs() * 2**-8).all()
            assert differing(linear.linear(x[:, n], weight[n].contiguous()), y[:, n].contiguous()) == 0
        for tile in kernel.HEAD_TILES:
            assert differing(kernel.forward_heads(x, weight, tile), y) == 0, tile
        for rows in (1, 2, 16, 17, 64, 65, 129):
            assert differing(kernel.head_linear(x[:rows], weight), y[:rows]) == 0, rows
        dy = normal(*y.shape, seed=3)
        first = gradients(kernel.head_linear, dy, x, weight)
        exact = gradients(lambda x, w: torch.einsum("tnk,nmk->tnm", x, w), dy.double(), x.double(), weight.double())
        for ours, theirs in zip(first, exact, strict=True):
            assert ((ours.double() - theirs).norm() / theirs.norm()).item() < 1e-2
        for _ in range(20):
            found = gradients(kernel.head_linear, dy, x, weight)
            assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
