"""What `bench layers` times of dense models: operands on shapes of real models, our operator and the stock one.

Shapes: M rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_isoexec.bench.natives import Natives
from skyrl_isoexec.bench.timing import copies
from skyrl_isoexec.kernels.attention import kernel as attention
from skyrl_isoexec.kernels.linear import kernel as linear
from skyrl_isoexec.kernels.logprob import kernel as logprob
from skyrl_isoexec.kernels.rmsnorm import kernel as rmsnorm
from skyrl_isoexec.kernels.rope import kernel as rope
from skyrl_isoexec.kernels.row_linear import kernel as row_linear
from skyrl_isoexec.kernels.swiglu import kernel as swiglu
from skyrl_isoexec.schedule import Schedule

SCHEDULE = Schedule(kv_block=64, kv_partition=512)
BF16, DEVICE, PAGE = torch.bfloat16, "cuda", 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    op: str
    shape: str
    made: list[tuple]
    """Copies of the operands of both arms."""
    ours: Callable
    native: Callable
    num_bytes: float
    flops: float


def normal(*shape: int) -> Tensor:
    """Of the model's dtype, on the GPU."""
    return torch.randn(shape, device=DEVICE).to(BF16)


def products(model: dict, num_m: int) -> Iterator[Case]:
    """Column-parallel and row-parallel linears of an attention and an MLP."""
    hidden, inner, width = model["hidden"], model["mlp"], model["heads"] * model["dim"]
    for op, n, k in (
        ("linear", width, hidden), ("linear", inner, hidden),
        ("row_linear", hidden, width), ("row_linear", hidden, inner),
    ):  # fmt: skip
        size = 2 * (n * k + num_m * k)
        yield Case(
            op=op,
            shape=f"{n}x{k}",
            made=copies(lambda n=n, k=k: (normal(num_m, k), normal(n, k)), size),
            ours=linear.linear if op == "linear" else (lambda x, w: row_linear.row_linear(x, w, 1, None, x.dtype)),
            native=lambda x, w: torch.mm(x, w.t()),
            num_bytes=2 * (n * k + num_m * (n + k)),
            flops=2 * n * k * num_m,
        )


def rows(model: dict, num_m: int, natives: Natives) -> Iterator[Case]:
    """What is done with every row: norm, rotation, SwiGLU."""
    hidden, inner, heads, dim = model["hidden"], model["mlp"], model["heads"], model["dim"]
    w, size = normal(hidden), num_m * hidden
    yield Case(
        op="add_rmsnorm",
        shape=str(hidden),
        made=copies(lambda: (normal(num_m, hidden), normal(num_m, hidden)), 4 * size),
        ours=lambda x, r: rmsnorm.add_rmsnorm(x, r, w, 1e-6),
        native=lambda x, r: natives.add_rmsnorm(x, r, w),
        num_bytes=8 * size,
        flops=0,
    )
    table, positions = torch.randn(16384, dim, device=DEVICE), torch.arange(num_m, device=DEVICE) % 16384
    rounded = table.to(BF16)
    yield Case(
        op="rope",
        shape=f"{heads}x{dim}",
        made=copies(lambda: (normal(num_m, heads, dim),), 2 * num_m * heads * dim),
        ours=lambda x: rope.rope(x, positions, table),
        native=lambda x: natives.rope(x, positions, rounded),
        num_bytes=4 * num_m * heads * dim,
        flops=0,
    )
    size, out = num_m * inner, normal(num_m, inner)

    def pair() -> tuple[Tensor, ...]:
        both = normal(num_m, 2 * inner)
        return (*(x.contiguous() for x in both.chunk(2, -1)), both)

    yield Case(
        op="silu_mul",
        shape=str(inner),
        made=copies(pair, 4 * size),
        ours=lambda g, u, _both: swiglu.silu_mul(g, u),
        native=lambda _g, _u, both: natives.silu_mul(both, out),
        num_bytes=6 * size,
        flops=0,
    )


def logprobs(model: dict, num_m: int) -> Iterator[Case]:
    """Log-probabilities of one token a row."""
    size = model["vocab"]
    ids = torch.randint(size, (num_m,), device=DEVICE)
    yield Case(
        op="token_logprobs",
        shape=str(size),
        made=copies(lambda: (torch.randn(num_m, size, device=DEVICE) * 4,), 4 * num_m * size),
        ours=lambda x: logprob.token_logprobs(x, ids),
        native=lambda x: x.log_softmax(1).gather(1, ids[:, None]),
        num_bytes=4 * num_m * size,
        flops=0,
    )


def prefill(model: dict, num: int, length: int, natives: Natives) -> Iterator[Case]:
    """Causal attention of `num` sequences from their start."""
    heads, kv, dim = model["heads"], model["kv"], model["dim"]
    bounds = torch.arange(0, (num + 1) * length, length, dtype=torch.int32, device=DEVICE)
    tokens, scale = num * length, dim**-0.5
    yield Case(
        op="prefill",
        shape=f"{num}x{length}",
        made=[(normal(tokens, heads, dim), normal(tokens, kv, dim), normal(tokens, kv, dim))],
        ours=lambda q, k, v: attention.attention(q, k, v, bounds, scale, schedule=SCHEDULE),
        native=lambda q, k, v: natives.prefill(q, k, v, bounds, length, scale),
        num_bytes=4 * tokens * (heads + kv) * dim,
        flops=2 * num * length * length * heads * dim,
    )


def decode(model: dict, num: int, context: int, natives: Natives) -> Iterator[Case]:
    """One step of `num` sequences over pages."""
    heads, kv, dim = model["heads"], model["kv"], model["dim"]
    table, starts, lengths = steps(num, context)
    scale, size = dim**-0.5, 4 * num * context * kv * dim
    plan = natives.plan((heads, kv), (dim, dim), PAGE, (table, starts, lengths))
    yield Case(
        op="decode",
        shape=f"{num}x{context}",
        made=copies(lambda: (normal(num, heads, dim), normal(table.numel(), 2, kv, dim, PAGE)), size),
        ours=lambda q, c: attention.attention_paged(q, c, table, starts, lengths, scale, schedule=SCHEDULE),
        native=lambda q, c: natives.decode(q, c, table, lengths, starts, scale, plan),
        num_bytes=size,
        flops=4 * num * context * heads * dim,
    )


def steps(num: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """(block table, starts of queries, lengths) of a decode step, in pages of `PAGE` positions."""
    table = torch.arange(num * context // PAGE, dtype=torch.int32, device=DEVICE).view(num, -1)
    starts = torch.arange(num + 1, dtype=torch.int32, device=DEVICE)
    return table, starts, torch.full((num,), context, dtype=torch.int32, device=DEVICE)
