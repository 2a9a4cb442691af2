"""Work is spread over torch's threads in parts, and neither their number nor their order changes a bit."""

import os
import threading

import pytest
import torch

from skyrl_isoexec.kernels import witness
from skyrl_isoexec.kernels.attention import cpu as attention
from skyrl_isoexec.kernels.numeric import product as products
from skyrl_isoexec.kernels.numeric.threads import everywhere, spread
from skyrl_isoexec.schedule import Schedule

SCHEDULE = Schedule(kv_block=16, kv_partition=32)


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request: pytest.FixtureRequest) -> int:
    torch.set_num_threads(request.param)  # given back by the folder's fixture
    return request.param


@pytest.mark.parametrize(("count", "least"), [(0, 1), (1, 1), (7, 1), (7, 3), (100, 40), (5, 100), (8, 0)])
def test_parts_cover_the_whole_once(threads: int, count: int, least: int) -> None:
    parts = spread(count, least, lambda first, last: (first, last))
    assert [at for first, last in parts for at in range(first, last)] == list(range(count))
    assert len(parts) <= max(1, min(threads, count))
    assert len(parts) == 1 or all(last - first >= least for first, last in parts)


def test_parts_are_computed_at_the_same_time(threads: int) -> None:
    """Each waits for all others, so that one thread alone would never end."""
    met = threading.Barrier(threads, timeout=30)
    names = spread(threads, 1, lambda first, last: (met.wait(), threading.current_thread().name)[1])
    assert len(set(names)) == threads and names[0] == threading.current_thread().name


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_raised_when_all_have_ended(failing: int) -> None:
    torch.set_num_threads(2)
    release, ended = threading.Event(), []

    def work(first: int, last: int) -> None:
        if first == failing:
            release.set()
            raise ValueError(f"part {first}")
        release.wait(30)
        ended.append(first)

    with pytest.raises(ValueError, match=f"part {failing}"):
        spread(2, 1, work)
    assert ended == [1 - failing]


@pytest.mark.parametrize("leaves", [1, 4])
def test_bits_of_a_product(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, leaves: int, same_bits) -> None:
    """Also of transposed operands, with a bias, and where the last part is not a whole panel."""
    source, parts = torch.Generator().manual_seed(0), []
    real = products.spread
    monkeypatch.setattr(products, "spread", lambda *a: parts.append(real(*a)))
    monkeypatch.setattr(products, "WORTH", 1)
    x = torch.randn(33, 64, generator=source).to(dtype)
    w, bias = torch.randn(89, 64, generator=source).to(dtype), torch.randn(89, generator=source).to(dtype)
    operands = [(x, w), (x.t().contiguous().t(), w.t().contiguous().t())]
    found = []
    for number in (1, 2, 3, 5):
        torch.set_num_threads(number)
        for pair in operands:
            found.append(products.product(*pair, dtype, bias_N=bias, num_leaves=leaves))
            assert len(parts[-1]) == number
    assert len(found) == 8 and found[0].any()
    for other in found[1:]:
        same_bits(other, found[0])


def test_bits_of_attention(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, same_bits) -> None:
    """Packed rows with their gradients, and pages; three heads of keys and values in up to three parts."""
    source, parts, found = torch.Generator().manual_seed(0), [], []
    real = attention.spread
    monkeypatch.setattr(attention, "spread", lambda *a: parts.append(real(*a)) or parts[-1])
    monkeypatch.setattr(attention, "WORTH", 1)
    q, k, v, grad = (torch.randn(71, heads, 24, generator=source).to(dtype) for heads in (6, 3, 3, 6))
    bounds = torch.tensor([0, 40, 40, 71], dtype=torch.int32)
    cache = torch.zeros(attention.kv_cache_shape(8, 16, 3, 24, schedule=SCHEDULE), dtype=dtype)
    pages = torch.tensor([[1, 2, 3], [4, 5, 0]], dtype=torch.int32)
    slots = torch.cat([torch.arange(40) + 16, torch.arange(31) + 64])
    attention.write_kv(k, v, cache, slots)
    starts, lens = bounds[[0, 1, 3]], torch.tensor([40, 31], dtype=torch.int32)
    for number in (1, 2, 3, 5):
        torch.set_num_threads(number)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention.attention(*leaves, bounds, 0.2, schedule=SCHEDULE)
        out.backward(grad)
        paged = attention.attention_paged(q, cache, pages, starts, lens, 0.2, schedule=SCHEDULE)
        same_bits(paged, out.detach())
        found.append([out.detach(), *(x.grad for x in leaves)])
        assert [len(part) for part in parts[-3:]] == [min(number, 3)] * 3
    assert all(x.any() for x in found[0])
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            same_bits(a, b)


@pytest.mark.parametrize("number", [1, 3])
def test_a_bad_page_is_refused_by_every_part(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    torch.set_num_threads(number)
    monkeypatch.setattr(attention, "WORTH", 1)
    cache = torch.zeros(attention.kv_cache_shape(4, 16, 3, 24, schedule=SCHEDULE))
    q, out = torch.ones(2, 6, 24), torch.full((2, 6, 24), 7.0)
    starts, lens = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([1, 1], dtype=torch.int32)
    pages = torch.tensor([[1], [9]], dtype=torch.int32)
    with pytest.raises(ValueError, match="request 1: block_table names a page outside the cache"):
        attention.attention_paged(q, cache, pages, starts, lens, 0.2, out, schedule=SCHEDULE)
    assert (out == 7).all()


def test_a_forked_process_makes_its_own(threads: int) -> None:
    """An engine's worker may be a fork of a process that has computed."""
    assert len(spread(threads, 1, lambda first, last: first)) == threads
    child = os.fork()
    if child == 0:
        os._exit(0 if len(spread(threads, 1, lambda first, last: first)) == threads else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_each_thread_is_asked(threads: int) -> None:
    names = everywhere(lambda: threading.current_thread().name)
    assert len(set(names)) == threads and names[0] == threading.current_thread().name


def test_one_thread_that_flushes_is_found() -> None:
    torch.set_num_threads(2)
    assert not witness.numeric()["numeric.flush_subnormals"]
    try:
        spread(2, 1, lambda first, last: first and torch.set_flush_denormal(True))
        assert witness.numeric()["numeric.flush_subnormals"]
    finally:
        spread(2, 1, lambda first, last: torch.set_flush_denormal(False))
    assert not witness.numeric()["numeric.flush_subnormals"]
