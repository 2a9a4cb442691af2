"""A digest of a tensor that is worked out where the tensor lies, so that gigabytes of weights need not leave a GPU.

Notable: each eight bytes are mixed with their place, by multiplications and shifts that lose nothing, and added modulo
2**64, twice with other constants; the two sums and the number of bytes are hashed. A tensor that differs in eight bytes
alone never has the same sums; one that differs in more has them once in 2**128, if the sums are as good as random. That
finds what went wrong, not who forged it. What must stay equal: the sums, whatever the device, the piece size and the
order of addition. The mixing is that of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA
2014).
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

PIECE, GPU_PIECE = 1 << 14, 1 << 25
"""Groups of eight bytes that are mixed at once, in a processor's cache, or to bound the memory that it takes."""
STEPS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
"""What a place is multiplied by, for each of the two sums: odd."""
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def sums_here(words: np.ndarray, piece: int = PIECE) -> list[int]:
    """The two sums of uint64 [N], in [0, 2**64)."""
    sums = [0, 0]
    for start in range(0, len(words), piece):
        part = words[start : start + piece]
        places = np.arange(start + 1, start + 1 + len(part), dtype=np.uint64)
        for lane, step in enumerate(STEPS):
            x = places * np.uint64(step)
            x += part
            for shift, factor in zip(SHIFTS, (*FACTORS, 1), strict=True):
                x ^= x >> np.uint64(shift)
                x *= np.uint64(factor)
            sums[lane] += int(x.sum(dtype=np.uint64))
    return [total % (1 << 64) for total in sums]


def sums_there(words: Tensor, piece: int = GPU_PIECE) -> list[int]:
    """As `sums_here`, of int64 [N] on any device; shifts are made to leave out the sign."""
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), piece):
        part = words[start : start + piece]
        places = torch.arange(start + 1, start + 1 + part.numel(), device=words.device)
        for lane, step in enumerate(STEPS):
            x = places * _signed(step) + part
            for shift, factor in zip(SHIFTS, (*FACTORS, 1), strict=True):
                x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
            sums[lane] += x.sum()
    return [total % (1 << 64) for total in sums.tolist()]


@torch.no_grad()
def tensor_digest(tensor: Tensor) -> str:
    """64 hex digits for the bytes of a tensor in the order of its elements, the same on every device."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    size = data.numel()
    if size % 8 or data.storage_offset() % 8:
        data = torch.cat((data, data.new_zeros(-size % 8)))
    words = data.view(torch.int64)
    sums = sums_there(words) if words.is_cuda else sums_here(words.numpy().view(np.uint64))
    return hashlib.sha256(f"{size} {sums[0]} {sums[1]}".encode()).hexdigest()
