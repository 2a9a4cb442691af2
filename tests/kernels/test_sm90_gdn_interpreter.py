"""The Hopper kernels of a gated delta rule in Triton's interpreter: indices, masks, rounding points, pages, gradients.

The interpreter has float64 sums where the chip has a tensor core, so bits between prefill and decode show what is
rounded and what is multiplied with what; the order inside a tensor core is shown by `tests/gpu/test_gdn.py`.
"""

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from skyrl_isoexec.kernels.numeric import gdn_cases
from skyrl_isoexec.kernels.numeric.gdn_cases import Case
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.kernels.numeric.gdn_requests import Paged, Subject, ints
from skyrl_isoexec.kernels.numeric.proof import Proof
from skyrl_isoexec.schedule import Schedule
from skyrl_isoexec.schedule.bits import count_mismatches

triton = pytest.importorskip("triton")
INTERPRETED = bool(triton.knobs.runtime.interpret)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the subprocess of test_in_the_interpreter")
BF16 = torch.bfloat16
HEADS = GdnHeads(num_key_heads=1, num_value_heads=2, key_width=16, value_width=32)
SHORT = Schedule(gdn_chunk=16)


@pytest.fixture(params=["gdn", "gdn_cpr"])
def form(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"skyrl_isoexec.kernels.{request.param}.kernel")


@pytest.fixture
def row_causal() -> ModuleType:
    return importlib.import_module("skyrl_isoexec.kernels.gdn.kernel")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="is the subprocess")
