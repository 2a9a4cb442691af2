"""Proof of latent attention: a row's bits are the reference's, whatever the batch, the pages and the cut of a prefill.

Where the tensor core hides the order (`definition` None), every tile must give the same bits, which keep a bound; all
other checks are the same.

Shapes: T tokens, N query heads, L latent rank, Q width of a key, R requests, P pages of a request.
"""

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from skyrl_isoexec.kernels.mla import cases, reference
from skyrl_isoexec.kernels.mla.cases import Case
from skyrl_isoexec.kernels.numeric import narrow
from skyrl_isoexec.kernels.numeric.bound import product_bound
from skyrl_isoexec.kernels.numeric.inputs import count_hazards, normal
from skyrl_isoexec.kernels.numeric.proof import DEGREES, DTYPES, ROW_COUNTS, Proof
from skyrl_isoexec.schedule import Schedule

SHAPES = (
    # heads, latent, rotated, lengths, kv_block, kv_partition
    (1, 1, 1, (1,), 16, 512),
    (5, 16, 4, (70,), 16, 32),
    (7, 33, 3, (2, 65, 1), 32, 64),
    (20, 7, 1, (129, 3), 48, 96),
    (3, 80, 16, (17, 16, 15), 16, 16),
    (4, 12, 2, (300,), 16, 128),
    (65, 16, 8, (20,), 256, 512),
)
TENSOR_CORE_SHAPES = (
    (5, 16, 4, (70,), 16, 32),
    (3, 80, 16, (17, 16, 15), 16, 16),
    (20, 512, 64, (700, 3), 64, 512),
    (5, 512, 64, (600,), 64, 512),
)
WIDE = {"lengths": (130, 1, 600), "num_heads": 5, "latent": 512, "rotated": 64}
"""Of a case whose keys every tile on the tensor core holds."""
PAGED_SHAPES = ((20, 512, 64, (1100, 3, 512, 64), 64, 512), (3, 80, 16, (70, 1, 33), 16, 32))
ROUNDINGS = 4 * 2.0**-9
"""What weights, their sum and the result may lose to bf16, each half a unit of 2**-8; the fourth is for fp32 sums."""
CUTS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 139)
"""Where a prefill of 140 tokens is cut: around blocks, pages and partitions."""
NEIGHBOURS = ((1,), (9,), (10,), (129,), (8192,), (1,) * 40, (129, 1, 9, 300, 1))
"""Query lengths beside a decode row."""
ABSORBED = ((20, 512, 192), (5, 256, 512))
"""(heads, output, input features) of a head's linears, before and after the attention, on the tensor core."""


def prove(
    proof: Proof,
    impl: ModuleType,
    schedule: Schedule,
    dtypes: Mapping[str, torch.dtype] = DTYPES,
    definition: ModuleType | None = reference,
) -> None:
    """Collect every check of `impl` in `proof`; `schedule` has the block and partition of all but a few shapes."""
    for label, dtype in dtypes.items():
        kinds = cases.FINITE_VALUES if definition is None else tuple(cases.KINDS)
        (_tensor_core if definition is None else _reference)(proof, impl, schedule, label, dtype)
        if definition is None:
            _tensor_core_pages(proof, impl, label, dtype)
        (_tensor_core_heads if definition is None else _reference_heads)(proof, impl, label, dtype)
        _heads(proof, impl, label, dtype)
        _pages(proof, impl, schedule, label, dtype, kinds)
        _cuts(proof, impl, schedule, label, dtype)
        _neighbours(proof, impl, schedule, label, dtype)
        _batch(proof, impl, schedule, label, dtype)
        _sequences(proof, impl, schedule, label, dtype)
        _edges(proof, impl, schedule, label, dtype)


def ints(*values: int) -> Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)


