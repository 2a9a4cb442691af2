"""Proof of attention: a row's bits are the reference's, whatever the batch, the pages and the cut of a prefill.

Where the tensor core hides the order (`definition` None), every tile of a prefill must give the same bits, which keep a
bound; all other checks are the same.

Shapes: T tokens, N query heads, K key-value heads, D head dimension, R requests, P pages of a request.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from skyrl_isoexec.kernels.attention import cases, reference, spec
from skyrl_isoexec.kernels.attention.cases import Case
from skyrl_isoexec.kernels.numeric.proof import DEGREES, DTYPES, ROW_COUNTS, Proof
from skyrl_isoexec.schedule import Schedule

SHAPES = (
    # heads, key-value heads, head dimension, lengths, kv_block, kv_partition
    (1, 1, 1, (1,), 16, 512),
    (9, 3, 64, (70,), 16, 32),
    (6, 6, 33, (2, 65, 1), 32, 64),
    (8, 1, 7, (129, 3), 48, 96),
    (5, 5, 80, (17, 16, 15), 16, 16),
    (4, 2, 12, (300,), 16, 128),
    (2, 1, 256, (40,), 256, 512),
)
TENSOR_CORE_SHAPES = (
    (9, 3, 64, (70,), 16, 32),
    (5, 5, 80, (17, 16, 15), 16, 16),
    (8, 2, 128, (700, 3), 64, 512),
    (8, 1, 256, (600,), 64, 512),
)
LONG_SHAPES = ((8, 2, 64), (4, 2, 128), (8, 1, 256))
"""(heads, key-value heads, head dimension) of the tile that long prefills have."""
LONG = {"kv_block": 64, "kv_partition": 128}
"""What the schedule of its cases has instead."""
LONG_CUTS = (63, 64, 130, 200, 256, 300)
"""Where a prefill of 420 tokens is cut, around those blocks and partitions."""
TILES = ((16, 4, 3), (64, 4, 3), (64, 8, 2), (128, 8, 2))
"""(rows, warps, stages) of a prefill's tiles."""
ROUNDINGS = 4 * 2.0**-9
"""What weights and the result may lose to bf16, each half a unit of 2**-8; the third is for fp32 sums."""
CUTS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 139)
"""Where a prefill of 140 tokens is cut: around blocks, pages and partitions."""
NEIGHBOURS = ((1,), (9,), (10,), (129,), (8192,), (1,) * 40, (129, 1, 9, 300, 1))
"""Query lengths beside a decode row."""


def prove(
    proof: Proof,
    impl: ModuleType,
    schedule: Schedule,
    dtypes: Mapping[str, torch.dtype] = DTYPES,
    definition: ModuleType | None = reference,
) -> None:
    """Collect every check of `impl` in `proof`; `schedule` has the block and partition of all but a few shapes."""
    for label, dtype in dtypes.items():
        (_tensor_core if definition is None else _reference)(proof, impl, schedule, label, dtype)
        if definition is None:
            _long_prefills(proof, impl, schedule, label, dtype)
        _pages(proof, impl, schedule, label, dtype, keys_like_values=definition is None)
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
        self.q, self.k, self.v, self.cu = cases.rows(case, dtype)
        self.cache, self.table, self.slots = cases.pages(self.k, case.lengths, page_size, schedule)
        self.lens, self.scale, self.impl, self.schedule = ints(*case.lengths), case.scale, impl, schedule

    def write(self, rows: slice | Tensor = slice(None)) -> None:
        """Store keys and values of some rows."""
        self.impl.write_kv(self.k[rows], self.v[rows], self.cache, self.slots[rows])

    def attend(self, q: Tensor, table: Tensor, query_start: Tensor, seq_lens: Tensor) -> Tensor:
        """Attention of rows over the pages."""
        given = (q, self.cache, table, query_start, seq_lens, self.scale)
        return self.impl.attention_paged(*given, schedule=self.schedule)


