"""How close attention is, and what its order means; that every case has the bits of the definition is its gate."""

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


@pytest.mark.parametrize("module", [cpu, reference])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_nan_has_one_payload_and_stands_where_it_must(kind: str, module) -> None:
    """A gate leaves the payload free; here a NaN is the quiet one, and only the hazards that make one have it."""
    out = packed(Case(kind=kind, lengths=(1, 47, 33)), torch.float32, module=module)
    assert bool(out.isnan().any()) == (kind in ("nan", "minus_inf")) and not out.isnan().all()
    assert (out[out.isnan()].view(torch.int32) == 0x7FC00000).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [16, 32])
def test_the_definition_reads_pages(page_size: int, dtype: torch.dtype) -> None:
    case = Case(kind="normal", lengths=(1, 47, 33))
    q, k, v, cu = cases.rows(case, dtype)
    cache, table, slots = cases.pages(k, case.lengths, page_size, SCHEDULE)
    reference.write_kv(k, v, cache, slots)
    found = reference.attention_paged(q, cache, table, cu, ints(*case.lengths), case.scale, schedule=SCHEDULE)
    assert_equal(found, packed(case, dtype, module=reference))


def test_schedule_changes_bits() -> None:
    """Block and partition lengths are part of the order: each of them shows in the bits."""
    case = Case(kind="normal", lengths=(130,))
    out = packed(case, torch.float32)
    for other in (Schedule(kv_block=32, kv_partition=64), Schedule(kv_block=16, kv_partition=128)):
        assert count_mismatches(out, packed(case, torch.float32, other))[0] > 0


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
