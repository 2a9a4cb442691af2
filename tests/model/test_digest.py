"""The digest of a tensor: what it is; pieces and places in memory do not matter, and each changed bit does."""

import hashlib

import pytest
import torch

from skyrl_isoexec.model import digest
from skyrl_isoexec.model.digest import tensor_digest

MASK = (1 << 64) - 1


def written_out(data: bytes) -> str:
    """The digest of some bytes, in integers of Python."""
    sums = [0, 0]
    padded = data + bytes(-len(data) % 8)
    for place in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * place : 8 * place + 8], "little")
        for lane, step in enumerate((0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)):
            x = (word + (place + 1) * step) & MASK
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
            sums[lane] = (sums[lane] + (x ^ (x >> 31))) & MASK
    return hashlib.sha256(f"{len(data)} {sums[0]} {sums[1]}".encode()).hexdigest()


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 1001])
def test_it_is_what_it_says(size: int) -> None:
    data = random_bytes(size)
    assert tensor_digest(data) == written_out(data.numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_the_order_of_elements_counts_and_not_where_they_lie(dtype: torch.dtype) -> None:
    """Transposed, at an odd offset, of no dimension."""
    x = (torch.arange(77) % 5).to(dtype).view(7, 11)
    plain = tensor_digest(x)
    assert (
        plain
        == tensor_digest(torch.cat((x.flatten()[:1], x.flatten()))[1:].view(7, 11))
        == tensor_digest(x.t().clone().t())
    )
    assert plain != tensor_digest(x.t().contiguous())
    assert tensor_digest(x[2, 3]) == tensor_digest(x[2, 3:4])


def test_pieces_and_devices_change_nothing() -> None:
    """The sums of a GPU are the same expressions on another type."""
    words = random_bytes(4096).view(torch.int64)
    whole = digest.sums_here(words.numpy().view("uint64"))
    for size in (1, 3, 511, 512, 1 << 20):
        assert digest.sums_here(words.numpy().view("uint64"), size) == whole
        assert digest.sums_there(words, size) == whole


def test_every_bit_and_every_exchange_is_seen() -> None:
    """Of 512 bits, and of 28 pairs of equal-sized groups; also bytes of zeros that are added."""
    data = random_bytes(64)
    found = {tensor_digest(data)}
    for bit in range(512):
        changed = data.clone()
        changed[bit // 8] ^= 1 << bit % 8
        found.add(tensor_digest(changed))
    assert len(found) == 513
    words = data.view(torch.int64)
    for first in range(8):
        for second in range(first):
            swapped = words.clone()
            swapped[first], swapped[second] = words[second], words[first]
            found.add(tensor_digest(swapped))
    assert len(found) == 513 + 28
    assert len({tensor_digest(torch.zeros(size, dtype=torch.uint8)) for size in range(20)}) == 20
