"""Latent attention: nothing to do, and what is refused before any memory is read or written."""

import pytest
import torch

from skyrl_isoexec.kernels.mla import cpu, reference
from skyrl_isoexec.schedule import Schedule
from skyrl_isoexec.schedule.bits import bit_view, count_mismatches

SCHEDULE = Schedule(kv_block=16, kv_partition=64)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("module", [cpu, reference])
def test_nothing_to_do(module) -> None:
    """Empty batches, empty sequences, skipped slots and padding rows change nothing they should not."""
    q, c = torch.zeros(0, 3, 8), torch.zeros(0, 8)
    for cu in (ints(0), ints(0, 0)):
        assert module.mla(q, c, cu, 1.0, 6, schedule=SCHEDULE).shape == (0, 3, 6)
    cache = torch.full(module.mla_cache_shape(2, 16, 8), float("nan"))
    before = cache.clone()
    module.write_latent(torch.ones(3, 8), cache, torch.tensor([-1, -1]))
    assert count_mismatches(cache, before)[0] == 0
    module.write_latent(torch.ones(1, 8), cache, torch.tensor([0]))
    assert int(cache.isnan().sum()) == 31 * 8
    out = torch.full((3, 3, 6), 7.0)
    table, starts, lens = torch.zeros(2, 1, dtype=torch.int32), ints(0, 1, 1), ints(1, 0)
    assert module.mla_paged(torch.ones(3, 3, 8), cache, table, starts, lens, 1.0, 6, out, schedule=SCHEDULE) is out
    assert (out[0] == 1).all() and (out[1:] == 7).all()
    none = module.mla_paged(q, cache, table[:0], ints(0), ints(), 1.0, 6, schedule=SCHEDULE)
    assert none.shape == (0, 3, 6)


def refusal(**changes):
    """Arguments of a valid paged call on one page, with changes."""
    valid = {
        "q": torch.zeros(2, 3, 8),
        "cache": torch.zeros(cpu.mla_cache_shape(2, 16, 8)),
        "block_table": ints(1)[None],
        "query_start": ints(0, 2),
        "seq_lens": ints(5),
        "scale": 1.0,
        "latent": 6,
    }
    return list((valid | changes).values())


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"block_table": ints(2)[None]}, ValueError, "page outside the cache"),
        ({"block_table": ints(-1)[None]}, ValueError, "page outside the cache"),
        ({"seq_lens": ints(17)}, ValueError, "too few pages"),
        ({"seq_lens": ints(1)}, ValueError, "query_start and seq_lens"),
        ({"query_start": ints(0, 3)}, ValueError, "query_start and seq_lens"),
        ({"query_start": ints(0, 1, 2)}, ValueError, "number of requests"),
        ({"query_start": ints(0, 9, 2, 9)[::2]}, ValueError, r"query_start \(2,\) with strides \(2,\)"),
        ({"seq_lens": torch.tensor([5])}, TypeError, "int64, not int32"),
        ({"q": torch.zeros(2, 3, 8, device="meta")}, TypeError, "on meta"),
        ({"q": torch.zeros(2, 3, 7)}, ValueError, "does not fit cache"),
        ({"q": torch.zeros(2, 0, 8)}, ValueError, "does not fit cache"),
        ({"q": torch.zeros(2, 3, 8).double()}, TypeError, "float64"),
        ({"q": torch.zeros(2, 3, 8).bfloat16()}, TypeError, "bfloat16"),
        ({"latent": 8}, ValueError, "latent 8 is not between 1 and 7"),
        ({"latent": 0}, ValueError, "latent 0 is not between 1 and 7"),
        ({"out": torch.zeros(2, 3, 8)}, ValueError, r"out \(2, 3, 8\) torch.float32 is not a contiguous \(2, 3, 6\)"),
        ({"cache": torch.zeros(2, 24, 8)}, ValueError, "page size 24 is not a multiple of schedule.kv_block 16"),
        ({"cache": torch.zeros(2, 8, 16).mT}, ValueError, "not a contiguous"),
    ],
)
def test_paged_refusals(changes: dict, error: type[Exception], says: str) -> None:
    """What is not defined raises and says what is wrong; nothing outside the given memory is read."""
    cpu.mla_paged(*refusal(), schedule=SCHEDULE)
    with pytest.raises(error, match=says):
        cpu.mla_paged(*refusal(**changes), schedule=SCHEDULE)


@pytest.mark.parametrize("module", [cpu, reference])
def test_packed_and_write_refusals(module) -> None:
    """Bad sequence bounds, shapes, dtypes, blocks, slots and pages raise and name the values."""
    q, c = torch.zeros(4, 3, 8), torch.zeros(4, 8)
    for cu in (ints(0, 3), ints(1, 4), ints(0, 3, 2, 4)):
        with pytest.raises(ValueError, match="cu_seqlens"):
            module.mla(q, c, cu, 1.0, 6, schedule=SCHEDULE)
    for other in (c[:3], c[:, :7], c[:, None]):
        with pytest.raises(ValueError, match=r"are not \[T, N, Q\] and \[T, Q\]"):
            module.mla(q, other, ints(0, 4), 1.0, 6, schedule=SCHEDULE)
    with pytest.raises(TypeError, match="c is torch.float32 beside torch.bfloat16"):
        module.mla(q.bfloat16(), c, ints(0, 4), 1.0, 6, schedule=SCHEDULE)
    with pytest.raises(TypeError, match="float16"):
        module.mla(q.half(), c.half(), ints(0, 4), 1.0, 6, schedule=SCHEDULE)
    with pytest.raises(ValueError, match="latent 8"):
        module.mla(q, c, ints(0, 4), 1.0, 8, schedule=SCHEDULE)
    with pytest.raises(ValueError, match="kv_block 8 is not a multiple of 16"):
        module.mla(q, c, ints(0, 4), 1.0, 6, schedule=Schedule(kv_block=8, kv_partition=64))
    with pytest.raises(ValueError, match="a size below 1"):
        module.mla_cache_shape(1, 0, 8)
    cache = torch.zeros(module.mla_cache_shape(2, 16, 8))
    with pytest.raises(ValueError, match="slot 32 lies outside 2 pages of 16"):
        module.write_latent(c, cache, torch.tensor([0, 32]))
    with pytest.raises(ValueError, match="do not fit"):
        module.write_latent(c, cache, torch.tensor([0, 1, 2, 3, 4]))
    with pytest.raises(TypeError, match="int32, not int64"):
        module.write_latent(c, cache, ints(0, 1))
    assert int(bit_view(cache).count_nonzero()) == 0


@pytest.mark.parametrize("module", [cpu, reference])
@pytest.mark.parametrize(
    ("x", "w", "error"),
    [
        (torch.ones(4, 3), torch.ones(3, 5, 8), ValueError),
        (torch.ones(4, 3, 8), torch.ones(2, 5, 8), ValueError),
        (torch.ones(4, 3, 8), torch.ones(3, 8, 5), ValueError),
        (torch.ones(4, 0, 8), torch.ones(0, 5, 8), ValueError),
        (torch.ones(4, 3, 8), torch.ones(3, 5, 8).bfloat16(), TypeError),
    ],
)
def test_head_refusals(x, w, error: type[Exception], module) -> None:
    with pytest.raises(error, match="^mla: "):
        module.head_linear(x, w)
