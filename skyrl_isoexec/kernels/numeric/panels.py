"""Panels: the layout of a weight that a compiled linear reads fastest, and its inverse.

A weight [N, K] becomes [ceil(N / 16), K, 16]: 16 neighbouring columns of the result lie together for every k, the last
panel filled up with zeros. Values are copied, never changed, so a product has the same bits with and without it.
"""

import torch
from torch import Tensor

PANEL = 16
"""Columns of a panel: two AVX2 registers, one of AVX-512."""


def packed_shape(num_n: int, num_k: int) -> tuple[int, int, int]:
    """Shape of the packed form of a weight [num_n, num_k]."""
    return -(-num_n // PANEL), num_k, PANEL


def pack(w_NK: Tensor, out: Tensor | None = None) -> Tensor:
    """The packed form of a weight, in its dtype; written into `out`, which keeps its address, where one is given.

    ValueError if `out` has another shape, dtype or is not contiguous, or if the weight is not two-dimensional.
    """
    if w_NK.dim() != 2:
        raise ValueError(f"pack: a weight of shape {tuple(w_NK.shape)} is not [N, K]")
    shape = packed_shape(*w_NK.shape)
    if out is None:
        out = torch.empty(shape, dtype=w_NK.dtype, device=w_NK.device)
    elif out.shape != shape or out.dtype != w_NK.dtype or not out.is_contiguous():
        raise ValueError(f"pack: out {tuple(out.shape)} {out.dtype} is not a contiguous {shape} {w_NK.dtype}")
    num_n, num_k = w_NK.shape
    whole, rest = divmod(num_n, PANEL)
    with torch.no_grad():
        out[:whole].copy_(w_NK[: whole * PANEL].view(whole, PANEL, num_k).transpose(1, 2))
        if rest:
            out[whole].zero_()
            out[whole, :, :rest].copy_(w_NK[whole * PANEL :].t())
    return out


def unpack(packed: Tensor, num_n: int) -> Tensor:
    """The weight [num_n, K] of a packed form."""
    return packed.transpose(1, 2).flatten(0, 1)[:num_n]