class Paged:
    """A cache that holds all rows of a case, in shuffled pages among memory full of NaN."""

    def __init__(self, case: Case, dtype: torch.dtype, page_size: int, impl: ModuleType, schedule: Schedule) -> None:
        self.case, self.impl, self.schedule = case, impl, schedule
        self.q, self.c, self.cu = cases.rows(case, dtype)
        self.cache, self.table, self.slots = cases.pages(self.c, case.lengths, page_size)
        self.lens = ints(*case.lengths)

    def write(self, rows: slice | Tensor = slice(None)) -> None:
        """Store the keys of some rows."""
        self.impl.write_latent(self.c[rows], self.cache, self.slots[rows])

    def attend(self, q: Tensor, table: Tensor, query_start: Tensor, seq_lens: Tensor) -> Tensor:
        """Attention of rows over the pages."""
        given = (q, self.cache, table, query_start, seq_lens, self.case.scale, self.case.latent)
        return self.impl.mla_paged(*given, schedule=self.schedule)


def _packed(impl: ModuleType, case: Case, dtype: torch.dtype, schedule: Schedule) -> Tensor:
    return impl.mla(*cases.rows(case, dtype), case.scale, case.latent, schedule=schedule)


def _shaped(shape: tuple) -> tuple[Case, Schedule]:
    heads, latent, rotated, lengths, block, partition = shape
    case = Case(kind="normal", lengths=lengths, num_heads=heads, latent=latent, rotated=rotated)
    return case, Schedule(kv_block=block, kv_partition=partition)


def _reference(proof: Proof, impl: ModuleType, schedule: Schedule, label: str, dtype: torch.dtype) -> None:
    for kind in cases.KINDS:
        case = Case(kind=kind)
        proof.reached(f"{label} {kind}", cases.reached(case, *cases.rows(case, dtype), schedule))
        expected = _packed(reference, case, dtype, schedule)
        proof.equal(f"{label} reference", expected, _packed(impl, case, dtype, schedule), at=kind)
    for case, order in map(_shaped, SHAPES):
        expected = _packed(reference, case, dtype, order)
        proof.equal(f"{label} shapes", expected, _packed(impl, case, dtype, order), at=f"{case}")


def _tensor_core(proof: Proof, impl: ModuleType, schedule: Schedule, label: str, dtype: torch.dtype) -> None:
    """Every tile, and a bound where scores are finite."""
    given_cases = [(Case(kind=k), schedule) for k in cases.FINITE_VALUES]
    given_cases += [(Case(kind=k, **WIDE), Schedule(kv_block=64, kv_partition=512)) for k in cases.FINITE_VALUES]
    for case, given in given_cases + [*map(_shaped, TENSOR_CORE_SHAPES)]:
        inputs = cases.rows(case, dtype)
        if case.lengths in (Case.lengths, WIDE["lengths"]):
            proof.reached(f"{label} {case.kind}", cases.reached(case, *inputs, given))
        out = impl.mla(*inputs, case.scale, case.latent, schedule=given)
        if case.kind not in ("minus_inf", "nan"):
            proof.within(f"{label} within the bound", out, *_exact(*inputs, case), at=f"{case}")
        for tile in impl.TILES:
            if impl.fits(tile, case.latent, case.width, given):
                found = impl.forward(*inputs, case.scale, case.latent, given, tile)[0]
                proof.equal(f"{label} tiles", out, found, at=f"{case}, {tile}")


def _tensor_core_pages(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype) -> None:
    """Every tile over pages: the last rows of sequences, whoever computes their partitions."""
    for case, schedule in map(_shaped, PAGED_SHAPES):
        paged = Paged(case, dtype, 2 * schedule.kv_block, impl, schedule)
        paged.write()
        whole = _packed(impl, case, dtype, schedule)
        for most in (1, 9):
            counts = [min(most, n) for n in case.lengths]
            rows = torch.cat([torch.arange(hi - n, hi) for hi, n in zip(paged.cu[1:].tolist(), counts, strict=True)])
            starts = torch.tensor([0, *counts]).cumsum(0).int()
            for tile in impl.TILES:
                for split in (0, 2) if impl.fits(tile, case.latent, case.width, schedule) else ():
                    out = torch.full_like(whole[rows], float("nan"))
                    given = (paged.q[rows], paged.cache, paged.table, starts, paged.lens, case.scale, case.latent, out)
                    found = impl.paged(*given, schedule, tile, split)
                    proof.equal(f"{label} tiles over pages", whole[rows], found, at=f"{case}, {most}, {tile}, {split}")


