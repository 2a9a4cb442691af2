"""Inputs that reach what is hard about a gated delta rule, for tests and gates of every form of it.

Shapes: T tokens, C channels, K key heads, V value heads, D their widths, W taps, R requests, P pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from skyrl_isoexec.kernels.numeric.gdn_checks import Operands
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.kernels.numeric.gdn_rows import NORM_EPS, convolve, prepare
from skyrl_isoexec.kernels.numeric.inputs import FINITE, normal, plant
from skyrl_isoexec.kernels.numeric.reference import exp

SLOW = -4.0
"""Bias of the decay's gate: states last for some fifty rows, so that a chunk sees those before it."""
SMALL = GdnHeads(num_key_heads=2, num_value_heads=4, key_width=8, value_width=12)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Packed sequences of one kind."""

    kind: str = "normal"
    """What is hard: see `KINDS`."""
    lengths: tuple[int, ...] = (1, 63, 0, 64, 65, 150)
    heads: GdnHeads = field(default=SMALL)
    conv_width: int = 4


KINDS = {
    "normal": "sequences that end inside a chunk, at its end, and after one row",
    "gates": "steps of size 0, subnormal and 1; decays of exactly 1 and of 0",
    "zeros": "rows of zeros of both signs, whose heads have no length",
    "hazards": "subnormal rows, and rows whose squares overflow",
    "nan": "a NaN that later rows of the sequence see and earlier ones do not",
}
"""Kind of a case, and what it reaches."""
A = (*(-120.0, -6.0, -3.0, -5.0) * 9, 80.0, 90.0)
"""In "gates", before the gate of the decay: softplus vanishes at -120; at 80 and 90 every other head forgets all."""
B = (-200.0, 0.5, -88.0, 30.0, 2.0)
"""In "gates", before the gate of the step: it is 0, usual, subnormal, 1, usual."""
FIRST_NAN = 70
"""Row of a sequence with a NaN in its first channel of queries, keys and values."""


def rows(case: Case, dtype: torch.dtype, seed: int = 0) -> tuple[Operands, Tensor]:
    """(x, a, b, conv, a_log, dt_bias) and cu_seqlens int32 of a case."""
    count, heads, num = sum(case.lengths), case.heads, case.heads.num_value_heads
    x, a, b = (normal(6 * seed + i, count, n) for i, n in enumerate((heads.channels, num, num)))
    conv = normal(6 * seed + 3, heads.channels, case.conv_width, scale=0.5)
    a_log, dt_bias = normal(6 * seed + 4, num, scale=0.5), normal(6 * seed + 5, num) + SLOW
    position = torch.cat([torch.arange(n) for n in case.lengths])
    if case.kind == "gates":
        turn = torch.arange(count)[:, None] + torch.arange(num)
        a, b = torch.tensor(A)[turn % len(A)], torch.tensor(B)[turn % len(B)]
        a_log, dt_bias = torch.where(torch.arange(num) % 2 == 0, 3.0, -6.0), torch.zeros(num)
    elif case.kind == "zeros":
        still = (position % 40 >= 20)[:, None]
        x = torch.where(still, torch.where(torch.arange(heads.channels) % 2 == 0, 0.0, -0.0), x)
    elif case.kind == "hazards":
        plant(x, FINITE, 0, 7)
    elif case.kind == "nan":
        for first in (0, heads.widths[0], 2 * heads.widths[0]):
            x[position == FIRST_NAN, first] = float("nan")
    elif case.kind != "normal":
        raise ValueError(f"gated delta rule: no case of kind {case.kind!r}; there are {sorted(KINDS)}")
    cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0).int()
    return tuple(t.to(dtype).contiguous() for t in (x, a, b, conv, a_log, dt_bias)), cu_seqlens


def reached(case: Case, given: Operands, chunk: int) -> dict[str, int]:
    """How often each hazard of the case's kind occurs in its inputs; where one does not, the case proves too little."""
    x, a, b, conv, a_log, dt_bias = given
    tiny = torch.finfo(torch.float32).tiny
    window = torch.cat([torch.zeros(case.conv_width - 1, case.heads.channels), x.float()])
    made = prepare(window, a, b, conv, a_log, dt_bias, case.heads)
    if case.kind == "normal":
        starts = torch.tensor([0, *case.lengths]).cumsum(0).tolist()
        whole = [lo + i for lo, n in zip(starts, case.lengths, strict=False) for i in range(0, n - chunk + 1, chunk)]
        return {
            "ends inside a chunk": sum(n % chunk != 0 for n in case.lengths),
            "ends of a chunk": sum(n > 0 and n % chunk == 0 for n in case.lengths),
            "chunks that keep a state": sum(int((made.g_nV[i : i + chunk].sum(0) > -5).sum()) for i in whole),
        }
    if case.kind == "gates":
        beta, g = made.beta_nV, made.g_nV
        return {
            "steps of 0": int((beta == 0).sum()),
            "subnormal steps": int(((beta > 0) & (beta < tiny)).sum()),
            "steps of 1": int((beta == 1).sum()),
            "decays of 1": int((g == 0).sum()),
            "decays of 0": int((exp(g) == 0).sum()),
        }
    if case.kind == "zeros":
        lengths = torch.cat([made.q_nKD, made.k_nKD], 1).square().sum(-1)
        negative = (x == 0) & x.signbit()
        return {"heads of no length": int((lengths == 0).sum()), "negative zeros": int(negative.sum())}
    if case.kind == "hazards":
        mixed = convolve(window, conv.float())
        keys = mixed[:, : case.heads.widths[0]].unflatten(1, (case.heads.num_key_heads, -1))
        return {
            "subnormals": int(((x != 0) & (x.abs() < tiny)).sum()),
            "squares that overflow": int((keys * keys).sum(-1).isinf().sum()),
            "negative zeros": int(((mixed == 0) & mixed.signbit()).sum()),
        }
    return {"NaN rows": int(x.isnan().any(1).sum())}


