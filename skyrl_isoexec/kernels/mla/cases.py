"""Inputs that reach what is hard about latent attention, for tests and gates; each can count that it did.

Shapes: T tokens, N query heads, L latent rank, Q = L + width of the rotated part, K and M input and output features of
a head, R requests, P pages of a request.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_isoexec.kernels.mla import spec
from skyrl_isoexec.kernels.mla.reference import scores
from skyrl_isoexec.kernels.numeric import exp
from skyrl_isoexec.kernels.numeric.inputs import hazards, normal
from skyrl_isoexec.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Case:
    """Packed sequences of one kind."""

    kind: str
    """What is hard: see `KINDS`."""
    lengths: tuple[int, ...] = (1, 47, 130, 0, 33)
    num_heads: int = 3
    latent: int = 16
    rotated: int = 4
    """Width of the part of a key that is no value."""

    @property
    def width(self) -> int:
        """Width of a key."""
        return self.latent + self.rotated

    @property
    def scale(self) -> float:
        """The usual factor on scores."""
        return self.width**-0.5


KINDS = {
    "normal": "rows that end inside a block and contexts that cross blocks",
    "tails": "probabilities that are subnormal, and some that vanish",
    "ties": "maxima that are attained more than once, in one block and in several",
    "zeros": "scores and values that are zeros of both signs",
    "minus_inf": "whole blocks of -inf scores, from the rotated part, before the first finite one",
    "nan": "a NaN in a rotated part, which some rows see and earlier ones do not",
    "nan_value": "a NaN in a latent, which is a value as well, that some rows see and earlier ones do not",
}
"""Kind of a case, and what it reaches."""
FINITE_VALUES = tuple(kind for kind in KINDS if kind != "nan_value")
"""Kinds for implementations that multiply the values of positions after a row by zero."""


def rows(case: Case, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, N, Q], c [T, Q], cu_seqlens int32 of a case."""
    num_tokens, latent, rotated = sum(case.lengths), case.latent, slice(case.latent, None)
    q = normal(2 * seed, num_tokens, case.num_heads, case.width, scale=2.0)
    c = normal(2 * seed + 1, num_tokens, case.width)
    cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0).int()
    position = torch.cat([torch.arange(n) for n in case.lengths])
    if case.kind == "tails":  # scores fall from 0 to about -115 and rise again, whatever the row
        fall = torch.rand(num_tokens, 1, generator=torch.Generator().manual_seed(seed)) * -115.0
        q = torch.cat((torch.zeros_like(q[..., :latent]), torch.ones_like(q[..., rotated])), 2)
        c = torch.cat((c[:, :latent], (fall / case.scale / case.rotated).expand(-1, case.rotated)), 1)
    elif case.kind == "ties":
        c = c[position % 3]
    elif case.kind == "zeros":
        q, c = q * 0.0, torch.where(position[:, None] % 2 == 0, -0.0, 0.0).expand_as(c) * 1.0
    elif case.kind == "minus_inf":
        q[:, :, latent] = q[:, :, latent].abs() + 1
        c[:, latent] = torch.where(position < 40, float("-inf"), c[:, latent])
    elif case.kind in ("nan", "nan_value"):
        c[position == 20, latent if case.kind == "nan" else 0] = float("nan")
    elif case.kind != "normal":
        raise ValueError(f"mla: no case of kind {case.kind!r}; there are {sorted(KINDS)}")
    return q.to(dtype), c.to(dtype), cu_seqlens


def reached(case: Case, q: Tensor, c: Tensor, cu_seqlens: Tensor, schedule: Schedule) -> int:
    """How often the case's kind occurs in its inputs; 0 means that the case proves nothing."""
    count, bounds = 0, cu_seqlens.tolist()
    for lo, hi in zip(bounds[:-1], bounds[1:], strict=True):
        s = scores(q[lo:hi].float(), c[lo:hi].float(), case.scale)
        seen = torch.ones(hi - lo, hi - lo, dtype=torch.bool).tril()[:, None].expand_as(s)
        s = torch.where(seen, s, float("-inf"))
        top = s.amax(-1, keepdim=True) if hi > lo else s
        p, values = exp(s - top), c[lo:hi, : case.latent]
        if case.kind == "normal":
            count += sum(t > schedule.kv_block and t % schedule.kv_block != 0 for t in range(1, hi - lo + 1))
        elif case.kind == "tails":
            count += int(((p > 0) & (p < torch.finfo(torch.float32).tiny)).sum())
        elif case.kind == "ties":
            count += int(((s == top).sum(-1) > 1).sum())
        elif case.kind == "zeros":
            count += int((values.signbit() & (values == 0)).sum())
        elif case.kind == "minus_inf":
            count += int((seen & (s == float("-inf"))).sum())
        elif values.isnan().any() == (case.kind == "nan_value"):
            count += int((seen & s.isnan()).sum())
    return count


def pages(c: Tensor, lengths: tuple[int, ...], page_size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """An empty cache for packed rows, in shuffled pages: cache full of NaN, block_table int32 [R, P], slots int64 [T].

    The table's entries past a request's last page name no page.
    """
    used = [spec.cdiv(n, page_size) for n in lengths]
    order = torch.randperm(sum(used) + 3, generator=torch.Generator().manual_seed(seed))
    cache = torch.full(spec.mla_cache_shape(len(order), page_size, c.shape[1]), float("nan"), dtype=c.dtype)
    table = torch.full((len(lengths), max(used, default=0)), -1, dtype=torch.int32)
    slots, first = [], 0
    for r, (length, count) in enumerate(zip(lengths, used, strict=True)):
        mine, position = order[first : first + count], torch.arange(length)
        table[r, :count] = mine.int()
        slots.append(mine[position // page_size] * page_size + position % page_size)
        first += count
    return cache, table, torch.cat(slots)


def heads(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """(x [T, N, K], w [N, M, K]) of a linear per head by name: odd sizes, a weight that lies transposed, no rows."""
    sizes = {"one": (1, 1, 1, 1), "odd": (7, 3, 33, 45), "tile+1": (5, 2, 17, 17), "deep": (3, 2, 20, 1037)}
    made = {
        name: (normal(1, t, n, k, dtype=dtype), normal(2, n, m, k, dtype=dtype)) for name, (t, n, m, k) in sizes.items()
    }
    made["transposed"] = (normal(3, 9, 5, 24, dtype=dtype), normal(4, 5, 24, 40, dtype=dtype).mT)
    both = normal(5, 3, 20, 16, dtype=dtype)  # rows of a key and of a value, as in `kv_b_proj`
    made["part of a weight"] = (normal(6, 4, 3, 40, dtype=dtype)[..., :16], both[:, 12:])
    for name, finite in (("finite hazards", True), ("hazards", False)):
        made[name] = (hazards(7, 9, 3, 70, dtype=dtype, finite=finite), hazards(8, 3, 21, 70, dtype=dtype))
    made["no rows"] = (normal(1, 0, 3, 24, dtype=dtype), normal(2, 3, 20, 24, dtype=dtype))
    return made
