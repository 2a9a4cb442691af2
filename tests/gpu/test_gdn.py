"""One arithmetic of the gated delta rule: a row has the same bits in training, a cut prefill and a decode step."""

import hashlib
from dataclasses import replace

import pytest
import torch

from skyrl_isoexec.kernels.numeric import gdn_cases
from skyrl_isoexec.kernels.numeric.gdn_cases import Case
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.schedule import Schedule

SCHEDULE = Schedule(gdn_chunk=64)
HEADS = GdnHeads(num_key_heads=2, num_value_heads=4, key_width=128, value_width=128)
"""An eighth of the heads of Qwen3.5-9B and Qwen3.5-35B-A3B."""
FORMS = ("gdn", "gdn_cpr")
BF16 = torch.bfloat16
STEPS = {
    "gdn": ((128, 4, 168), (128, 4, 255), (128, 8, 128), (64, 4, 168), (32, 4, 168)),
    "gdn_cpr": (None, (4, 2, 16, 4, 128), (8, 4, 16, 4, 128), (4, 4, 16, 4, 168), (4, 4, 8, 4, 255), (16, 4, 8, 4, 80)),
}
"""Candidates of a decode step."""
CHUNKS = {
    "gdn": (
        {"tile": (64, 8), "system": 8, "walk": (64, 4, 2), "attend": (128, 8)},
        {"tile": (16, 4), "walk": (32, 4, 3), "attend": (128, 4)},
        {"walk": (16, 4, 2), "attend": (32, 4)},
        {"walk": (32, 4, 1)},
        {"walk": (64, 8, 2)},
    ),
    "gdn_cpr": (
        {"scan": None},
        {"scan": (2, 2, 16, 4, 168), "walk": (64, 4, 4)},
        {"scan": (1, 1, 8, 4, 168), "walk": (32, 4, 3)},
        {"scan": (4, 4, 8, 4, 255)},
        {"scan": (2, 2, 16, 2, 255)},
    ),
}
"""Candidates of the kernels over chunks."""


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def given(length: int, heads: GdnHeads = HEADS, kind: str = "normal") -> tuple[torch.Tensor, ...]:
    """Operands of one sequence, the same on every call."""
    return tuple(t.cuda() for t in gdn_cases.rows(Case(kind=kind, heads=heads, lengths=(length,)), BF16)[0])


