"""Both forms of the gated delta rule: their gates, how close they are, and requests that are scheduled at will."""

import importlib
import random
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from skyrl_isoexec.kernels.numeric import gdn_cases, gdn_proof
from skyrl_isoexec.kernels.numeric.gdn_cases import Case
from skyrl_isoexec.kernels.numeric.gdn_requests import Paged, Subject
from skyrl_isoexec.kernels.numeric.proof import DTYPES, Proof
from skyrl_isoexec.schedule import Schedule
from skyrl_isoexec.schedule.bits import count_mismatches

SCHEDULE = Schedule()
CHUNK = SCHEDULE.gdn_chunk


@pytest.fixture(params=["gdn", "gdn_cpr"])
def form(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The files of one form."""
    files = ("cpu", "reference", "spec", "cases", "gate")
    return SimpleNamespace(**{f: importlib.import_module(f"skyrl_isoexec.kernels.{request.param}.{f}") for f in files})


def packed(impl: ModuleType, case: Case, dtype: torch.dtype, schedule: Schedule = SCHEDULE) -> torch.Tensor:
    given, cu = gdn_cases.rows(case, dtype)
    return impl.gdn(*given, cu, case.heads, schedule=schedule)


def paged(form: SimpleNamespace, case: Case, dtype: torch.dtype, page_size: int, file: str = "cpu", **kind) -> Paged:
    """Requests of one implementation."""
    label = next(name for name, known in DTYPES.items() if known == dtype)
    subject = Subject(
        proof=Proof(), impl=getattr(form, file), schedule=SCHEDULE, label=label, dtype=dtype,
        definition=form.reference, live=form.spec.live, heads=case.heads,
    )  # fmt: skip
    return Paged(subject, case, page_size, **kind)


@pytest.mark.parametrize("label", DTYPES)
def test_the_gate_finds_nothing(form, label: str) -> None:
    """And goes through every position up to 130, with both kinds of places among them."""
    proof = Proof()
    form.gate.prove(proof, form.cpu, SCHEDULE, {label: DTYPES[label]})
    proof.finish()
    assert not proof.failures
    assert proof.hazards[f"{label} places inside a chunk"] == 128
    assert proof.hazards[f"{label} places at a chunk's end"] == 2
    assert proof.checks[f"{label} decode"].comparisons == 2 * 133  # page sizes, steps


def test_the_gate_of_an_order_that_is_hidden(form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a definition it holds a bound; every other check is the same."""
    monkeypatch.setattr(form.gate, "TENSOR_CORE_HEADS", form.cases.HEADS)
    proof = Proof()
    form.gate.prove(proof, form.cpu, SCHEDULE, {"bf16": torch.bfloat16}, definition=None)
    proof.finish()
    assert not proof.failures
    assert proof.hazards["bf16 within the bound"] > 10**4
    assert not any("definition" in name or "states after" in name for name in proof.checks)
    for key_width, width in gdn_proof.NARROW:
        assert proof.checks[f"bf16 {key_width} by {width} decode"].comparisons == 2 * 133  # page sizes, steps
        assert proof.hazards[f"bf16 {key_width} by {width} within the bound"] > 10**4


BOUNDS = {"normal": 2e-6, "zeros": 2e-6, "gates": 1e-3}


@pytest.mark.parametrize("kind", BOUNDS)
def test_bound_against_float64(form, kind: str, dtype: torch.dtype) -> None:
    """Of the largest output. Sums of g lose digits where single ones are in the thousands, which "gates" has."""
    case = Case(kind=kind, heads=replace(gdn_cases.SMALL, key_width=32, value_width=32), lengths=(150, 64, 1))
    given, cu = gdn_cases.rows(case, dtype)
    exact = gdn_cases.exact(given, cu, case.heads)
    error = (packed(form.cpu, case, dtype).double() - exact).abs().max()
    assert error < (BOUNDS[kind] if dtype == torch.float32 else 2.0**-5) * exact.abs().max()


@pytest.mark.parametrize(("kind", "bound"), [("normal", 2e-5), ("zeros", 2e-5), ("gates", 5e-3)])
def test_gradients(form, kind: str, bound: float, dtype: torch.dtype) -> None:
    """Within a bound of float64 autograd, equal when repeated, and equal for a sequence alone."""
    case = Case(kind=kind, lengths=(1, 40, 0, 130))
    given, cu = gdn_cases.rows(case, dtype)
    weight = torch.randn(171, 4, 12, generator=torch.Generator().manual_seed(1)).to(dtype)

    def gradients(lo: int, hi: int, bounds: torch.Tensor) -> list[torch.Tensor]:
        leaves = [t[lo:hi] if i < 3 else t for i, t in enumerate(given)]
        leaves = [t.detach().clone().requires_grad_() for t in leaves]
        form.cpu.gdn(*leaves, bounds, case.heads, schedule=SCHEDULE).backward(weight[lo:hi])
        return [leaf.grad for leaf in leaves]

    ours = gradients(0, 171, cu)
    leaves = [t.double().requires_grad_() for t in given]
    gdn_cases.exact(leaves, cu, case.heads).backward(weight.double())
    for a, b in zip(ours, leaves, strict=True):
        assert a.dtype == dtype
        error = (a.double() - b.grad).abs().max()
        assert error < (bound if dtype == torch.float32 else 2e-2) * b.grad.abs().max()
    for a, b in zip(ours, gradients(0, 171, cu), strict=True):
        assert count_mismatches(a, b)[0] == 0
    first, second = gradients(0, 41, cu[:3]), gradients(41, 171, torch.tensor([0, 130]))
    for i, (a, b, c) in enumerate(zip(ours, first, second, strict=True)):
        if i < 3:
            assert count_mismatches(a, torch.cat([b, c]))[0] == 0
        elif dtype == torch.float32:  # sequence after sequence, as the sum of two calls is made of two sums
            one, two = gradients(0, 1, cu[:2])[i], gradients(1, 41, torch.tensor([0, 40]))[i]
            assert count_mismatches(a, (one + two) + c)[0] == 0


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("file", ["cpu", "reference"])
def test_requests_that_are_scheduled_at_will(form, file: str, page_size: int, dtype: torch.dtype) -> None:
    """Steps of random requests and lengths; one request is preempted and starts again on pages that hold its state."""
    case, generator = Case(lengths=(130, 3, 200, 64, 129)), random.Random(page_size)
    whole, run = packed(form.cpu, case, dtype), paged(form, case, dtype, page_size, file, strided=True)
    done, inside, edges, preempted = [0] * 5, 0, 0, False
    while done != list(case.lengths):
        waiting = [r for r, n in enumerate(case.lengths) if done[r] < n]
        chosen = generator.sample(waiting, generator.randint(1, len(waiting)))
        spans = [(r, done[r], min(case.lengths[r], done[r] + generator.choice((1, 1, 7, 64, 100)))) for r in chosen]
        assert count_mismatches(run.of(whole, spans), run.step(spans))[0] == 0
        for r, lo, hi in spans:
            inside, edges = inside + (lo % CHUNK != 0), edges + (lo > 0 and lo % CHUNK == 0)
            done[r] = hi
        if done[2] > 90 and not preempted:
            done[2], preempted = 0, True
    assert inside > 5 and preempted
    other = paged(form, case, dtype, page_size)
    other.step(other.whole())
    for r, length in enumerate(case.lengths):
        for j in range(-(-length // page_size)):
            at = min(length, (j + 1) * page_size)
            states = (form.spec.live(p.states, int(p.table[r, j]), at, SCHEDULE) for p in (run, other))
            for a, b in zip(*states, strict=True):
                assert not a.isnan().any() and count_mismatches(a, b)[0] == 0


def test_a_batch_equals_each_request_alone(form, dtype: torch.dtype) -> None:
    """A decode step of 40 requests at other positions, in one call and in 40."""
    case = Case(lengths=tuple(range(50, 90)))
    together, alone = (paged(form, case, dtype, 64) for _ in range(2))
    before = [(r, 0, n - 1) for r, n in enumerate(case.lengths)]
    last = [(r, n - 1, n) for r, n in enumerate(case.lengths)]
    together.step(before)
    for span in before:
        alone.step([span])
    assert any(n % CHUNK == 0 for n in case.lengths) and any(n % CHUNK == 1 for n in case.lengths)
    found = together.step(last)
    assert count_mismatches(found, torch.cat([alone.step([span]) for span in last]))[0] == 0
    for a, b in zip(together.states, alone.states, strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def test_the_chunk_changes_bits(form) -> None:
    """It is part of the order."""
    case = Case(lengths=(130,))
    out = packed(form.cpu, case, torch.float32)
    other = packed(form.cpu, case, torch.float32, Schedule(gdn_chunk=32))
    assert count_mismatches(out, other)[0] > 0
    torch.testing.assert_close(out, other, rtol=1e-4, atol=1e-5)


def test_forms_differ_in_bits_alone() -> None:
    """Row-causal and recurrent outputs are the same numbers, added in another order."""
    forms = [importlib.import_module(f"skyrl_isoexec.kernels.{op}.cpu") for op in ("gdn", "gdn_cpr")]
    a, b = (packed(impl, Case(), torch.float32) for impl in forms)
    assert count_mismatches(a, b)[0] > a.numel() // 10
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
