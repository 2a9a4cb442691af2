"""Work is spread over torch's threads in parts, and neither their number nor their order changes a bit."""

import os
import threading

import pytest
import torch
from skyrl_isoexec.kernels import witness
from skyrl_isoexec.kernels.numeric import product as products
from skyrl_isoexec.kernels.numeric.threads import everywhere, spread


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
