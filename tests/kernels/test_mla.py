"""How close latent attention is, and what its order means; that every case has the definition's bits is its gate."""

import pytest
import torch
from torch import Tensor

from skyrl_isoexec.kernels.attention import reference as attention
from skyrl_isoexec.kernels.linear import cpu as linear
from skyrl_isoexec.kernels.mla import cases, cpu, reference
from skyrl_isoexec.kernels.mla.cases import Case
from skyrl_isoexec.kernels.numeric.inputs import normal
from skyrl_isoexec.schedule import Schedule
from skyrl_isoexec.schedule.bits import count_mismatches

SCHEDULE = Schedule(kv_block=16, kv_partition=64)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(case: Case, dtype: torch.dtype, schedule: Schedule = SCHEDULE, module=cpu) -> Tensor:
    return module.mla(*cases.rows(case, dtype), case.scale, case.latent, schedule=schedule)


@pytest.mark.parametrize("module", [cpu, reference])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_nan_has_one_payload_and_stands_where_it_must(kind: str, module) -> None:
    """A gate leaves the payload free; here a NaN is the quiet one, and only the hazards that make one have it."""
    out = packed(Case(kind=kind, lengths=(1, 47, 33)), torch.float32, module=module)
    assert bool(out.isnan().any()) == (kind in ("nan", "nan_value", "minus_inf")) and not out.isnan().all()
    assert (out[out.isnan()].view(torch.int32) == 0x7FC00000).all()
    if kind in ("nan", "nan_value"):  # in the two longer sequences, from position 20 on
        assert not out[:21].isnan().any() and out[21:48].isnan().all()


@pytest.mark.parametrize("page_size", [16, 32])
def test_the_definition_reads_pages(page_size: int, dtype, same_bits) -> None:
    case = Case(kind="normal", lengths=(1, 47, 33))
    q, c, cu = cases.rows(case, dtype)
    cache, table, slots = cases.pages(c, case.lengths, page_size)
    reference.write_latent(c, cache, slots)
    given = (q, cache, table, cu, ints(*case.lengths), case.scale, case.latent)
    same_bits(reference.mla_paged(*given, schedule=SCHEDULE), packed(case, dtype, module=reference))


@pytest.mark.parametrize("kind", cases.KINDS)
def test_it_is_attention_with_one_key_for_all_heads(kind: str, same_bits) -> None:
    """The order is that of the other operator, bit for bit, with the key as value and its first entries as result."""
    case, dtype = Case(kind=kind, latent=7, rotated=3), torch.bfloat16 if kind == "normal" else torch.float32
    q, c, cu = cases.rows(case, dtype)
    assert cases.reached(case, q, c, cu, SCHEDULE)
    whole = attention.attention(q, c[:, None], c[:, None], cu, case.scale, schedule=SCHEDULE)
    same_bits(packed(case, dtype), whole[..., : case.latent].contiguous())


@pytest.mark.parametrize("name", sorted(set(cases.heads(torch.float32)) - {"no rows"}))
def test_a_head_is_a_linear(name: str, dtype, same_bits) -> None:
    x, w = cases.heads(dtype)[name]
    y = cpu.head_linear(x, w)
    for n in range(w.shape[0]):
        same_bits(y[:, n], linear.linear(x[:, n], w[n]))


def test_schedule_changes_bits() -> None:
    """Block and partition lengths are part of the order: each of them shows in the bits."""
    case = Case(kind="normal", lengths=(130,))
    out = packed(case, torch.float32)
    for other in (Schedule(kv_block=32, kv_partition=64), Schedule(kv_block=16, kv_partition=128)):
        assert count_mismatches(out, packed(case, torch.float32, other))[0] > 0


SWAPS = {
    "two entries of a key": ("entry", [*range(16), 16, 18, 17, 19]),
    "two positions of a block": ("position", [0, 1, 2, 4, 3, *range(5, 200)]),
    "two blocks of a partition": ("position", [*range(16), *range(32, 48), *range(16, 32), *range(48, 200)]),
    "two partitions": ("position", [*range(64), *range(128, 192), *range(64, 128), *range(192, 200)]),
}


@pytest.mark.parametrize("swap", SWAPS)
def test_one_swap_in_the_order_shows(swap: str) -> None:
    """Adding the same numbers with one pair swapped changes bits, so equal bits mean an equal order."""
    axis, order = SWAPS[swap]
    case = Case(kind="normal", lengths=(200,), num_heads=16)
    q, c, _ = cases.rows(case, torch.float32)
    row = q[-1:]
    out, _ = reference.attend(row, c, case.scale, case.latent, SCHEDULE)
    changed = (row[..., order], c[:, order]) if axis == "entry" else (row, c[order])
    swapped, _ = reference.attend(*changed, case.scale, case.latent, SCHEDULE)
    assert count_mismatches(out, swapped)[0] > 0
    torch.testing.assert_close(out, swapped, rtol=1e-4, atol=1e-5)


def attended(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, scale: float) -> Tensor:
    """Causal attention in the inputs' dtype: q [T, N, D], k [T, N, D], v [T, N, V] of packed sequences."""
    parts = []
    for lo, hi in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        s = torch.einsum("tnd,cnd->ntc", q[lo:hi], k[lo:hi]) * scale
        s = s.masked_fill(~torch.ones(hi - lo, hi - lo, dtype=torch.bool).tril(), float("-inf"))
        parts.append(torch.einsum("ntc,cnv->tnv", s.softmax(-1), v[lo:hi]))
    return torch.cat(parts)


