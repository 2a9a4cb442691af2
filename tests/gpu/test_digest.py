"""The digest that proves a weight sync is the same for the same bytes on the device and on the host."""

import pytest
import torch

from skyrl_isoexec.model.digest import sums_here, sums_there, tensor_digest

SIZES = ((0,), (1,), (3, 5), (8,), (1000, 77), (4096, 1024))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_a_device_and_a_host_agree(size, dtype):
    count = torch.Size(size).numel() * dtype.itemsize
    data = torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    x = data.view(dtype).view(size)
    assert tensor_digest(x.cuda()) == tensor_digest(x)


def test_views_and_pieces():
    """Rows of a larger tensor, a transposed one, and more pieces than one."""
    x = torch.randn(301, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = x.cuda()
    whole = tensor_digest(y)
    assert whole == tensor_digest(x)
    assert tensor_digest(y[7:]) == tensor_digest(x[7:].clone()) != whole
    assert tensor_digest(y.t()) == tensor_digest(x.t().contiguous()) != whole
    words = y.flatten().view(torch.int64)
    assert sums_there(words, 1000) == sums_there(words) == sums_here(words.cpu().numpy().view("uint64"))


def test_one_bit_and_one_swap_are_seen():
    x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    whole = tensor_digest(x)
    flipped, swapped = x.clone(), x.clone()
    flipped.view(torch.int16)[-1, -1] ^= 1
    swapped[[5, 9]] = x[[9, 5]]
    assert len({whole, tensor_digest(flipped), tensor_digest(swapped)}) == 3
