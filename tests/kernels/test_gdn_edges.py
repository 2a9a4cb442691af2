"""Both forms of the gated delta rule: nothing to do, and what is refused before any memory is read or written."""

import importlib

import pytest
import torch

from skyrl_isoexec.kernels.numeric import gdn_cases
from skyrl_isoexec.kernels.numeric.cpu import compiled, f32
from skyrl_isoexec.kernels.numeric.gdn_cases import Case
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.kernels.numeric.gdn_loops import softplus as softplus_loop
from skyrl_isoexec.kernels.numeric.gdn_rows import softplus
from skyrl_isoexec.kernels.numeric.gdn_tile import combine
from skyrl_isoexec.kernels.numeric.inputs import hazards, normal
from skyrl_isoexec.schedule import Schedule

SCHEDULE = Schedule()
HEADS = GdnHeads(num_key_heads=1, num_value_heads=2, key_width=4, value_width=6)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(params=["gdn.cpu", "gdn.reference", "gdn_cpr.cpu", "gdn_cpr.reference"])
def impl(request: pytest.FixtureRequest):
    return importlib.import_module(f"skyrl_isoexec.kernels.{request.param}")


def call(impl, **changes) -> list:
    """Arguments of a valid paged call of two rows on one page, with changes."""
    given, _ = gdn_cases.rows(Case(heads=HEADS, lengths=(2,)), torch.float32)
    names = ("x", "a", "b", "conv", "a_log", "dt_bias")
    states = [
        torch.full((2, *shape), 7.0, dtype=dtype)
        for shape, dtype in impl.gdn_states(HEADS, 4, torch.float32, schedule=SCHEDULE)
    ]
    valid = dict(zip(names, given, strict=True)) | {
        "states": states,
        "block_table": ints(1)[None],
        "query_start": ints(0, 2),
        "seq_lens": ints(5),
        "page_size": 64,
        "heads": HEADS,
        "out": None,
    }
    return list((valid | changes).values())


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"block_table": ints(2)[None]}, ValueError, "request 0: block_table names a page outside the states"),
        ({"block_table": ints(-1)[None]}, ValueError, "request 0: block_table names a page outside the states"),
        ({"seq_lens": ints(65)}, ValueError, "request 0: block_table has too few pages"),
        ({"seq_lens": ints(1)}, ValueError, "request 0: query_start and seq_lens"),
        ({"query_start": ints(0, 3)}, ValueError, "request 0: query_start and seq_lens"),
        ({"query_start": ints(0, 1, 2)}, ValueError, "number of requests"),
        ({"seq_lens": torch.tensor([5])}, TypeError, "seq_lens is torch.int64, not torch.int32"),
        ({"page_size": 96}, ValueError, "page size 96 is not a multiple of schedule.gdn_chunk 64"),
        ({"page_size": 0}, ValueError, "page size 0 is not a multiple"),
        ({"x": torch.zeros(2, 21)}, ValueError, r"x is \(2, 21\), but 2 rows of .* need \(2, 20\)"),
        ({"a": torch.zeros(3, 2)}, ValueError, r"a is \(3, 2\), but 2 rows of .* need \(2, 2\)"),
        ({"a_log": torch.zeros(1)}, ValueError, r"a_log is \(1,\)"),
        ({"conv": torch.zeros(20, 1)}, ValueError, "a conv width of 1 has no earlier row"),
        ({"conv": torch.zeros(20)}, ValueError, r"conv \(20,\) is not \[channels, taps\]"),
        ({"b": torch.zeros(2, 2).bfloat16()}, TypeError, "b is torch.bfloat16 and x torch.float32"),
        ({"x": torch.zeros(2, 20).double()}, TypeError, "dtype is torch.float64, neither"),
        ({"states": []}, ValueError, "0 states were given, but a page has"),
        ({"out": torch.zeros(2, 2, 5)}, ValueError, r"out \(2, 2, 5\) torch.float32 is not a contiguous \(2, 2, 6\)"),
        ({"heads": GdnHeads(num_key_heads=2, num_value_heads=2, key_width=4, value_width=6)}, ValueError, "x is"),
    ],
)
def test_paged_refusals(impl, changes: dict, error: type[Exception], says: str) -> None:
    """What is not defined raises and says what is wrong; no state is written."""
    impl.gdn_paged(*call(impl), schedule=SCHEDULE)
    arguments = call(impl, **changes)
    with pytest.raises(error, match=says):
        impl.gdn_paged(*arguments, schedule=SCHEDULE)
    assert all((state == 7).all() for state in arguments[6])


