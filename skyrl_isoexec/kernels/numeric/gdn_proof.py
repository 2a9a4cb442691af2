"""Proof of a gated delta rule, in whichever form: a row's bits are the same in every way of computing it.

The ways are packed sequences with and without a graph, prefills over pages that are cut anywhere, and decode steps that
start anywhere. `definition` is the eager form; where it is None, the tensor core hides the order, so results keep a
bound, and states are compared through the rows that go on from them.

Shapes: T tokens, V value heads, D their width, R requests, P pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric import gdn_cases
from skyrl_isoexec.kernels.numeric.gdn_cases import Case
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.kernels.numeric.gdn_requests import Paged, Subject, ints
from skyrl_isoexec.schedule import Schedule

DEGREES = (1, 2, 4)
"""Tensor-parallel degrees."""
BATCHES = (1, 2, 17, 64, 256)
"""Requests of one decode step."""
BEYOND = 5
"""Rows of a sequence past the second chunk: cuts and starts go up to half of them."""
SHAPES = (
    # key heads, value heads, key width, value width, taps, lengths, chunk
    (1, 1, 1, 1, 2, (1,), 16),
    (2, 2, 33, 5, 4, (40, 1), 16),
    (1, 3, 16, 70, 3, (33, 16), 32),
    (4, 4, 20, 64, 9, (130,), 128),
)
NARROW = ((64, 64), (16, 32))
"""Key and value widths of fewer checks, where the tensor core hides the order; all others have `heads` as given."""
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-5}
"""Of the largest output: how far one may lie from float64."""
FINITE_KINDS, BOUNDED_KINDS = ("normal", "gates", "zeros", "hazards"), ("normal", "zeros")


def prove(s: Subject) -> None:
    """Collect every check."""
    _definition(s)
    if s.definition is not None:
        _states(s)
        _shapes(s)
    _ways(s, range(2 * s.schedule.gdn_chunk + BEYOND // 2 + 1))
    if s.definition is None:
        _narrow(s)
    _batch(s)
    _pages(s)
    _prefix(s)
    _padding(s)
    _sequences(s)
    _edges(s)


def _definition(s: Subject) -> None:
    """Every kind: the bits of the definition, or the bound; then a prefill over pages."""
    heads, results = replace(s.heads, num_key_heads=2, num_value_heads=2 * s.heads.group), []
    for kind in gdn_cases.KINDS if s.definition is not None else FINITE_KINDS:
        case = Case(kind=kind, heads=heads)
        given, cu = gdn_cases.rows(case, s.dtype)
        for name, count in gdn_cases.reached(case, given, s.schedule.gdn_chunk).items():
            s.reached(f"{kind}: {name}", count)
        found = s.impl.gdn(*given, cu, heads, schedule=s.schedule)
        results.append((case, found))
        if s.definition is not None:
            s.equal("definition", s.definition.gdn(*given, cu, heads, schedule=s.schedule), found, at=kind)
        elif kind in BOUNDED_KINDS:
            exact = gdn_cases.exact(given, cu, heads)
            bound = torch.full_like(exact, BOUNDS[s.dtype] * exact.abs().max().item())
            s.proof.within(f"{s.label} within the bound", found, exact, bound, at=kind)
    for case, found in results:
        if case.kind == "nan":
            s.reached("rows before a NaN", int((~found.isnan()).all(2).all(1).sum()))
            s.reached("rows after a NaN", int(found.isnan().all(2).any(1).sum()))
        paged = Paged(s, case, s.schedule.gdn_chunk)
        s.equal("paged prefill", found, paged.step(paged.whole()), at=case.kind)


def _same_states(s: Subject, name: str, expected: Paged, found: Paged, length: int, at: str) -> None:
    """What pages carry of requests that are all `length` long."""
    carried = expected.carried(s.live, length)
    s.reached(f"{name}: finite", int(all(t.isfinite().all() for t in carried)))
    for i, (a, b) in enumerate(zip(carried, found.carried(s.live, length), strict=True)):
        s.equal(name, a, b, at=f"{at}, tensor {i}")


def _states(s: Subject) -> None:
    """Outputs and states of the definition after each of some steps, which end in, at and beside ends of chunks."""
    chunk, name = s.schedule.gdn_chunk, "states of the definition"
    stops = (0, 1, chunk // 2, chunk - 1, chunk, chunk + 1, 2 * chunk + 3, 2 * chunk + 4)
    case = Case(kind="gates", lengths=(stops[-1],), heads=s.few)
    ours, theirs = Paged(s, case, chunk), Paged(s, case, chunk, impl=s.definition)
    for lo, hi in zip(stops[:-1], stops[1:], strict=True):
        at = f"{lo} to {hi}"
        s.equal(name, theirs.step([(0, lo, hi)]), ours.step([(0, lo, hi)]), at=f"{at}, outputs")
        _same_states(s, name, theirs, ours, hi, at)


def _shapes(s: Subject) -> None:
    """Heads, widths and taps that fill no vector, and other chunks."""
    for keys, values, key_width, width, taps, lengths, chunk in SHAPES:
        heads = GdnHeads(num_key_heads=keys, num_value_heads=values, key_width=key_width, value_width=width)
        case, order = Case(heads=heads, lengths=lengths, conv_width=taps), Schedule(gdn_chunk=chunk)
        given, cu = gdn_cases.rows(case, s.dtype)
        expected, found = (m.gdn(*given, cu, heads, schedule=order) for m in (s.definition, s.impl))
        s.equal("shapes", expected, found, at=f"{case}, chunk {chunk}")


def _narrow(s: Subject) -> None:
    """Heads of other widths, and fewer places: beside ends of blocks of 16 rows and of chunks."""
    chunk = s.schedule.gdn_chunk
    places = (0, 1, 15, 16, 17, chunk - 1, chunk, chunk + 1, chunk + 16, 2 * chunk - 1, 2 * chunk)
    for key_width, width in NARROW:
        heads = replace(s.heads, key_width=key_width, value_width=width)
        narrow = replace(s, heads=heads, label=f"{s.label} {key_width} by {width}")
        _definition(narrow)
        _ways(narrow, places)


def _ways(s: Subject, places: Sequence[int]) -> None:
    """Prefills in one piece and cut at every place, and decode steps from every place on."""
    many = _many(s, places)
    _cuts(s, *many)
    _decode(s, *many)


def _many(s: Subject, places: Sequence[int]) -> tuple[Case, Sequence[int], Tensor, list[Paged]]:
    """A request of just past two chunks for each place, the places, o, and one prefill for each page size."""
    chunk = s.schedule.gdn_chunk
    case = Case(lengths=(2 * chunk + BEYOND,) * len(places), heads=s.few)
    whole, prefills = s.packed(case), []
    for page_size in (chunk, 2 * chunk):
        prefill = Paged(s, case, page_size)
        s.equal("one prefill", whole, prefill.step(prefill.whole()), at=f"pages of {page_size}")
        prefills.append(prefill)
    s.reached("places inside a chunk", sum(place % chunk != 0 for place in places))
    s.reached("places at a chunk's end", sum(place > 0 and place % chunk == 0 for place in places))
    return case, places, whole, prefills


def _cuts(s: Subject, case: Case, places: Sequence[int], whole: Tensor, prefills: list[Paged]) -> None:
    """A prefill cut at every position: request r after its first r tokens."""
    for prefill in prefills:
        paged, length = Paged(s, case, prefill.page_size, strided=True), case.lengths[0]
        for spans in (
            [(r, 0, cut) for r, cut in enumerate(places)],
            [(r, cut, length) for r, cut in enumerate(places)],
        ):
            at = f"pages of {paged.page_size}"
            s.equal("cut prefill", paged.of(whole, spans), paged.step(spans), at=at)
        if s.live is not None:
            _same_states(s, "states after a cut prefill", prefill, paged, length, at)


def _decode(s: Subject, case: Case, places: Sequence[int], whole: Tensor, prefills: list[Paged]) -> None:
    """Decode steps from every position: request r after a prefill of its first r tokens, all requests in one batch."""
    for prefill in prefills:
        paged, length = Paged(s, case, prefill.page_size), case.lengths[0]
        paged.step([(r, 0, start) for r, start in enumerate(places)])
        for i in range(length):
            spans = [(r, start + i, start + i + 1) for r, start in enumerate(places) if start + i < length]
            at = f"pages of {paged.page_size}, step {i}"
            s.equal("decode", paged.of(whole, spans), paged.step(spans), at=at)
        if s.live is not None:
            _same_states(s, "states after decode", prefill, paged, length, f"pages of {paged.page_size}")


def _batch(s: Subject) -> None:
    """The last row of a request among up to 256 of other lengths, each as in a packed sequence; and beside prefills."""
    chunk = s.schedule.gdn_chunk
    lengths = tuple(1 + 7 * r % (2 * chunk + 2) for r in range(max(BATCHES)))
    case = Case(lengths=lengths, heads=s.few)
    whole, paged = s.packed(case), Paged(s, case, 2 * chunk)
    paged.step([(r, 0, n - 1) for r, n in enumerate(lengths)])
    before = [state.clone() for state in paged.states]
    last = [(r, n - 1, n) for r, n in enumerate(lengths)]
    s.reached("decode rows at a chunk's end", sum(n % chunk == 0 for n in lengths))
    for count in BATCHES:
        for place in sorted({0, count // 2, count - 1}):
            for state, old in zip(paged.states, before, strict=True):
                state.copy_(old)
            spans = [*last[1 : place + 1], last[0], *last[place + 1 : count]]
            s.equal("batch", paged.of(whole, spans), paged.step(spans), at=f"{count} requests, place {place}")
    for state, old in zip(paged.states, before, strict=True):
        state.copy_(old)
    mixed = [(r, 0, n) if r % 3 else (r, n - 1, n) for r, n in enumerate(lengths[:40])]
    s.equal("prefills beside decode", paged.of(whole, mixed), paged.step(mixed))


def _pages(s: Subject) -> None:
    """Pages of one and two chunks, in separate tensors and as an engine allocates them; others keep their NaN."""
    chunk = s.schedule.gdn_chunk
    case = Case(lengths=(2 * chunk, 1, 3 * chunk + 1, chunk), heads=s.few)
    whole = s.packed(case)
    for page_size in (chunk, 2 * chunk):
        for strided in (False, True):
            paged, at = Paged(s, case, page_size, strided=strided), f"pages of {page_size}, strided {strided}"
            s.reached("NaN in the states", int(sum(state.isnan().sum() for state in paged.states)))
            s.equal("pages", whole, paged.step(paged.whole()), at=at)
            others = paged.unused()
            s.reached("pages of nobody", len(others))
            for i, state in enumerate(paged.states):
                s.equal("pages of nobody", torch.full_like(state[others], float("nan")), state[others], at=f"{at}, {i}")


def _prefix(s: Subject) -> None:
    """Two readers go on from one request's whole pages, as after a hit of a prefix cache, and never write them."""
    chunk = s.schedule.gdn_chunk
    length = 3 * chunk + 2
    for page_size in (chunk, 2 * chunk):
        paged = Paged(s, Case(lengths=(length,) * 3, heads=s.few), page_size)
        paged.rows = (*(t[:length].repeat(3, 1) for t in paged.rows[:3]), *paged.rows[3:])
        cold = paged.step([(0, 0, length)])
        for shared in range(1, length // page_size + 1):
            start, at = shared * page_size, f"{shared} pages of {page_size}"
            table, held = paged.table[1:].clone(), paged.table[0].long()
            table[:, :shared] = paged.table[0, :shared]
            before, parts = [state[held].clone() for state in paged.states], []
            for lo, hi in ((start, start + 1), (start + 1, length)):
                parts.append(paged.step([(1, lo, hi), (2, lo, hi)], table=table).unflatten(0, (2, -1)))
            s.equal("prefix", cold[None, start:].expand(2, *cold[start:].shape), torch.cat(parts, 1), at=at)
            for i, (state, old) in enumerate(zip(paged.states, before, strict=True)):
                s.equal("pages of a prefix", old, state[held], at=f"{at}, tensor {i}")
        s.reached("readers of a prefix", 2 * (length // page_size))


def _padding(s: Subject) -> None:
    """Requests without rows, and rows past the last request, as a captured graph pads them, touch nothing."""
    chunk = s.schedule.gdn_chunk
    case = Case(lengths=(chunk + 1, 5), heads=s.few)
    whole, last = s.packed(case), [(0, chunk, chunk + 1), (1, 4, 5)]
    for entry in (0, -1):
        paged = Paged(s, case, chunk)
        paged.step([(0, 0, chunk), (1, 0, 4)])
        rows = [paged.of(t, last).repeat(3, 1) for t in paged.rows[:3]]
        out = torch.full((len(rows[0]), *whole.shape[1:]), 7.0, dtype=s.dtype)
        expected = torch.cat([paged.of(whole, last), out[2:]])
        table = torch.cat([paged.table, torch.full_like(paged.table, entry)])
        at = f"table entries {entry}"
        found = paged.advance(rows, table, ints(0, 1, 2, 2, 2), ints(chunk + 1, 5, 0, 0), out)
        s.equal("padding", expected, found, at=at)
        s.equal("padding", expected, out, at=f"{at}, in place")
        others = paged.unused()
        for i, state in enumerate(paged.states):
            s.equal("padding", torch.full_like(state[others], float("nan")), state[others], at=f"{at}, state {i}")


def _sequences(s: Subject) -> None:
    """Packed sequences do not see each other, nor heads each other; a graph and other threads change nothing."""
    case = Case(heads=s.heads, lengths=(5, 0, s.schedule.gdn_chunk, 1, s.schedule.gdn_chunk + 9))
    given, cu = gdn_cases.rows(case, s.dtype)

    def run(*operands: Tensor, cu: Tensor = cu, heads: GdnHeads = s.heads) -> Tensor:
        return s.impl.gdn(*operands, cu, heads, schedule=s.schedule)

    whole = run(*given)
    s.reached("empty sequences", case.lengths.count(0))
    for lo, hi in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        for stop in sorted({hi, (lo + hi + 1) // 2} - {lo}):
            alone = run(*(t[lo:stop] for t in given[:3]), *given[3:], cu=ints(0, stop - lo))
            s.equal("sequences alone", whole[lo:stop], alone, at=f"{lo} to {stop}")
    for size in DEGREES:
        parts = [run(*operands, heads=heads) for operands, heads in gdn_cases.shards(given, s.heads, size)]
        s.equal("head shards", whole, torch.cat(parts, 1), at=f"degree {size}")
    spread = tuple(t.repeat_interleave(2, -1)[..., ::2] for t in given)
    s.reached("strided operands", sum(not t.is_contiguous() for t in spread))
    s.equal("strides", whole, run(*spread))
    s.proof.autograd(f"{s.label} autograd", run, *given)
    short, start = tuple(t[:20] for t in given[:3]), ints(0, 1, 20)
    s.proof.repeats(f"{s.label} repeats", lambda: run(*short, *given[3:], cu=start))


def _edges(s: Subject) -> None:
    """No rows at all."""
    case = Case(heads=s.few, lengths=(3,))
    given, _ = gdn_cases.rows(case, s.dtype)
    none = tuple(t[:0] for t in given[:3])
    empty = torch.zeros(0, case.heads.num_value_heads, case.heads.value_width, dtype=s.dtype)
    for bounds in (ints(0), ints(0, 0)):
        found = s.impl.gdn(*none, *given[3:], bounds, case.heads, schedule=s.schedule)
        s.proof.empty(f"{s.label} no rows", empty, found)
