"""Attention: nothing to do, and what is refused before any memory is read or written."""

import pytest
import torch

from skyrl_isoexec.kernels.attention import cpu, reference
from skyrl_isoexec.schedule import Schedule
from skyrl_isoexec.schedule.bits import bit_view, count_mismatches

SCHEDULE = Schedule(kv_block=16, kv_partition=64)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("module", [cpu, reference])
def test_nothing_to_do(module) -> None:
    """Empty batches, empty sequences, skipped slots and padding rows change nothing they should not."""
    empty = torch.zeros(0, 4, 8), torch.zeros(0, 2, 8)
    assert module.attention(empty[0], empty[1], empty[1], ints(0), 1.0, schedule=SCHEDULE).shape == (0, 4, 8)
    assert module.attention(empty[0], empty[1], empty[1], ints(0, 0), 1.0, schedule=SCHEDULE).shape == (0, 4, 8)
    cache = torch.full(module.kv_cache_shape(2, 16, 2, 8, schedule=SCHEDULE), float("nan"))
    before = cache.clone()
    module.write_kv(torch.ones(3, 2, 8), torch.ones(3, 2, 8), cache, torch.tensor([-1, -1]))
    assert count_mismatches(cache, before)[0] == 0
    module.write_kv(torch.ones(1, 2, 8), torch.ones(1, 2, 8), cache, torch.tensor([0]))
    out = torch.full((3, 4, 8), 7.0)
    table, starts, lens = torch.ones(2, 1, dtype=torch.int32) - 1, ints(0, 1, 1), ints(1, 0)
    result = module.attention_paged(torch.ones(3, 4, 8), cache, table, starts, lens, 1.0, out, schedule=SCHEDULE)
    assert result is out
    assert (out[0] == 1).all() and (out[1:] == 7).all()
    none = module.attention_paged(empty[0], cache, table[:0], ints(0), ints(), 1.0, schedule=SCHEDULE)
    assert none.shape == (0, 4, 8)


def refusal(**changes):
    """Arguments of a valid paged call on one page, with changes."""
    valid = {
        "q": torch.zeros(2, 4, 8),
        "cache": torch.zeros(cpu.kv_cache_shape(2, 16, 2, 8, schedule=SCHEDULE)),
        "block_table": ints(1)[None],
        "query_start": ints(0, 2),
        "seq_lens": ints(5),
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
        ({"seq_lens": torch.tensor([5])}, TypeError, "int64, not int32"),
        ({"q": torch.zeros(2, 4, 8, device="meta")}, TypeError, "on meta"),
        ({"q": torch.zeros(2, 3, 8)}, ValueError, "does not fit cache"),
        ({"q": torch.zeros(2, 4, 8).double()}, TypeError, "float64"),
        ({"q": torch.zeros(2, 4, 8).bfloat16()}, TypeError, "bfloat16"),
        ({"cache": torch.zeros(2, 2, 2, 8, 24)}, ValueError, "page size 24 is not a multiple of schedule.kv_block 16"),
    ],
)
def test_paged_refusals(changes: dict, error: type[Exception], says: str) -> None:
    """What is not defined raises and says what is wrong; nothing outside the given memory is read."""
    cpu.attention_paged(*refusal(), 1.0, schedule=SCHEDULE)
    with pytest.raises(error, match=says):
        cpu.attention_paged(*refusal(**changes), 1.0, schedule=SCHEDULE)


@pytest.mark.parametrize("module", [cpu, reference])
def test_packed_and_write_refusals(module) -> None:
    """Bad sequence bounds, heads, dtypes, slots and pages raise and name the values."""
    q, k = torch.zeros(4, 4, 8), torch.zeros(4, 2, 8)
    for cu in (ints(0, 3), ints(1, 4), ints(0, 3, 2, 4)):
        with pytest.raises(ValueError, match="cu_seqlens"):
            module.attention(q, k, k, cu, 1.0, schedule=SCHEDULE)
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2"):
        module.attention(q[:, :3], k, k, ints(0, 4), 1.0, schedule=SCHEDULE)
    with pytest.raises(ValueError, match="do not fit"):
        module.attention(q, k[:3], k, ints(0, 4), 1.0, schedule=SCHEDULE)
    with pytest.raises(TypeError, match="float16"):
        module.attention(q.half(), k.half(), k.half(), ints(0, 4), 1.0, schedule=SCHEDULE)
    with pytest.raises(ValueError, match="page size 24"):
        module.kv_cache_shape(1, 24, 2, 8, schedule=SCHEDULE)
    with pytest.raises(ValueError, match="kv_block 8 is not a multiple of 16"):
        module.attention(q, k, k, ints(0, 4), 1.0, schedule=Schedule(kv_block=8, kv_partition=64))
    cache = torch.zeros(module.kv_cache_shape(2, 16, 2, 8, schedule=SCHEDULE))
    with pytest.raises(ValueError, match="slot 32 lies outside 2 pages of 16"):
        module.write_kv(k, k, cache, torch.tensor([0, 32]))
    with pytest.raises(TypeError, match="int32, not int64"):
        module.write_kv(k, k, cache, ints(0, 1))
    assert int(bit_view(cache).count_nonzero()) == 0
