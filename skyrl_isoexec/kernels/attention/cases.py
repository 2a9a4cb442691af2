"""Inputs that reach what is hard about attention, for tests and gates; each can count that it did.

Shapes: T tokens, N query heads, K key-value heads, D head dimension, R requests, P pages of a request.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_isoexec.kernels.attention import spec
from skyrl_isoexec.kernels.attention.reference import scores
from skyrl_isoexec.kernels.numeric import exp
from skyrl_isoexec.kernels.numeric.inputs import normal
from skyrl_isoexec.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Case:
    """Packed sequences of one kind."""

    kind: str
    """What is hard: see `KINDS`."""
    lengths: tuple[int, ...] = (1, 47, 130, 0, 33)
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16

    @property
    def scale(self) -> float:
        """The usual factor on scores."""
        return self.head_dim**-0.5


KINDS = {
    "normal": "rows that end inside a block and contexts that cross blocks",
    "tails": "probabilities that are subnormal, and some that vanish",
    "ties": "maxima that are attained more than once, in one block and in several",
    "zeros": "scores and values that are zeros of both signs",
    "minus_inf": "whole blocks of -inf scores before the first finite one",
    "nan": "a NaN key that some rows see and earlier ones do not",
}
"""Kind of a case, and what it reaches."""


def rows(case: Case, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [T, N, D], k and v [T, K, D], cu_seqlens int32 of a case."""
    random = torch.Generator().manual_seed(seed)
    num_tokens = sum(case.lengths)
    shapes = [(num_tokens, heads, case.head_dim) for heads in (case.num_heads, case.num_kv_heads, case.num_kv_heads)]
    q, k, v = (normal(3 * seed + i, *shape) for i, shape in enumerate(shapes))
    q = q * 2
    cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0).int()
    position = torch.cat([torch.arange(n) for n in case.lengths])
    if case.kind == "tails":  # scores fall from 0 to about -115 and rise again, whatever the row
        fall = torch.rand(num_tokens, 1, 1, generator=random) * -115.0
        q, k = torch.ones_like(q), (fall / case.scale / case.head_dim).expand_as(k) * 1.0
    elif case.kind == "ties":
        k = k[position % 3]
    elif case.kind == "zeros":
        q, v = q * 0.0, torch.where(position[:, None, None] % 2 == 0, -0.0, 0.0).expand_as(v) * 1.0
    elif case.kind == "minus_inf":
        q[:, :, 0], k[:, :, 0] = q[:, :, 0].abs() + 1, torch.where(position[:, None] < 40, float("-inf"), k[:, :, 0])
    elif case.kind == "nan":
        k[position == 20] = float("nan")
    elif case.kind != "normal":
        raise ValueError(f"attention: no case of kind {case.kind!r}; there are {sorted(KINDS)}")
    return q.to(dtype), k.to(dtype), v.to(dtype), cu_seqlens


def reached(case: Case, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, schedule: Schedule) -> int:
    """How often the case's kind occurs in its inputs; 0 means that the case proves nothing."""
    group, count = case.num_heads // case.num_kv_heads, 0
    bounds = cu_seqlens.tolist()
    for lo, hi in zip(bounds[:-1], bounds[1:], strict=True):
        keys = k[lo:hi].float().repeat_interleave(group, 1)
        s = scores(q[lo:hi].float(), keys, case.scale)
        seen = torch.ones(hi - lo, hi - lo, dtype=torch.bool).tril()[:, None].expand_as(s)
        s = torch.where(seen, s, float("-inf"))
        top = s.amax(-1, keepdim=True) if hi > lo else s
        p = exp(s - top)
        if case.kind == "normal":
            count += sum(t > schedule.kv_block and t % schedule.kv_block != 0 for t in range(1, hi - lo + 1))
        elif case.kind == "tails":
            count += int(((p > 0) & (p < torch.finfo(torch.float32).tiny)).sum())
        elif case.kind == "ties":
            count += int(((s == top).sum(-1) > 1).sum())
        elif case.kind == "zeros":
            count += int((v[lo:hi].signbit() & (v[lo:hi] == 0)).sum())
        elif case.kind == "minus_inf":
            count += int((seen & (s == float("-inf"))).sum())
        else:
            count += int((seen & s.isnan()).sum())
    return count


def pages(
    k: Tensor, lengths: tuple[int, ...], page_size: int, schedule: Schedule, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """An empty cache for packed rows, in shuffled pages: cache full of NaN, block_table int32 [R, P], slots int64 [T].

    The table's entries past a request's last page name no page.
    """
    used = [spec.cdiv(n, page_size) for n in lengths]
    order = torch.randperm(sum(used) + 3, generator=torch.Generator().manual_seed(seed))
    shape = spec.kv_cache_shape(len(order), page_size, k.shape[1], k.shape[2], schedule=schedule)
    cache = torch.full(shape, float("nan"), dtype=k.dtype)
    table = torch.full((len(lengths), max(used, default=0)), -1, dtype=torch.int32)
    slots, first = [], 0
    for r, (length, count) in enumerate(zip(lengths, used, strict=True)):
        mine, position = order[first : first + count], torch.arange(length)
        table[r, :count] = mine.int()
        slots.append(mine[position // page_size] * page_size + position % page_size)
        first += count
    return cache, table, torch.cat(slots)