def _exact(q: Tensor, c: Tensor, cu: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """(attention, bound) in float64: what is rounded to bf16 loses a part of the sum of weights times |values|."""
    out, bound = [], []
    for lo, hi in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        keys = c[lo:hi].double()
        s = torch.einsum("tnq,cq->ntc", q[lo:hi].double(), keys) * case.scale
        hidden = torch.ones(hi - lo, hi - lo, dtype=torch.bool).triu(1)
        weights, values = s.masked_fill(hidden, float("-inf")).softmax(-1), keys[:, : case.latent]
        out.append(torch.einsum("ntc,cl->tnl", weights, values))
        bound.append(torch.einsum("ntc,cl->tnl", weights, values.abs()) * ROUNDINGS)
    return torch.cat(out), torch.cat(bound)


def _reference_heads(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype) -> None:
    for name, (x, w) in cases.heads(dtype).items():
        expected, found = reference.head_linear(x, w), impl.head_linear(x, w)
        if name == "no rows":
            proof.empty(f"{label} no rows of heads", expected, found)
        else:
            proof.equal(f"{label} head linear", expected, found, at=name)
        for hazard, count in count_hazards(x).items() if "hazards" in name else ():
            proof.reached(f"{label} head linear, {name}: {hazard}", count)


def _tensor_core_heads(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype) -> None:
    """Every tile gives the same bits, those of a sum within its bound that is rounded once."""
    made = cases.heads(dtype)
    made |= {f"{n} heads": (normal(1, 70, n, k, dtype=dtype), normal(2, n, m, k, dtype=dtype)) for n, m, k in ABSORBED}
    for name, (x, w) in made.items():
        y = impl.head_linear(x, w)
        if name == "no rows":
            proof.empty(f"{label} no rows of heads", x.new_empty(0, *w.shape[:2]), y)
            continue
        for n in range(w.shape[0]) if x.isfinite().all() else ():
            a, b = x[:, n].double(), w[n].double()
            holds = (a.abs() @ b.abs().T) < torch.finfo(torch.float32).max  # no sum can overflow
            exact, bound = product_bound(x[:, n], w[n])
            low, high = (narrow((exact + d).float(), dtype).double() for d in (-bound, bound))
            middle, half = (low + high) / 2, (high - low) / 2
            proof.within(f"{label} heads within the bound", y[:, n][holds], middle[holds], half[holds], at=name)
        for tile in impl.HEAD_TILES:
            proof.equal(f"{label} head tiles", y, impl.forward_heads(x, w, tile), at=f"{name}, {tile}")


def _heads(proof: Proof, impl: ModuleType, label: str, dtype: torch.dtype) -> None:
    """A row keeps its bits among others, a head and a head's columns without the others."""
    x, w = normal(1, 5, 8, 70, dtype=dtype), normal(2, 8, 48, 70, dtype=dtype)
    whole = impl.head_linear(x, w)
    for size in DEGREES:
        shards = [impl.head_linear(a, b) for a, b in zip(x.chunk(size, 1), w.chunk(size), strict=True)]
        proof.equal(f"{label} head linear's shards", whole, torch.cat(shards, 1), at=f"degree {size}")
        columns = torch.cat([impl.head_linear(x, part) for part in w.chunk(size, 1)], 2)
        proof.equal(f"{label} head linear's shards", whole, columns, at=f"columns, degree {size}")
    proof.autograd(f"{label} head linear's autograd", impl.head_linear, x, w)
    proof.equal(f"{label} head linear's strides", whole, impl.head_linear(x.mT.contiguous().mT, w.mT.contiguous().mT))
    pool, anchor = normal(3, max(ROW_COUNTS), 8, 70, dtype=dtype), normal(4, 1, 8, 70, dtype=dtype)
    proof.rows(f"{label} head linear's rows", lambda rows: impl.head_linear(rows, w), (pool,), (anchor,))


def _pages(
    proof: Proof, impl: ModuleType, schedule: Schedule, label: str, dtype: torch.dtype, kinds: tuple[str, ...]
) -> None:
    """Pages equal packed rows, and both implementations write the same cache."""
    for kind in kinds:
        case = Case(kind=kind)
        out = _packed(impl, case, dtype, schedule)
        for blocks in (1, 2, 8):
            page = blocks * schedule.kv_block
            paged, model = (Paged(case, dtype, page, module, schedule) for module in (impl, reference))
            paged.write()
            model.write()
            at = f"{kind}, pages of {page}"
            proof.reached(f"{label} NaN in the cache", paged.cache.isnan().sum())
            proof.equal(f"{label} pages", model.cache, paged.cache, at=f"{at}, cache")
            proof.equal(f"{label} pages", out, paged.attend(paged.q, paged.table, paged.cu, paged.lens), at=at)


def _cuts(proof: Proof, impl: ModuleType, schedule: Schedule, label: str, dtype: torch.dtype) -> None:
    """A prefill cut anywhere, each part written before it attends, and then decoded token by token."""
    length = 140
    case = Case(kind="normal", lengths=(length,))
    whole = _packed(impl, case, dtype, schedule)
    for blocks in (1, 4):
        for cut in CUTS:
            paged = Paged(case, dtype, blocks * schedule.kv_block, impl, schedule)
            parts = []
            for lo, hi in ((0, cut), (cut, length)):
                paged.write(slice(lo, hi))
                parts.append(paged.attend(paged.q[lo:hi], paged.table, ints(0, hi - lo), ints(hi)))
            proof.equal(f"{label} cut prefill", whole, torch.cat(parts), at=f"at {cut}")
    case = Case(kind="normal", lengths=(65, 130, 17))
    whole = _packed(impl, case, dtype, schedule)
    paged = Paged(case, dtype, 2 * schedule.kv_block, impl, schedule)
    for position in range(max(case.lengths)):
        live = [r for r, n in enumerate(case.lengths) if position < n]
        rows = paged.cu[live].long() + position
        paged.write(rows)
        starts, lens = torch.arange(len(live) + 1).int(), ints(*[position + 1] * len(live))
        found = paged.attend(paged.q[rows], paged.table[live], starts, lens)
        proof.equal(f"{label} decode", whole[rows], found, at=f"position {position}")


def _neighbours(proof: Proof, impl: ModuleType, schedule: Schedule, label: str, dtype: torch.dtype) -> None:
    """A decode row over 300 tokens keeps its bits first, last and in the middle, whatever the others ask for."""
    for neighbours in NEIGHBOURS:
        case = Case(kind="normal", lengths=(300, *neighbours), num_heads=1, latent=4, rotated=2)
        paged = Paged(case, dtype, 8 * schedule.kv_block, impl, schedule)
        paged.write()
        row = paged.q[299:300]
        whole = impl.mla(paged.q[:300], paged.c[:300], ints(0, 300), case.scale, case.latent, schedule=schedule)
        for place in sorted({0, len(neighbours) // 2, len(neighbours)}):
            order = [*range(1, place + 1), 0, *range(place + 1, len(case.lengths))]
            parts = [row if r == 0 else paged.q[paged.cu[r] : paged.cu[r + 1]] for r in order]
            starts = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).int()
            found = paged.attend(torch.cat(parts), paged.table[order], starts, paged.lens[order])
            at = f"{len(neighbours)} of up to {max(neighbours)} rows"
            proof.equal(f"{label} neighbours", whole[299:], found[starts[place] : starts[place] + 1], at=at)


def _batch(proof: Proof, impl: ModuleType, schedule: Schedule, label: str, dtype: torch.dtype) -> None:
    """A decode row keeps its bits among up to 1024 decode rows over contexts of other lengths."""
    lengths = (47, *(1 + 7 * r % 40 for r in range(max(ROW_COUNTS))))
    case = Case(kind="normal", lengths=lengths, num_heads=2, latent=6, rotated=2)
    paged = Paged(case, dtype, schedule.kv_block, impl, schedule)
    paged.write()
    last = paged.cu[1:].long() - 1
    whole = _packed(impl, case, dtype, schedule)[last]
    for count in ROW_COUNTS:
        for place in sorted({0, count // 2, count - 1}):
            order = torch.tensor([*range(1, place + 1), 0, *range(place + 1, count)])
            starts = torch.arange(count + 1).int()
            found = paged.attend(paged.q[last[order]], paged.table[order], starts, paged.lens[order])
            proof.equal(f"{label} rows", whole[order], found, at=f"{count} rows, place {place}")


def _sequences(proof: Proof, impl: ModuleType, schedule: Schedule, label: str, dtype: torch.dtype) -> None:
    """Packed sequences do not see each other, nor heads each other; a graph and other threads change nothing."""
    case = Case(kind="normal", num_heads=8)
    q, c, cu = cases.rows(case, dtype)

    def attend(q: Tensor, c: Tensor, cu: Tensor = cu) -> Tensor:
        return impl.mla(q, c, cu, case.scale, case.latent, schedule=schedule)

    whole = attend(q, c)
    proof.reached(f"{label} empty sequences", case.lengths.count(0))
    for lo, hi in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        for stop in sorted({hi, (lo + hi) // 2} - {lo}):
            found = attend(q[lo:stop], c[lo:stop], ints(0, stop - lo))
            proof.equal(f"{label} sequences alone", whole[lo:stop], found, at=f"{lo} to {stop}")
    for size in DEGREES:
        heads = torch.cat([attend(part, c) for part in q.chunk(size, 1)], 1)
        proof.equal(f"{label} head shards", whole, heads, at=f"degree {size}")
    proof.autograd(f"{label} autograd", attend, q, c)
    short, start = (q[:48].clone(), c[:48].clone()), ints(0, 1, 48)
    proof.repeats(f"{label} repeats", lambda: attend(*short, start))


def _edges(proof: Proof, impl: ModuleType, schedule: Schedule, label: str, dtype: torch.dtype) -> None:
    """No rows, skipped slots, rows of padding, and a request without queries leave alone what is not theirs."""
    none = torch.zeros(0, 3, 8, dtype=dtype), torch.zeros(0, 8, dtype=dtype)
    for bounds in (ints(0), ints(0, 0)):
        found = impl.mla(*none, bounds, 1.0, 6, schedule=schedule)
        proof.empty(f"{label} no rows", none[0][..., :6], found)
    cache = torch.full(impl.mla_cache_shape(2, schedule.kv_block, 8), float("nan"), dtype=dtype)
    before, ones = cache.clone(), torch.ones(3, 3, 8, dtype=dtype)
    impl.write_latent(ones[:, 0], cache, torch.tensor([-1, -1]))
    proof.equal(f"{label} edges", before, cache, at="skipped slots")
    impl.write_latent(ones[:, 0], cache, torch.tensor([0]))
    out, table = torch.full((3, 3, 6), 7.0, dtype=dtype), torch.zeros(2, 1, dtype=torch.int32)
    impl.mla_paged(ones, cache, table, ints(0, 1, 1), ints(1, 0), 1.0, 6, out, schedule=schedule)
    proof.equal(f"{label} edges", torch.cat([ones[:1, :, :6], torch.full((2, 3, 6), 7.0, dtype=dtype)]), out, at="rows")