def _reference(proof: Proof, impl: ModuleType, schedule: Schedule, label: str, dtype: torch.dtype) -> None:
    for kind in cases.KINDS:
        case = Case(kind=kind)
        inputs = cases.rows(case, dtype)
        proof.reached(f"{label} {kind}", cases.reached(case, *inputs, schedule))
        expected = reference.attention(*inputs, case.scale, schedule=schedule)
        proof.equal(f"{label} reference", expected, impl.attention(*inputs, case.scale, schedule=schedule), at=kind)
    for heads, kv_heads, head_dim, lengths, block, partition in SHAPES:
        case = Case(kind="normal", lengths=lengths, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
        order, inputs = Schedule(kv_block=block, kv_partition=partition), cases.rows(case, dtype)
        expected = reference.attention(*inputs, case.scale, schedule=order)
        proof.equal(f"{label} shapes", expected, impl.attention(*inputs, case.scale, schedule=order), at=f"{case}")


def _tensor_core(proof: Proof, impl: ModuleType, schedule: Schedule, label: str, dtype: torch.dtype) -> None:
    """Every tile, and a bound where scores are finite."""
    order = [(Case(kind=kind), schedule) for kind in cases.KINDS]
    order += [
        (Case(kind="normal", lengths=n, num_heads=h, num_kv_heads=k, head_dim=d), Schedule(kv_block=b, kv_partition=p))
        for h, k, d, n, b, p in TENSOR_CORE_SHAPES
    ]
    for heads, kv_heads, head_dim in LONG_SHAPES:
        sizes = {"lengths": (1, 200, 0, 333), "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
        order += [(Case(kind=kind, **sizes), replace(schedule, **LONG)) for kind in cases.KINDS]
    for case, given in order:
        inputs = cases.rows(case, dtype)
        if case.head_dim == Case.head_dim or case.kind != "normal":
            proof.reached(f"{label} {case.kind}", cases.reached(case, *inputs, given))
        out = impl.attention(*inputs, case.scale, schedule=given)
        if case.kind not in ("minus_inf", "nan"):
            proof.within(f"{label} within the bound", out, *_exact(*inputs, case.scale), at=f"{case}")
        for tile in TILES:
            found = impl.forward(*inputs, case.scale, given, tile)[0]
            proof.equal(f"{label} tiles", out, found, at=f"{case}, {tile}")


def _long_prefills(proof: Proof, impl: ModuleType, schedule: Schedule, label: str, dtype: torch.dtype) -> None:
    """The tile of long prefills over pages among memory full of NaN: cut, and beside a row of a decode."""
    schedule = replace(schedule, **LONG)
    for heads, kv_heads, head_dim in LONG_SHAPES:
        case = Case(kind="normal", lengths=(420, 77), num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
        whole = impl.attention(*cases.rows(case, dtype), case.scale, schedule=schedule)
        for page in (64, 192):
            for cut in LONG_CUTS:
                paged = Paged(case, dtype, page, impl, schedule)
                paged.write()
                rows = [paged.q[0:cut], paged.q[cut:420], paged.q[496:]]
                group = heads // kv_heads
                parts = [paged.attend(rows[0], paged.table[:1], ints(0, cut), ints(cut))]
                lens = ints(420, 77)
                parts.append(paged.attend(torch.cat(rows[1:]), paged.table, ints(0, 420 - cut, 421 - cut), lens))
                tiles = [impl.is_grouped(n * group, head_dim, group, page, schedule) for n in (cut, (422 - cut) // 2)]
                proof.reached(f"{label} long tiles over pages", sum(tiles))
                expected = torch.cat((whole[:420], whole[496:]))
                proof.equal(f"{label} long prefills", expected, torch.cat(parts), at=f"{case}, page {page}, cut {cut}")


def _exact(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(attention, bound) in float64: what is rounded to bf16 loses a part of the sum of weights times |values|."""
    group, out, bound = q.shape[1] // k.shape[1], [], []
    for lo, hi in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        keys, values = (x[lo:hi].double().repeat_interleave(group, 1) for x in (k, v))
        s = torch.einsum("tnd,cnd->ntc", q[lo:hi].double(), keys) * scale
        hidden = torch.ones(hi - lo, hi - lo, dtype=torch.bool).triu(1)
        weights = s.masked_fill(hidden, float("-inf")).softmax(-1)
        out.append(torch.einsum("ntc,cnd->tnd", weights, values))
        bound.append(torch.einsum("ntc,cnd->tnd", weights, values.abs()) * ROUNDINGS)
    return torch.cat(out), torch.cat(bound)


def _pages(
    proof: Proof, impl: ModuleType, schedule: Schedule, label: str, dtype: torch.dtype, keys_like_values: bool
) -> None:
    """Pages equal packed rows, and both implementations write the same cache."""
    for kind in cases.KINDS:
        case = Case(kind=kind)
        out = impl.attention(*cases.rows(case, dtype), case.scale, schedule=schedule)
        for blocks in (1, 2, 8):
            page = blocks * schedule.kv_block
            paged, model = (Paged(case, dtype, page, module, schedule) for module in (impl, reference))
            paged.write()
            model.write()
            at = f"{kind}, pages of {page}"
            proof.reached(f"{label} NaN in the cache", paged.cache.isnan().sum())
            expected = model.cache
            if keys_like_values:  # each head's keys as [page_size, D] in the place of [D, page_size]
                keys, _values = spec.planes(expected)
                keys.copy_(keys.transpose(2, 3).clone(memory_format=torch.contiguous_format).view(keys.shape))
            proof.equal(f"{label} pages", expected, paged.cache, at=f"{at}, cache")
            proof.equal(f"{label} pages", out, paged.attend(paged.q, paged.table, paged.cu, paged.lens), at=at)


def _cuts(proof: Proof, impl: ModuleType, schedule: Schedule, label: str, dtype: torch.dtype) -> None:
    """A prefill cut anywhere, each part written before it attends, and then decoded token by token."""
    length = 140
    case = Case(kind="normal", lengths=(length,))
    whole = impl.attention(*cases.rows(case, dtype), case.scale, schedule=schedule)
    for blocks in (1, 4):
        for cut in CUTS:
            paged = Paged(case, dtype, blocks * schedule.kv_block, impl, schedule)
            parts = []
            for lo, hi in ((0, cut), (cut, length)):
                paged.write(slice(lo, hi))
                parts.append(paged.attend(paged.q[lo:hi], paged.table, ints(0, hi - lo), ints(hi)))
            proof.equal(f"{label} cut prefill", whole, torch.cat(parts), at=f"at {cut}")
    case = Case(kind="normal", lengths=(65, 130, 17))
    whole = impl.attention(*cases.rows(case, dtype), case.scale, schedule=schedule)
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
        case = Case(kind="normal", lengths=(300, *neighbours), num_heads=2, num_kv_heads=1, head_dim=8)
        paged = Paged(case, dtype, 8 * schedule.kv_block, impl, schedule)
        paged.write()
        row, whole = paged.q[299:300], impl.attention(*cases.rows(case, dtype), case.scale, schedule=schedule)
        for place in sorted({0, len(neighbours) // 2, len(neighbours)}):
            order = [*range(1, place + 1), 0, *range(place + 1, len(case.lengths))]
            parts = [row if r == 0 else paged.q[paged.cu[r] : paged.cu[r + 1]] for r in order]
            starts = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).int()
            found = paged.attend(torch.cat(parts), paged.table[order], starts, paged.lens[order])
            at = f"{len(neighbours)} of up to {max(neighbours)} rows"
            proof.equal(f"{label} neighbours", whole[299:300], found[starts[place] : starts[place] + 1], at=at)


def _batch(proof: Proof, impl: ModuleType, schedule: Schedule, label: str, dtype: torch.dtype) -> None:
    """A decode row keeps its bits among up to 1024 decode rows over contexts of other lengths."""
    lengths = (47, *(1 + 7 * r % 40 for r in range(max(ROW_COUNTS))))
    case = Case(kind="normal", lengths=lengths, num_heads=2, num_kv_heads=1, head_dim=8)
    paged = Paged(case, dtype, schedule.kv_block, impl, schedule)
    paged.write()
    last = paged.cu[1:].long() - 1
    whole = impl.attention(*cases.rows(case, dtype), case.scale, schedule=schedule)[last]
    for count in ROW_COUNTS:
        for place in sorted({0, count // 2, count - 1}):
            order = torch.tensor([*range(1, place + 1), 0, *range(place + 1, count)])
            starts = torch.arange(count + 1).int()
            found = paged.attend(paged.q[last[order]], paged.table[order], starts, paged.lens[order])
            proof.equal(f"{label} rows", whole[order], found, at=f"{count} rows, place {place}")


def _sequences(proof: Proof, impl: ModuleType, schedule: Schedule, label: str, dtype: torch.dtype) -> None:
    """Packed sequences do not see each other, nor heads each other; a graph and other threads change nothing."""
    case = Case(kind="normal", num_heads=16, num_kv_heads=8)
    q, k, v, cu = cases.rows(case, dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor = cu) -> Tensor:
        return impl.attention(q, k, v, cu, case.scale, schedule=schedule)

    whole = attend(q, k, v)
    proof.reached(f"{label} empty sequences", case.lengths.count(0))
    for lo, hi in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        for stop in sorted({hi, (lo + hi) // 2} - {lo}):
            rows = slice(lo, stop)
            found = attend(q[rows], k[rows], v[rows], ints(0, stop - lo))
            proof.equal(f"{label} sequences alone", whole[rows], found, at=f"{lo} to {stop}")
    for size in DEGREES:
        heads = zip(q.chunk(size, 1), k.chunk(size, 1), v.chunk(size, 1), strict=True)
        proof.equal(f"{label} head shards", whole, torch.cat([attend(*x) for x in heads], 1), at=f"degree {size}")
    proof.autograd(f"{label} autograd", attend, q, k, v)
    short, start = (x[:48].clone() for x in (q, k, v)), ints(0, 1, 48)
    short = tuple(short)
    proof.repeats(f"{label} repeats", lambda: attend(*short, start))


def _edges(proof: Proof, impl: ModuleType, schedule: Schedule, label: str, dtype: torch.dtype) -> None:
    """No rows, skipped slots, rows of padding, and a request without queries leave alone what is not theirs."""
    none = torch.zeros(0, 4, 8, dtype=dtype), torch.zeros(0, 2, 8, dtype=dtype)
    for bounds in (ints(0), ints(0, 0)):
        found = impl.attention(none[0], none[1], none[1], bounds, 1.0, schedule=schedule)
        proof.empty(f"{label} no rows", none[0], found)
    size = schedule.kv_block
    cache = torch.full(impl.kv_cache_shape(2, size, 2, 8, schedule=schedule), float("nan"), dtype=dtype)
    before, ones = cache.clone(), torch.ones(3, 4, 8, dtype=dtype)
    impl.write_kv(ones[:, :2], ones[:, :2], cache, torch.tensor([-1, -1]))
    proof.equal(f"{label} edges", before, cache, at="skipped slots")
    impl.write_kv(ones[:1, :2], ones[:1, :2], cache, torch.tensor([0]))
    out, table = torch.full((3, 4, 8), 7.0, dtype=dtype), torch.zeros(2, 1, dtype=torch.int32)
    impl.attention_paged(ones, cache, table, ints(0, 1, 1), ints(1, 0), 1.0, out, schedule=schedule)
    proof.equal(f"{label} edges", torch.cat([ones[:1], torch.full_like(ones[1:], 7.0)]), out, at="padding")
