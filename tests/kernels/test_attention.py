"""Attention: a row's bits are the reference's, whatever the batch, the pages and the cut of a prefill."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from skyrl_isoexec.kernels.attention import cases, cpu, reference
from skyrl_isoexec.kernels.attention.cases import Case
from skyrl_isoexec.schedule import Schedule
from skyrl_isoexec.schedule.bits import count_mismatches

SCHEDULE = Schedule(kv_block=16, kv_partition=64)
DTYPES = [torch.float32, torch.bfloat16]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    mismatched, compared = count_mismatches(a, b)
    assert mismatched == 0, f"{mismatched} of {compared} elements differ"


def packed(case: Case, dtype: torch.dtype, schedule: Schedule = SCHEDULE, module=cpu) -> torch.Tensor:
    return module.attention(*cases.rows(case, dtype), case.scale, schedule=schedule)


class Paged:
    """A cache that holds all rows of a case, in shuffled pages among memory full of NaN."""

    def __init__(self, case: Case, dtype: torch.dtype, page_size: int, module=cpu) -> None:
        self.q, self.k, self.v, self.cu = cases.rows(case, dtype)
        self.cache, self.table, self.slots = cases.pages(self.k, case.lengths, page_size, SCHEDULE)
        self.lens, self.case, self.module = ints(*case.lengths), case, module

    def write(self, rows: slice = slice(None)) -> None:
        self.module.write_kv(self.k[rows], self.v[rows], self.cache, self.slots[rows])

    def attend(self, q, table, query_start, seq_lens, out=None) -> torch.Tensor:
        scale = self.case.scale
        return self.module.attention_paged(q, self.cache, table, query_start, seq_lens, scale, out, schedule=SCHEDULE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", cases.KINDS)
def test_bits_of_the_reference_on_hazards(kind: str, dtype: torch.dtype) -> None:
    """Compiled loops give the reference's bits, and each hazard occurred."""
    case = Case(kind=kind)
    inputs = cases.rows(case, dtype)
    assert cases.reached(case, *inputs, SCHEDULE) > 20
    out = packed(case, dtype)
    assert_equal(out, packed(case, dtype, module=reference))
    assert bool(out.isnan().any()) == (kind in ("nan", "minus_inf"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "lengths", "kv_block", "kv_partition"),
    [
        (1, 1, 1, (1,), 16, 512),
        (9, 3, 64, (70,), 16, 32),
        (6, 6, 33, (2, 65, 1), 32, 64),
        (8, 1, 7, (129, 3), 48, 96),
        (5, 5, 80, (17, 16, 15), 16, 16),
        (4, 2, 12, (300,), 16, 128),
        (2, 1, 256, (40,), 256, 512),
    ],
)
def test_bits_of_the_reference_on_shapes(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    lengths: tuple[int, ...],
    kv_block: int,
    kv_partition: int,
    dtype: torch.dtype,
) -> None:
    """Any head dimension, any ratio of query to key-value heads, any schedule."""
    case = Case(kind="normal", lengths=lengths, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    schedule = Schedule(kv_block=kv_block, kv_partition=kv_partition)
    assert_equal(packed(case, dtype, schedule), packed(case, dtype, schedule, reference))


def test_schedule_changes_bits() -> None:
    """Block and partition lengths are part of the order: each of them shows in the bits."""
    case = Case(kind="normal", lengths=(130,))
    out = packed(case, torch.float32)
    for other in (Schedule(kv_block=32, kv_partition=64), Schedule(kv_block=16, kv_partition=128)):
        assert count_mismatches(out, packed(case, torch.float32, other))[0] > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [16, 32, 128])