def test_states_that_are_refused(impl) -> None:
    """Another shape, another number of pages, another dtype, pages that are not contiguous."""
    good = call(impl)[6]
    for i, bad, error, says in (
        (1, good[1][:, :, :3], ValueError, "state 1 is"),
        (1, good[1][:1], ValueError, "state 1 is .* 2 pages need"),
        (2, good[2].bfloat16(), TypeError, "state 2 is torch.bfloat16, not torch.float32"),
        (0, good[0].transpose(1, 2).contiguous().transpose(1, 2), ValueError, "a page of it is not contiguous"),
    ):
        states = [bad if place == i else state for place, state in enumerate(good)]
        with pytest.raises(error, match=says):
            impl.gdn_paged(*call(impl, states=states), schedule=SCHEDULE)


def test_packed_refusals(impl) -> None:
    given, _ = gdn_cases.rows(Case(heads=HEADS, lengths=(4,)), torch.float32)
    for cu in (ints(0, 3), ints(1, 4), ints(0, 3, 2, 4), ints()):
        with pytest.raises(ValueError, match="does not cut 4 tokens"):
            impl.gdn(*given, cu, HEADS, schedule=SCHEDULE)
    with pytest.raises(TypeError, match="float16"):
        impl.gdn_states(HEADS, 4, torch.float16, schedule=SCHEDULE)
    with pytest.raises(ValueError, match="conv width of 1"):
        impl.gdn_states(HEADS, 1, torch.float32, schedule=SCHEDULE)


@pytest.mark.parametrize("op", ["gdn", "gdn_cpr"])
def test_memory_of_another_device_is_refused(op: str) -> None:
    cpu = importlib.import_module(f"skyrl_isoexec.kernels.{op}.cpu")
    with pytest.raises(ValueError, match="device meta"):
        cpu.gdn_paged(*call(cpu, x=torch.zeros(2, 20, device="meta")), schedule=SCHEDULE)


def test_nothing_to_do(impl) -> None:
    """No rows, no requests, and a batch of nothing but padding."""
    given, _ = gdn_cases.rows(Case(heads=HEADS, lengths=(2,)), torch.float32)
    none = {name: t[:0] for name, t in zip("xab", given, strict=False)}
    assert impl.gdn(*none.values(), *given[3:], ints(0, 0), HEADS, schedule=SCHEDULE).shape == (0, 2, 6)
    arguments = call(impl, query_start=ints(0), seq_lens=ints(), block_table=ints()[:, None])
    assert (impl.gdn_paged(*arguments, schedule=SCHEDULE) == 0).all()
    out = torch.full((2, 2, 6), 7.0)
    arguments = call(impl, query_start=ints(0, 0), seq_lens=ints(0), block_table=ints(-1)[None], out=out)
    assert impl.gdn_paged(*arguments, schedule=SCHEDULE) is out
    assert (out == 7).all() and all((state == 7).all() for state in arguments[6])


def test_softplus(same_bits) -> None:
    """Within 3e-7 of the exact value, relatively, and the same bits in a loop; subnormal and zero where it must be."""

    def run(source, out, count):
        for i in range(count):
            f32(out)[i] = softplus_loop(f32(source)[i])

    x = torch.cat([torch.linspace(-110, 110, 20001), hazards(1, 200, finite=False)])
    found, out = softplus(x), torch.empty_like(x)
    compiled(run)(x.data_ptr(), out.data_ptr(), len(x))
    same_bits(found, out)
    finite = x[:20001]
    exact = torch.where(finite.double() > 0, finite.double(), 0) + torch.log1p((-finite.double().abs()).exp())
    normal_results = exact > 1e-37
    assert ((found[:20001].double() / exact - 1).abs()[normal_results] < 3e-7).all() and (found[:20001] == 0).any()
    assert ((found > 0) & (found < 1.2e-38)).any()


@pytest.mark.parametrize("width", [1, 15, 16, 17, 63, 64, 65, 150])
def test_combine_is_one_accumulator_a_column(width: int, same_bits) -> None:
    """Whatever vector or remainder a column falls into."""

    def run(weights, count, matrix, stride, width, out):
        combine(weights, count, matrix, stride, width, out)

    weights, matrix, out = normal(1, 33), normal(2, 33, width + 3), torch.full((width + 1,), 7.0)
    compiled(run)(weights.data_ptr(), 33, matrix.data_ptr(), width + 3, width, out.data_ptr())
    total = torch.zeros(width)
    for s in range(33):
        total = total + weights[s] * matrix[s, :width]
    same_bits(out[:width], total)
    assert out[width] == 7