def test_in_the_interpreter():
    """The other tests of this file, in a process whose Triton interprets."""
    command = [sys.executable, "-W", "ignore", "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def packed(impl: ModuleType, case: Case, schedule: Schedule) -> torch.Tensor:
    given, cu = gdn_cases.rows(case, BF16)
    return impl.gdn(*given, cu, case.heads, schedule=schedule)


def paged(impl: ModuleType, case: Case, schedule: Schedule, page_size: int, **kind: bool) -> Paged:
    """Requests of one implementation."""
    subject = Subject(
        proof=Proof(), impl=impl, schedule=schedule, label="bf16", dtype=BF16, definition=None, live=impl.live,
        heads=case.heads,
    )  # fmt: skip
    return Paged(subject, case, page_size, **kind)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def same_states(a: Paged, b: Paged, length: int) -> int:
    """Number of elements that pages of requests of one length carry, all equal."""
    count = 0
    for x, y in zip(a.carried(a.impl.live, length), b.carried(b.impl.live, length), strict=True):
        assert torch.equal(bits(x), bits(y))
        count += x.numel()
    return count


@interpreted
@pytest.mark.parametrize(
    "name, chunk, length, steps",
    [
        ("gdn", 64, 67, [(15, 18), (31, 33), (63, 66)]),
        ("gdn_cpr", 16, 34, [(15, 18), (31, 33)]),
    ],
)
def test_a_row_has_the_same_bits_however_it_is_computed(name, chunk, length, steps, same_bits):
    """Prefills that end and start beside blocks of 16, chunks and pages, with decode steps over those places."""
    impl, order = importlib.import_module(f"skyrl_isoexec.kernels.{name}.kernel"), Schedule(gdn_chunk=chunk)
    case = Case(heads=replace(HEADS, num_value_heads=1), lengths=(length,))
    whole, once, cut = packed(impl, case, order), paged(impl, case, order, chunk), paged(impl, case, order, chunk)
    same_bits(once.step([(0, 0, length)]), whole)
    at = 0
    for first, last in steps:
        for lo, hi in [(at, first)] + [(t, t + 1) for t in range(first, last)]:
            same_bits(cut.step([(0, lo, hi)]), whole[lo:hi])
        at = last
    same_bits(cut.step([(0, at, length)]), whole[at:])
    assert same_states(once, cut, length) > 2_000
    assert all(any(first <= t < last for first, last in steps) for t in (15, 16, chunk - 1, chunk))


@interpreted
def test_batches_packs_and_heads(form, same_bits):
    """Sequences do not see each other, nor heads each other; decode beside prefills beside padding."""
    heads = GdnHeads(num_key_heads=2, num_value_heads=2, key_width=16, value_width=16)
    case = Case(heads=heads, lengths=(17, 0, 4, 1))
    given, cu = gdn_cases.rows(case, BF16)
    whole = packed(form, case, SHORT)
    for lo, hi in ((0, 9), (17, 21)):
        alone = form.gdn(*(t[lo:hi] for t in given[:3]), *given[3:], ints(0, hi - lo), heads, schedule=SHORT)
        same_bits(alone, whole[lo:hi])
    for rank, (rows, few) in enumerate(gdn_cases.shards(given, heads, 2)):
        same_bits(form.gdn(*rows, cu, few, schedule=SHORT), whole[:, rank : rank + 1])
    run = paged(form, case, SHORT, 16, strided=True)
    run.step([(0, 0, 16), (2, 0, 2)])
    before, spans = [state.clone() for state in run.states], [(2, 2, 4), (0, 16, 17), (3, 0, 1)]
    rows = [torch.cat([run.of(t, spans), t[:2]]) for t in run.rows[:3]]  # and two rows of padding
    out = torch.full((6, *whole.shape[1:]), 7.0, dtype=BF16)
    table = torch.cat([run.table[[2, 0, 3]], torch.full_like(run.table[:1], -1)])
    found = run.advance(rows, table, ints(0, 2, 3, 4, 4), ints(4, 17, 1, 0), out)
    same_bits(found[:4], run.of(whole, spans))
    assert bool((found[4:] == 7).all()) and len(run.unused()) == 3
    first = int(run.table[0, 0])  # a whole page, that others may read
    for state, old in zip(run.states, before, strict=True):
        for page in (*run.unused(), first):
            assert torch.equal(bits(state[page]), bits(old[page]))


@interpreted
def test_tiles_that_change_no_bit(row_causal, same_bits, monkeypatch):
    """Rows of a tile, columns of the pass, of the outputs and of a decode step."""
    case, chunks, step = (
        Case(heads=replace(HEADS, num_value_heads=1), lengths=(18,)),
        row_causal.chunks,
        row_causal.step,
    )
    whole = packed(row_causal, case, SHORT)
    tiles = {"tile": (16, 4), "walk": (16, 4, 1), "attend": (16, 4)}
    monkeypatch.setattr(row_causal, "chunks", lambda *a: chunks(*a, **tiles))
    same_bits(packed(row_causal, case, SHORT), whole)
    run = paged(row_causal, case, SHORT, 16)
    run.step([(0, 0, 15)])
    monkeypatch.setattr(row_causal, "step", lambda *a, choice: step(*a, choice=(16, 4, 168)))
    for t in range(15, 18):
        same_bits(run.step([(0, t, t + 1)]), whole[t : t + 1])


@interpreted
def test_a_batch_of_single_rows_is_one_launch(form, monkeypatch):
    """Nothing but the step runs; where only shapes are known, a longer request becomes NaN instead of a wrong row."""
    case = Case(heads=HEADS, lengths=(2, 3))
    run = paged(form, case, SHORT, 16)
    run.step([(0, 0, 1), (1, 0, 1)])

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a kernel over chunks was launched")

    monkeypatch.setattr(form, "chunks", refuse)
    assert not run.step([(0, 1, 2), (1, 1, 2)]).isnan().any()
    with pytest.raises(AssertionError, match="over chunks"):
        run.step([(1, 1, 3), (0, 2, 2)])
    call = importlib.import_module("skyrl_isoexec.kernels.numeric.sm90_gdn_call")
    monkeypatch.setattr(call, "is_captured", lambda _: True)
    found = run.step([(1, 1, 3), (0, 2, 2)])
    assert found.isnan().all() and found.shape[0] == 2


@interpreted
def test_every_state_matters(form):
    """A bit of each state that a page carries moves a row that comes later: what is compared is what is used."""
    case = Case(heads=replace(HEADS, num_value_heads=1), lengths=(32,))
    run = paged(form, case, SHORT, 32)
    run.step([(0, 0, 31)])
    before, page, seen = [state.clone() for state in run.states], int(run.table[0, 0]), 0

    def last_row() -> tuple[torch.Tensor, ...]:
        """o of the row that ends the second chunk, and the state after it."""
        return run.step([(0, 31, 32)]), *(bits(t).clone() for t in form.live(run.states, page, 32, SHORT)[-2:])

    expected = last_row()
    for i in range(len(before)):
        for state, old in zip(run.states, before, strict=True):
            state.copy_(old)
        for carried in form.live(run.states, page, 31, SHORT):
            if carried.untyped_storage().data_ptr() == run.states[i].untyped_storage().data_ptr():
                whole = carried.view(torch.int16 if carried.dtype == BF16 else torch.int32)
                whole += 2 if carried.dtype == BF16 else 1 << 20
                seen += whole.numel()
        assert any(count_mismatches(a, b)[0] for a, b in zip(expected, last_row(), strict=True))
    assert seen > 2_000


@interpreted
def test_a_state_is_its_snapshot_and_sixteen_bits():
    """For any value whose last bit is clear: ties of the rounding, infinities, NaN, subnormals and signed zeros."""
    language = importlib.import_module("triton.language")
    numeric = importlib.import_module("skyrl_isoexec.kernels.numeric.sm90_gdn_chunk")
    names = {"tl": language, "narrow": numeric.narrow, "remainder": numeric.remainder, "restore": numeric.restore}

    def round_trip(x, high, low, back):
        at = tl.arange(0, 4096)  # noqa: F821
        value = tl.load(x + at)  # noqa: F821
        rounded = narrow(value, tl.bfloat16)  # noqa: F821
        rest = remainder(value, rounded)  # noqa: F821
        tl.store(high + at, rounded)  # noqa: F821
        tl.store(low + at, rest)  # noqa: F821
        tl.store(back + at, restore(rounded, rest))  # noqa: F821

    round_trip.__globals__.update(names)
    random = torch.randint(-(2**31), 2**31, (4000,), generator=torch.Generator().manual_seed(0))
    special = [0x3F808000, 0x3F818000, 0x7F7FFFFE, 0x7F800000, 0x7FC00000, 0, 0x80000000 - 2**32, 2, 0xFF7F8000 - 2**32]
    given = torch.cat([random, torch.tensor((special * 11)[:96])]).to(torch.int32) & -2
    given = torch.where(given.view(torch.float32).isnan(), 0x7FC00000, given)
    ties = (given & 0xFFFF) == 0x8000
    assert ties.sum() > 10
    x, back = given.view(torch.float32), torch.empty(4096)
    high, low = torch.empty(4096, dtype=BF16), torch.empty(4096, dtype=BF16)
    triton.jit(round_trip)[(1,)](x, high, low, back)
    assert torch.equal(high[~x.isnan()], x.to(BF16)[~x.isnan()]) and bool(high[x.isnan()].isnan().all())
    assert torch.equal(back.view(torch.int32), given)


@interpreted
@pytest.mark.parametrize(("kind", "bound"), [("normal", 2e-2), ("gates", 1e-1)])
def test_bound_and_gradients_against_float64(row_causal, kind, bound):
    """Outputs, and gradients of every operand."""
    case = Case(kind=kind, heads=HEADS, lengths=(1, 35, 0, 16))
    given, cu = gdn_cases.rows(case, BF16)
    assert all(gdn_cases.reached(case, given, 16).values())
    weight = torch.randn(52, 2, 32, generator=torch.Generator().manual_seed(1)).to(BF16)

    ours = [t.clone().requires_grad_() for t in given]
    out = row_causal.gdn(*ours, cu, HEADS, schedule=SHORT)
    out.backward(weight)
    leaves = [t.double().requires_grad_() for t in given]
    exact = gdn_cases.exact(leaves, cu, HEADS)
    exact.backward(weight.double())
    assert (out.detach().double() - exact).abs().max() < 2.0**-5 * exact.abs().max()
    for a, b in zip(ours, leaves, strict=True):
        assert a.grad.dtype == BF16 and (a.grad.double() - b.grad).abs().max() < bound * b.grad.abs().max()


@interpreted
def test_gradients_of_a_layer_that_is_computed_again(form, same_bits):
    """What a backward takes of its forward may be taken only once there."""
    given, cu = gdn_cases.rows(Case(heads=HEADS, lengths=(20,)), BF16)
    made = []
    for again in (False, True):
        leaves = [t.clone().requires_grad_() for t in given]

        def run(*rows: torch.Tensor) -> torch.Tensor:
            return form.gdn(*rows, cu, HEADS, schedule=SHORT)

        out = checkpoint(run, *leaves, use_reentrant=False) if again else run(*leaves)
        out.sum().backward()
        made.append([out, *(leaf.grad for leaf in leaves)])
    for a, b in zip(*made, strict=True):
        same_bits(a, b)


@interpreted
def test_refusals_name_what_they_refuse(form):
    given, cu = gdn_cases.rows(Case(heads=HEADS, lengths=(3,)), BF16)
    with pytest.raises(TypeError, match="takes bfloat16, not torch.float32"):
        form.gdn(*(t.float() for t in given), cu, HEADS, schedule=SHORT)
    wide = GdnHeads(num_key_heads=1, num_value_heads=1, key_width=16, value_width=256)
    with pytest.raises(ValueError, match="no value_width 256; it has"):
        form.gdn_states(wide, 4, BF16, schedule=SHORT)
    with pytest.raises(ValueError, match=r"no schedule.gdn_chunk 128; it has"):
        form.gdn_states(HEADS, 4, BF16, schedule=Schedule(gdn_chunk=128))
    with pytest.raises(ValueError, match="a conv width of 40 reaches past"):
        form.gdn_states(HEADS, 40, BF16, schedule=SHORT)
    none = tuple(t[:0] for t in given[:3])
    assert form.gdn(*none, *given[3:], ints(0), HEADS, schedule=SHORT).shape == (0, 2, 32)