@pytest.mark.parametrize("kind", ["normal", "tails"])
def test_pages_equal_packed_rows(kind: str, page_size: int, dtype: torch.dtype) -> None:
    """Shuffled pages among memory full of NaN give the bits of contiguous rows; both implementations write alike."""
    case = Case(kind=kind)
    paged, model = Paged(case, dtype, page_size), Paged(case, dtype, page_size, reference)
    paged.write()
    model.write()
    assert paged.cache.isnan().any()
    assert_equal(paged.cache, model.cache)
    out = packed(case, dtype)
    assert_equal(paged.attend(paged.q, paged.table, paged.cu, paged.lens), out)
    assert_equal(model.attend(paged.q, paged.table, paged.cu, paged.lens), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [16, 64])
def test_prefill_cut_anywhere(page_size: int, dtype: torch.dtype) -> None:
    """A prefill cut at any position gives the one-shot bits, the rest being written after the first part attended."""
    length = 140
    case = Case(kind="normal", lengths=(length,))
    whole = packed(case, dtype)
    for cut in range(1, 131):
        paged = Paged(case, dtype, page_size)
        parts = []
        for lo, hi in ((0, cut), (cut, length)):
            paged.write(slice(lo, hi))
            parts.append(paged.attend(paged.q[lo:hi], paged.table, ints(0, hi - lo), ints(hi)))
        assert_equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_equals_packed_rows(dtype: torch.dtype) -> None:
    """Token by token, all requests in one batch: every row has the bits of the packed batch."""
    case = Case(kind="normal", lengths=(65, 130, 17))
    whole, paged = packed(case, dtype), Paged(case, dtype, 32)
    for position in range(max(case.lengths)):
        live = [r for r, n in enumerate(case.lengths) if position < n]
        rows = paged.cu[live].long() + position
        paged.module.write_kv(paged.k[rows], paged.v[rows], paged.cache, paged.slots[rows])
        starts, lens = torch.arange(len(live) + 1).int(), ints(*[position + 1] * len(live))
        assert_equal(paged.attend(paged.q[rows], paged.table[live], starts, lens), whole[rows])


@pytest.mark.parametrize("neighbours", [(1,), (9,), (10,), (129,), (8192,), (1,) * 40, (129, 1, 9, 300, 1)])
def test_decode_row_beside_neighbours(neighbours: tuple[int, ...]) -> None:
    """A decode row over 300 tokens keeps its bits first, last and in the middle, whatever the others ask for."""
    lengths = (300, *neighbours)
    paged = Paged(Case(kind="normal", lengths=lengths, num_heads=2, num_kv_heads=1, head_dim=8), torch.float32, 128)
    paged.write()
    row, table = paged.q[299:300], paged.table
    alone = paged.attend(row, table[:1], ints(0, 1), ints(300))
    for place in {0, len(neighbours) // 2, len(neighbours)}:
        order = [*range(1, place + 1), 0, *range(place + 1, len(lengths))]
        parts = [row if r == 0 else paged.q[paged.cu[r] : paged.cu[r + 1]] for r in order]
        starts = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).int()
        out = paged.attend(torch.cat(parts), table[order], starts, paged.lens[order])
        assert_equal(out[starts[place] : starts[place] + 1], alone)


