"""Inputs on which moving rows is proved: (y, experts, number of experts, weights, shared) by name; y is by slots."""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.inputs import hazards, normal, plant

Case = tuple[Tensor, Tensor, int, Tensor, Tensor]
TINY = (1e-45, 5.9e-39, 1e-40, 1.1754942e-38)
"""Weights that are subnormal: the smallest, the largest, in between."""


def chosen(seed: int, num_tokens: int, top_k: int, num_experts: int) -> Tensor:
    """int32 [T, K] different experts of each token, ascending."""
    scores = normal(seed, num_tokens, num_experts)
    return scores.argsort(dim=1)[:, :top_k].sort(dim=1).values.int()


def weighing(seed: int, num_tokens: int, top_k: int) -> Tensor:
    """fp32 [T, K] positive weights."""
    return normal(seed, num_tokens, top_k).abs() + 0.01


def cases(dtype: torch.dtype) -> dict[str, Case]:
    """Odd sizes, one expert, all experts, rows wider than a block, zeros of either sign, subnormals, no tokens."""
    sizes = {"one": (1, 1, 1, 1), "odd": (7, 3, 5, 33), "all": (5, 6, 6, 16), "wide": (3, 2, 17, 1030)}
    sizes |= {"many experts": (33, 8, 60, 20), "one at a time": (9, 1, 4, 17), "no tokens": (0, 2, 3, 8)}
    made: dict[str, Case] = {}
    for name, (t, k, e, h) in sizes.items():
        y, shared = normal(1, t * k, h, dtype=dtype), normal(2, t, h, dtype=dtype)
        made[name] = (y, chosen(3, t, k, e), e, weighing(4, t, k), shared)
    for name, finite in (("finite hazards", True), ("hazards", False)):
        y, shared = hazards(5, 27, 33, dtype=dtype, finite=finite), hazards(6, 9, 33, dtype=dtype, finite=finite)
        made[name] = (y, chosen(7, 9, 3, 8), 8, weighing(8, 9, 3), shared)
    zeros = torch.full((12, 20), -0.0, dtype=dtype)
    zeros[8:, ::3] = 0.0
    made["zeros"] = (zeros, chosen(9, 4, 3, 5), 5, weighing(10, 4, 3), torch.full((4, 20), -0.0, dtype=dtype))
    tiny = weighing(11, 20, 4)
    plant(tiny, TINY, 0, 3)
    y = normal(12, 80, 24, dtype=dtype, scale=8.0)
    made["subnormal weights"] = (y, chosen(13, 20, 4, 7), 7, tiny, normal(14, 20, 24, dtype=dtype, scale=1e-38))
    only = torch.tensor(TINY).repeat(5, 1)
    made["subnormal weights alone"] = (y[:20], chosen(15, 5, 4, 7), 7, only, torch.zeros(5, 24, dtype=dtype))
    return made