class Requests:
    """Copies of one sequence as requests over shuffled pages that are full of NaN and lie together, as an engine's."""

    def __init__(self, kernel, rows, lengths, page_size=128, heads=HEADS):
        self.kernel, self.rows, self.heads, self.page_size = kernel, rows, heads, page_size
        shapes = kernel.gdn_states(heads, rows[3].shape[1], BF16, schedule=SCHEDULE)
        states, table = gdn_cases.pages(shapes, lengths, page_size, strided=True)
        flat = torch.empty(0, dtype=BF16).set_(states[0].untyped_storage()).cuda()
        self.states = [
            flat.view(s.dtype).as_strided(s.shape, s.stride(), s.storage_offset()) for s in states
        ]  # fmt: skip
        self.memory, self.table = flat, table.cuda()

    def step(self, spans, **options):
        """Rows lo .. hi-1 of some requests, as (request, lo, hi)."""
        parts = [torch.cat([t[lo:hi] for _, lo, hi in spans]) for t in self.rows[:3]]
        starts = torch.tensor([0, *(hi - lo for _, lo, hi in spans)]).cumsum(0).int().cuda()
        table, lengths = self.table[[r for r, _, _ in spans]], ints(*(hi for _, _, hi in spans))
        return self.kernel.gdn_paged(
            *parts, *self.rows[3:], self.states, table, starts, lengths, self.page_size, self.heads,
            schedule=SCHEDULE, **options,
        )  # fmt: skip

    def carried(self, request, length):
        """What the pages of a request of that length carry."""
        found = []
        for j in range(-(-length // self.page_size)):
            position = min(length, (j + 1) * self.page_size)
            found += self.kernel.live(self.states, int(self.table[request, j]), position, SCHEDULE)
        return found


@pytest.fixture(params=FORMS)
def form(request, op):
    return op(request.param)


def whole_of(kernel, rows, heads=HEADS):
    return kernel.gdn(*rows, ints(0, rows[0].shape[0]), heads, schedule=SCHEDULE)


@pytest.mark.parametrize("kind", ["normal", "zeros", "gates"])
def test_bound_against_float64(kind, form):
    rows = given(300, kind=kind)
    exact = gdn_cases.exact([t.cpu() for t in rows], torch.tensor([0, 300]), HEADS)
    error = (whole_of(form, rows).cpu().double() - exact).abs().max()
    assert error < 2.0**-5 * exact.abs().max()


def test_decode_at_every_position(form, differing):
    """All positions of three chunks: a prefill up to each, then one decode step of as many requests."""
    length = 200
    rows = given(length)
    whole = whole_of(form, rows)
    run = Requests(form, rows, (length,) * length)
    before = run.step([(r, 0, r) for r in range(length)])
    expected = torch.cat([whole[:r] for r in range(length)])
    assert differing(before, expected) == 0
    last = run.step([(r, r, r + 1) for r in range(length)])
    assert differing(last, whole) == 0
    again = run.step([(r, r + 1, length) for r in range(length - 1)])
    assert differing(again, torch.cat([whole[r + 1 :] for r in range(length - 1)])) == 0
    for request in (0, 62, 63, 64, 190, 198):  # each went another way to the same state
        for a, b in zip(run.carried(request, length), run.carried(100, length), strict=True):
            assert torch.equal(bits(a), bits(b))


def test_token_by_token_over_chunks_and_pages(form, differing):
    length = 140
    rows = given(length)
    whole, run, once = whole_of(form, rows), *(Requests(form, rows, (length,), 64) for _ in range(2))
    assert differing(once.step([(0, 0, length)]), whole) == 0
    for t in range(length):
        assert differing(run.step([(0, t, t + 1)]), whole[t : t + 1]) == 0, t
    compared = 0
    for a, b in zip(run.carried(0, length), once.carried(0, length), strict=True):
        assert torch.equal(bits(a), bits(b))
        compared += a.numel()
    assert compared > 100_000


def test_prefill_cut_around_blocks_chunks_and_pages(form, differing):
    length = 330
    rows = given(length)
    whole = whole_of(form, rows)
    for cut in (1, 3, 15, 16, 17, 31, 33, 48, 63, 64, 65, 127, 128, 129, 255, 256, 257, 329):
        run = Requests(form, rows, (length,), 128)
        parts = [run.step([(0, 0, cut)]), run.step([(0, cut, length)])]
        assert differing(torch.cat(parts), whole) == 0, cut


@pytest.mark.parametrize("name", FORMS)
def test_candidates_of_a_decode_step(name, op, differing):
    """Positions beside blocks of 16 and ends of chunks, those included."""
    kernel, rows = op(name), given(130)
    whole, starts = whole_of(kernel, rows), (0, 1, 15, 16, 17, 40, 63, 64, 80, 126, 127, 128)
    run = Requests(kernel, rows, (130,) * len(starts))
    run.step([(r, 0, start) for r, start in enumerate(starts)])
    memory, after = run.memory.clone(), None
    for choice in STEPS[name]:
        run.memory.copy_(memory)
        found = run.step([(r, start, start + 1) for r, start in enumerate(starts)], choice=choice)
        assert differing(found, whole[list(starts)]) == 0, choice
        after = run.memory.clone() if after is None else after
        assert torch.equal(bits(run.memory), bits(after)), choice


@pytest.mark.parametrize("name", FORMS)
def test_candidates_of_the_kernels_over_chunks(name, op, differing, monkeypatch):
    kernel, rows = op(name), given(300)
    whole, chunks = whole_of(kernel, rows), kernel.chunks
    for choice in CHUNKS[name]:
        monkeypatch.setattr(kernel, "chunks", lambda *a, choice=choice: chunks(*a, **choice))
        assert differing(whole_of(kernel, rows), whole) == 0, choice
        run = Requests(kernel, rows, (300,))
        found = torch.cat([run.step([(0, 0, 77)]), run.step([(0, 77, 300)])])
        assert differing(found, whole) == 0, choice


def test_packing_batches_and_heads(form, differing):
    heads = replace(HEADS, num_key_heads=4, num_value_heads=8)
    lengths = (70, 0, 1, 64, 190, 128)
    rows, bounds = gdn_cases.rows(Case(heads=heads, lengths=lengths), BF16)
    rows = tuple(t.cuda() for t in rows)
    whole = form.gdn(*rows, bounds.cuda(), heads, schedule=SCHEDULE)
    for lo, hi in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if hi > lo:
            alone = whole_of(form, (*(t[lo:hi] for t in rows[:3]), *rows[3:]), heads)
            assert differing(alone, whole[lo:hi]) == 0
    for size in (2, 4):
        parts = [
            form.gdn(*shard, bounds.cuda(), few, schedule=SCHEDULE)
            for shard, few in gdn_cases.shards(rows, heads, size)
        ]
        assert differing(torch.cat(parts, 1), whole) == 0


def test_decode_beside_neighbours(form, differing):
    """A decode row beside prefills of other lengths and many single rows."""
    rows = given(300)
    whole = whole_of(form, rows)
    for others in ((9,), (129, 1, 300), (1,) * 63, (64, 65)):
        run = Requests(form, rows, (300,) * (1 + len(others)))
        run.step([(0, 0, 150)])
        spans = [(0, 150, 151), *((r + 1, 0, n) for r, n in enumerate(others))]
        found = run.step(spans)
        assert differing(found, torch.cat([whole[lo:hi] for _, lo, hi in spans])) == 0


def test_a_captured_step_runs_over_chunks_and_padding(form, differing):
    """One graph of four requests, one of them padding: lengths and tables change between replays, addresses do not."""
    length, page = 200, 64
    rows = given(length)
    whole, run = whole_of(form, rows), Requests(form, rows, (length,) * 3, page)
    begun = (0, 50, 127)
    run.step([(r, 0, n) for r, n in enumerate(begun)])
    x, a, b = (torch.zeros(4, t.shape[1], dtype=BF16, device="cuda") for t in rows[:3])
    starts, lengths = ints(0, 1, 2, 3, 3), ints(1, 51, 128, 0)
    table = torch.cat([run.table, torch.full_like(run.table[:1], -1)])
    out = torch.full((4, HEADS.num_value_heads, HEADS.value_width), float("nan"), dtype=BF16, device="cuda")
    memory = run.memory.clone()

    def step():
        return form.gdn_paged(
            x, a, b, *rows[3:], run.states, table, starts, lengths, page, HEADS, out, schedule=SCHEDULE
        )  # fmt: skip

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    run.memory.copy_(memory)
    for i in range(70):
        position = [n + i for n in begun]
        for t, source in zip((x, a, b), rows[:3], strict=True):
            t[:3] = source[position]
        lengths.copy_(ints(*(p + 1 for p in position), 0))
        out.fill_(float("nan"))
        graph.replay()
        assert differing(out[:3], whole[position]) == 0, i
        assert out[3].isnan().all()
    two = ints(0, 2, 2, 2, 2)
    starts.copy_(two)
    graph.replay()
    torch.cuda.synchronize()
    assert out[:2].isnan().all()


def _hash(*tensors):
    return hashlib.sha256(b"".join(bits(t).cpu().numpy().tobytes() for t in tensors)).hexdigest()


def test_two_hundred_repeats_have_one_hash(form):
    """Training, a prefill over pages with what it leaves, and a step that ends a chunk."""
    rows = given(500)
    assert len({_hash(whole_of(form, rows)) for _ in range(200)}) == 1
    run = Requests(form, rows, (500,) * 2)
    run.step([(0, 0, 100), (1, 0, 63)])
    memory, prefills, steps = run.memory.clone(), set(), set()
    for _ in range(200):
        run.memory.copy_(memory)
        prefills.add(_hash(run.step([(0, 100, 500)]), *run.carried(0, 500)))
        steps.add(_hash(run.step([(1, 63, 64)]), *run.carried(1, 64)))
    assert len(prefills) == len(steps) == 1


def test_backward_repeats_and_holds_a_bound(form):
    lengths = (150, 1, 0, 64)
    rows, bounds = gdn_cases.rows(Case(heads=HEADS, lengths=lengths), BF16)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(sum(lengths), HEADS.num_value_heads, HEADS.value_width, generator=generator).to(BF16)

    def gradients():
        leaves = [t.cuda().requires_grad_() for t in rows]
        form.gdn(*leaves, bounds.cuda(), HEADS, schedule=SCHEDULE).backward(weight.cuda())
        return [leaf.grad for leaf in leaves]

    first = gradients()
    wide = [t.double().requires_grad_() for t in rows]
    gdn_cases.exact(wide, bounds, HEADS).backward(weight.double())
    for ours, theirs in zip(first, wide, strict=True):
        assert ((ours.cpu().double() - theirs.grad).norm() / theirs.grad.norm()).item() < 2e-2
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(gradients(), first, strict=True))
