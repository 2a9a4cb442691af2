"""Inputs for gates and tests: reproducible numbers, and the values at which arithmetic is easily wrong.

What must stay equal: every machine makes the same bits. So numbers come from integers of the generator by one product;
torch's own normal numbers go through vectorised logarithms, which differ between processors.
"""

import torch
from torch import Tensor

FINITE = (0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, -5.9e-39, 1.0, -1.0, 3.0e19, -3.0e19, 1.0e-20, -1.0e-20)
"""Both zeros, subnormals (smallest, largest, in between), ones, values whose squares overflow or are subnormal."""
NOT_FINITE = (float("inf"), float("-inf"), float("nan"))


DEVIATION = 37837.0
"""Standard deviation, rounded, of a sum of four evenly distributed 16-bit integers."""


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Nearly normal numbers of a standard deviation, at most 3.5 of them from 0, the same on every call."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)
    total = bits.view(-1).view(torch.int16).view(-1, 4).sum(1).view(shape)
    return (total.double() * (scale / DEVIATION)).to(dtype)


def plant(x: Tensor, values: tuple[float, ...], first: int, every: int) -> None:
    """Write `values` in turn to the elements first, first + every, ... of a contiguous x."""
    places = x.view(-1)[first::every]
    places.copy_(torch.tensor(values).repeat(-(-places.numel() // len(values)))[: places.numel()])


def hazards(seed: int, *shape: int, dtype: torch.dtype = torch.float32, finite: bool = True) -> Tensor:
    """Normal numbers with every value of `FINITE` among them, and unless finite of `NOT_FINITE` as well.

    ValueError if the shape is too small to hold them.
    """
    x = normal(seed, *shape, dtype=dtype)
    if x.numel() < 7 * len(FINITE) or (not finite and x.numel() < 41 * len(NOT_FINITE)):
        raise ValueError(f"hazards: a tensor of shape {shape} is too small to hold every value")
    plant(x, FINITE, 0, 7)
    if not finite:
        plant(x, NOT_FINITE, 40, 41)
    return x


def count_hazards(x: Tensor) -> dict[str, int]:
    """How often each kind of value that arithmetic easily gets wrong is in x; kinds that are absent are left out."""
    counts = {
        "+0": (x == 0) & ~x.signbit(),
        "-0": (x == 0) & x.signbit(),
        "subnormal": (x != 0) & (x.abs() < torch.finfo(torch.float32).tiny),
        "inf": x.isinf(),
        "NaN": x.isnan(),
    }
    return {name: int(mask.sum()) for name, mask in counts.items() if mask.any()}


def ties_at_the_cut(choice_TE: Tensor, experts_TK: Tensor) -> int:
    """Rows in which an expert that is not chosen has the value of one that is."""
    chosen = torch.zeros_like(choice_TE, dtype=torch.bool).scatter_(1, experts_TK.long(), True)
    lowest = choice_TE.masked_fill(~chosen, float("inf")).amin(1, keepdim=True)
    return int(((choice_TE == lowest) & ~chosen).any(1).sum())