def test_sequences_do_not_see_each_other() -> None:
    """Each packed sequence equals itself alone, and a slice of it its prefix; also in four threads at once."""
    case = Case(kind="normal", lengths=(1, 47, 130, 0, 33))
    q, k, v, cu = cases.rows(case, torch.float32)
    whole = packed(case, torch.float32)
    with ThreadPoolExecutor(4) as threads:
        for other in threads.map(lambda _: packed(case, torch.float32), range(32)):
            assert_equal(other, whole)
    for lo, hi in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        for stop in {hi, (lo + hi) // 2} - {lo}:
            rows = slice(lo, stop)
            alone = cpu.attention(q[rows], k[rows], v[rows], ints(0, stop - lo), case.scale, schedule=SCHEDULE)
            assert_equal(alone, whole[rows])


SWAPS = {
    "two head dimensions": ("dim", [0, 1, 2, 3, 5, 4, *range(6, 16)]),
    "two positions of a block": ("position", [0, 1, 2, 4, 3, *range(5, 200)]),
    "two blocks of a partition": ("position", [*range(16), *range(32, 48), *range(16, 32), *range(48, 200)]),
    "two partitions": ("position", [*range(64), *range(128, 192), *range(64, 128), *range(192, 200)]),
}


@pytest.mark.parametrize("swap", SWAPS)
def test_one_swap_in_the_order_shows(swap: str) -> None:
    """Adding the same numbers with one pair swapped changes bits, so equal bits mean an equal order."""
    axis, order = SWAPS[swap]
    case = Case(kind="normal", lengths=(200,), num_heads=16, num_kv_heads=2)
    q, k, v, _ = cases.rows(case, torch.float32)
    row = q[-1:]
    out, _ = reference.attend(row, k, v, case.scale, SCHEDULE)
    if axis == "dim":
        swapped, _ = reference.attend(row[..., order], k[..., order], v, case.scale, SCHEDULE)
    else:
        swapped, _ = reference.attend(row, k[order], v[order], case.scale, SCHEDULE)
    assert count_mismatches(out, swapped)[0] > 0
    torch.testing.assert_close(out, swapped, rtol=1e-4, atol=1e-5)


def exact(q, k, v, cu, scale) -> torch.Tensor:
    """Attention in float64."""
    group, parts = q.shape[1] // k.shape[1], []
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    for lo, hi in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        s = torch.einsum("tnd,cnd->ntc", q[lo:hi].double(), k[lo:hi]) * scale
        s = s.masked_fill(~torch.ones(hi - lo, hi - lo, dtype=torch.bool).tril(), float("-inf"))
        parts.append(torch.einsum("ntc,cnd->tnd", s.softmax(-1), v[lo:hi]))
    return torch.cat(parts)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("kind", ["normal", "tails", "ties"])
def test_bound_against_float64(kind: str, dtype: torch.dtype, bound: float) -> None:
    """Within 3e-6 (fp32) or half a bf16 step of the largest value, of float64 on the same inputs."""
    case = Case(kind=kind, lengths=(300, 5), head_dim=64)
    inputs = cases.rows(case, dtype)
    error = (packed(case, dtype).double() - exact(*inputs, case.scale)).abs().max()
    assert error < bound * inputs[2].double().abs().max()


@pytest.mark.parametrize("module", [cpu, reference])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-5), (torch.bfloat16, 3e-2)])
def test_gradients(dtype: torch.dtype, bound: float, module) -> None:
    """Within a bound of float64 autograd, equal when repeated, and equal for a sequence alone."""
    long = 300 if module is cpu else 30  # longer than one product of the backward
    case = Case(kind="normal", lengths=(1, 40, 0, long), num_heads=6, num_kv_heads=2, head_dim=20)
    q, k, v, cu = cases.rows(case, dtype)
    weight = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    def gradients(rows: slice, cu: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x[rows].detach().clone().requires_grad_() for x in (q, k, v)]
        module.attention(*leaves, cu, case.scale, schedule=SCHEDULE).backward(weight[rows])
        return [x.grad for x in leaves]

    ours = gradients(slice(None), cu)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact(*leaves, cu, case.scale).backward(weight.double())
    for a, b in zip(ours, leaves, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b.grad).abs().max() < bound * b.grad.abs().max()
    for other in (gradients(slice(None), cu), [torch.cat(x) for x in zip(
        gradients(slice(0, 41), ints(0, 1, 41)), gradients(slice(41, 41 + long), ints(0, long)), strict=True
    )]):  # fmt: skip
        for a, b in zip(ours, other, strict=True):
            assert_equal(a, b)


def test_gradient_mode_changes_no_bit() -> None:
    """The forward that saves for a backward has the bits of the one that does not."""
    case = Case(kind="normal")
    q, k, v, cu = cases.rows(case, torch.float32)
    assert_equal(cpu.attention(q.requires_grad_(), k, v, cu, case.scale, schedule=SCHEDULE).detach(), packed(
        case, torch.float32
    ))  # fmt: skip