def exact(q: Tensor, c: Tensor, cu: Tensor, case: Case) -> Tensor:
    """Latent attention in float64."""
    keys = c.double()[:, None].expand(-1, case.num_heads, -1)
    return attended(q.double(), keys, keys[..., : case.latent], cu, case.scale)


@pytest.mark.parametrize("kind", ["normal", "tails", "ties"])
def test_bound_against_float64(kind: str, dtype) -> None:
    """Within 3e-6 (fp32) or half a bf16 step of the largest value, of float64 on the same inputs."""
    case = Case(kind=kind, lengths=(300, 5), latent=64, rotated=16)
    q, c, cu = cases.rows(case, dtype)
    error = (packed(case, dtype).double() - exact(q, c, cu, case)).abs().max()
    bound = 3e-6 if dtype == torch.float32 else 2**-8
    assert 0 < error < bound * c[:, : case.latent].double().abs().max()


@pytest.mark.parametrize("module", [cpu, reference])
def test_gradients(module, dtype, same_bits) -> None:
    """Within a bound of float64 autograd, equal when repeated, and equal for a sequence alone."""
    long = 150 if module is cpu else 30  # longer than one product of the backward
    case = Case(kind="normal", lengths=(1, 40, 0, long), num_heads=5)
    q, c, cu = cases.rows(case, dtype)
    weight = normal(9, *q.shape[:2], case.latent, dtype=dtype)

    def gradients(rows: slice, cu: Tensor) -> list[Tensor]:
        leaves = [x[rows].detach().clone().requires_grad_() for x in (q, c)]
        module.mla(*leaves, cu, case.scale, case.latent, schedule=SCHEDULE).backward(weight[rows])
        return [x.grad for x in leaves]

    ours, bound = gradients(slice(None), cu), 3e-5 if dtype == torch.float32 else 3e-2
    leaves = [x.double().requires_grad_() for x in (q, c)]
    exact(*leaves, cu, case).backward(weight.double())
    for a, b in zip(ours, leaves, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b.grad).abs().max() < bound * b.grad.abs().max()
    alone = zip(gradients(slice(0, 41), ints(0, 1, 41)), gradients(slice(41, 41 + long), ints(0, long)), strict=True)
    for other in (gradients(slice(None), cu), [torch.cat(x) for x in alone]):
        for a, b in zip(ours, other, strict=True):
            same_bits(a, b)


@pytest.mark.parametrize("name", ["odd", "transposed", "part of a weight"])
def test_gradients_of_a_linear_per_head(name: str, dtype, check_backward, gradients) -> None:
    x, w = cases.heads(dtype)[name]
    check_backward(cpu.head_linear, reference.head_linear, x, w)
    (dx,) = gradients(lambda x: cpu.head_linear(x, w), x)
    assert dx.shape == x.shape and w.grad is None


def absorbed(q: Tensor, c: Tensor, kv_b: Tensor, cu: Tensor, nope: int, latent: int) -> Tensor:
    """The latent form with the operators: q [T, N, nope + rotated], c [T, Q], kv_b [N, nope + V, L]."""
    query = cpu.head_linear(q[..., :nope], kv_b[:, :nope].mT)
    query = torch.cat((query, q[..., nope:]), 2)
    out = cpu.mla(query, c, cu, q.shape[2] ** -0.5, latent, schedule=SCHEDULE)
    return cpu.head_linear(out, kv_b[:, nope:])


def expanded(q: Tensor, c: Tensor, kv_b: Tensor, cu: Tensor, nope: int, latent: int) -> Tensor:
    """The form of the checkpoint: each head's keys and values made of the latent, as Glm4MoeLiteAttention has them."""
    both = torch.einsum("tl,nvl->tnv", c[:, :latent], kv_b)
    k = torch.cat((both[..., :nope], c[:, None, latent:].expand(-1, q.shape[1], -1)), 2)
    return attended(q, k, both[..., nope:], cu, q.shape[2] ** -0.5)


def test_the_expanded_form() -> None:
    """In fp32, values within 2e-6 and gradients within 1e-5 of the largest, of the expanded form in float64.

    The expanded form in fp32 is as far away, so neither form is the less exact one.
    """
    heads, latent, rotated, nope, value, cu = 5, 32, 8, 12, 20, ints(0, 1, 90, 140)
    tensors = (
        normal(1, 140, heads, nope + rotated),
        normal(2, 140, latent + rotated),
        normal(3, heads, nope + value, latent, scale=latent**-0.5),
    )
    upstream = normal(4, 140, heads, value)

    def run(form, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in tensors]
        out = form(*leaves, cu, nope, latent)
        out.backward(upstream.to(dtype))
        return [out.detach(), *(x.grad for x in leaves)]

    truth = run(expanded, torch.float64)
    for form in (absorbed, expanded):
        for found, right, bound in zip(run(form, torch.float32), truth, (2e-6, 1e-5, 1e-5, 1e-5), strict=True):
            assert 0 < (found.double() - right).abs().max() < bound * right.abs().max()
