"""Equality of bits. Float equality takes +0 for -0 and never takes NaN, so tensors are compared as integers."""

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_view(t: Tensor) -> Tensor:
    """The same memory as integers of the same width."""
    return t.detach().contiguous().view(_INTEGERS[t.element_size()])


def canonical(t: Tensor) -> Tensor:
    """A copy in which every NaN is the default quiet NaN: where a NaN stands is a promise, its payload is not."""
    return torch.where(t.isnan(), torch.full_like(t, float("nan")), t)


def count_mismatches(a: Tensor, b: Tensor) -> tuple[int, int]:
    """(elements whose bits differ, elements compared); ValueError for other shapes or dtypes or nothing to compare."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"cannot compare {tuple(a.shape)} {a.dtype} with {tuple(b.shape)} {b.dtype}")
    if a.numel() == 0:
        raise ValueError(f"comparing two empty tensors of shape {tuple(a.shape)} proves nothing")
    return int((bit_view(a) != bit_view(b)).sum()), a.numel()
