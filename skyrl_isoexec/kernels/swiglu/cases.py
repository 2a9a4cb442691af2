"""Inputs on which the products are proved: (gate, up) and (x, gate) by name."""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.inputs import hazards, normal


def cases(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Odd sizes, gates whose sigmoid is subnormal, 0 or 1, hazard values, three dimensions, no rows."""
    made = {f"{m} by {n}": (normal(1, m, n, dtype=dtype), normal(2, m, n, dtype=dtype)) for m, n in ((1, 1), (7, 33))}
    made["wide"] = (normal(3, 20, 100, dtype=dtype, scale=40.0), normal(4, 20, 100, dtype=dtype))
    tails = torch.linspace(-110.0, 110.0, 881).to(dtype)[None]
    made["tails"] = (tails, torch.full_like(tails, 1e-3))
    for name, finite in (("finite hazards", True), ("hazards", False)):
        made[name] = (hazards(5, 9, 70, dtype=dtype, finite=finite), hazards(6, 9, 70, dtype=dtype))
        made[f"{name} with others"] = (made[name][0], made[name][1].flip(1))
    made["stacked"] = (normal(7, 2, 3, 5, dtype=dtype), normal(8, 2, 3, 5, dtype=dtype))
    made["no rows"] = (normal(1, 0, 24, dtype=dtype), normal(2, 0, 24, dtype=dtype))
    return made


def sigmoid_cases(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Gates of each element and of each token, whose sigmoid is subnormal, 0 or 1; hazards; one feature; no rows."""
    made = {}
    for kind, width in (("elements", None), ("tokens", 1)):
        for m, n in ((1, 1), (7, 33), (3, 1100)):
            made[f"{kind}, {m} by {n}"] = normal(1, m, n, dtype=dtype), normal(2, m, width or n, dtype=dtype, scale=4.0)
        for name, finite in (("finite hazards", True), ("hazards", False)):
            gate = hazards(6, 130, width or 70, dtype=dtype, finite=finite)
            made[f"{kind}, {name}"] = hazards(5, 130, 70, dtype=dtype, finite=finite), gate.flip(0)
        made[f"{kind}, stacked"] = normal(7, 2, 3, 5, dtype=dtype), normal(8, 2, 3, width or 5, dtype=dtype)
        made[f"{kind}, no rows"] = normal(1, 0, 24, dtype=dtype), normal(2, 0, width or 24, dtype=dtype)
    tails = torch.linspace(-110.0, 110.0, 881).to(dtype)
    made["elements, tails"] = torch.full_like(tails, 3.0)[None], tails[None]
    made["tokens, tails"] = torch.full((881, 5), -3.0, dtype=dtype), tails[:, None]
    return made
