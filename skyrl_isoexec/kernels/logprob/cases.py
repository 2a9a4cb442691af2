"""Rows of logits that reach what is hard about log-probabilities, for tests and gates; each can count that it did.

Shapes: T rows (tokens), V vocabulary.
"""

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric import exp
from skyrl_isoexec.kernels.numeric.inputs import normal

KINDS = {
    "normal": "logits of usual size",
    "tails": "probabilities that are subnormal, and some that vanish",
    "ties": "maxima that are attained more than once",
    "zeros": "maxima that are zeros of both signs",
    "minus_inf": "rows that are mostly -inf",
    "refused": "rows without a distribution: a NaN, a +inf, or only -inf",
}
"""Kind of a case, and what it reaches."""


def rows(kind: str, num_rows: int, size: int, seed: int = 0) -> Tensor:
    """fp32 logits [T, V] of a kind."""
    random = torch.Generator().manual_seed(seed)
    logits = normal(seed, num_rows, size, scale=4.0)
    index = torch.arange(num_rows)
    if kind == "tails":
        logits = torch.rand(num_rows, size, generator=random) * -115.0
        logits[:, -1] = 0.0
    elif kind == "ties":
        logits = logits.round().clamp(max=3.0)
        logits[:, 0] = logits[:, -1] = 3.0
    elif kind == "zeros":
        logits = -logits.abs()
        logits[:, 0], logits[:, -1] = 0.0, -0.0
        logits[::2] = torch.where(logits[::2] == 0, -0.0, logits[::2])
    elif kind == "minus_inf":
        logits[:, 1:][torch.rand(num_rows, size - 1, generator=random) < 0.9] = float("-inf")
    elif kind == "refused":
        logits[index % 3 == 0, size // 2] = float("nan")
        logits[index % 3 == 1, 0] = float("inf")
        logits[index % 3 == 2] = float("-inf")
    elif kind != "normal":
        raise ValueError(f"logprob: no case of kind {kind!r}; there are {sorted(KINDS)}")
    return logits


def reached(kind: str, logits_TV: Tensor) -> int:
    """How often the kind occurs in the logits; 0 means that the case proves nothing."""
    top = logits_TV.amax(1, keepdim=True)
    p = exp(logits_TV - top)
    counts = {
        "normal": logits_TV.numel(),
        "tails": int(((p > 0) & (p < torch.finfo(torch.float32).tiny)).sum()),
        "ties": int(((logits_TV == top).sum(1) > 1).sum()),
        "zeros": int(((logits_TV == top) & (logits_TV == 0) & logits_TV.signbit()).sum()),
        "minus_inf": int((logits_TV == float("-inf")).sum()),
        "refused": int((~top.isfinite()).sum()),
    }
    return counts[kind]