def exact(given: Operands, cu_seqlens: Tensor, heads: GdnHeads) -> Tensor:
    """o [T, V, D] in float64, differentiable: the plain recurrence, row by row."""
    x, a, b, conv, a_log, dt_bias = (t.double() for t in given)
    taps, group, outs = conv.shape[1], heads.group, []
    g, beta = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias), b.sigmoid()
    for lo, hi in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        window = torch.cat([x.new_zeros(taps - 1, heads.channels), x[lo:hi]])
        mixed = sum(window[i : i + hi - lo] * conv[:, i] for i in range(taps))
        q, k, v = (mixed * mixed.sigmoid()).split(heads.widths, dim=1)
        q, k = (t.unflatten(1, (heads.num_key_heads, -1)).repeat_interleave(group, 1) for t in (q, k))
        q, k = (t / (t.square().sum(-1, keepdim=True) + NORM_EPS).sqrt() for t in (q, k))
        v = v.unflatten(1, (heads.num_value_heads, -1))
        state = x.new_zeros(heads.num_value_heads, heads.key_width, heads.value_width)
        for t in range(hi - lo):
            state = state * g[lo + t].exp()[:, None, None]
            new = beta[lo + t][:, None] * (v[t] - torch.einsum("vk,vkd->vd", k[t], state))
            state = state + k[t][:, :, None] * new[:, None]
            outs.append(torch.einsum("vk,vkd->vd", q[t], state) * heads.key_width**-0.5)
    return torch.stack(outs)


def shards(given: Operands, heads: GdnHeads, size: int) -> list[tuple[Operands, GdnHeads]]:
    """What each of `size` ranks has: its key heads, and the value heads that use them."""
    x, a, b, conv, a_log, dt_bias = given
    mine = GdnHeads(
        num_key_heads=heads.num_key_heads // size,
        num_value_heads=heads.num_value_heads // size,
        key_width=heads.key_width,
        value_width=heads.value_width,
    )

    def channels(t: Tensor, dim: int) -> list[Tensor]:
        parts = [part.chunk(size, dim) for part in t.split(heads.widths, dim)]
        return [torch.cat(pieces, dim).contiguous() for pieces in zip(*parts, strict=True)]

    cut = [
        channels(x, 1),
        a.chunk(size, 1),
        b.chunk(size, 1),
        channels(conv, 0),
        a_log.chunk(size),
        dt_bias.chunk(size),
    ]
    return [(operands, mine) for operands in zip(*cut, strict=True)]


def pages(
    shapes: tuple, lengths: tuple[int, ...], page_size: int, *, spare: int = 3, strided: bool = False, seed: int = 0
) -> tuple[list[Tensor], Tensor]:
    """States of P shuffled pages, full of NaN, and block_table int32 [R, B]; its entries past a request name no page.

    With `strided` all states of a page lie together, as an engine allocates them, with a gap before the next page.
    """
    used = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(used) + spare, generator=torch.Generator().manual_seed(seed))
    table = torch.full((len(lengths), max(used, default=0)), -1, dtype=torch.int32)
    first = 0
    for r, count in enumerate(used):
        table[r, :count] = order[first : first + count].int()
        first += count
    num = len(order)
    if not strided:
        return [torch.full((num, *shape), float("nan"), dtype=dtype) for shape, dtype in shapes], table
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes]
    starts = [sum(-(-size // 16) * 16 for size in sizes[:i]) for i in range(len(sizes) + 1)]
    memory, states = torch.full((num, starts[-1] // 2 + 24), float("nan"), dtype=torch.bfloat16), []
    for (shape, dtype), start in zip(shapes, starts, strict=False):
        whole = memory.view(dtype)
        inner = torch.empty(shape, device="meta").stride()
        states.append(whole.as_strided((num, *shape), (whole.stride(0), *inner), start // dtype.itemsize))
    return states, table
