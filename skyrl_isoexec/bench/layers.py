"""Every operator beside the stock one, on shapes of real models: a table, and JSON with all numbers.

Notable: both arms run in this process, on the same operands, as replayed CUDA graphs; a row shows the medians, their
ratio, and the floor, the time that the bytes or operations of the problem need at the ceilings of the chip. An operator
whose gate is not valid for this source is refused by name and not timed: a price without its proof says nothing.
"""

import argparse
import json
import time

import torch

from skyrl_isoexec.bench.natives import Natives
from skyrl_isoexec.bench.timing import copies, floor_ms, milliseconds
from skyrl_isoexec.gate.record import GateError, require
from skyrl_isoexec.kernels.attention import kernel as attention
from skyrl_isoexec.kernels.linear import kernel as linear
from skyrl_isoexec.kernels.logprob import kernel as logprob
from skyrl_isoexec.kernels.rmsnorm import kernel as rmsnorm
from skyrl_isoexec.kernels.rope import kernel as rope
from skyrl_isoexec.kernels.row_linear import kernel as row_linear
from skyrl_isoexec.kernels.swiglu import kernel as swiglu
from skyrl_isoexec.schedule import Schedule

ROWS = (1, 16, 64, 128, 256, 512, 1024, 4096, 16384)
QUICK_ROWS = (1, 64, 256, 4096)
MODELS = {
    "MiMo-7B": {"hidden": 4096, "heads": 32, "kv": 8, "dim": 128, "mlp": 11008, "vocab": 151_680},
    "Qwen3.5-9B": {"hidden": 4096, "heads": 16, "kv": 4, "dim": 256, "mlp": 12288, "vocab": 248_320},
    "Qwen3.5-35B-A3B": {"hidden": 2048, "heads": 16, "kv": 2, "dim": 256, "mlp": 512, "vocab": 248_320},
}
"""Widths from the models' public configurations."""
DECODES = ((1, 2048), (1, 32768), (16, 2048), (16, 32768), (128, 2048), (128, 8192))
"""(sequences, context)."""
PREFILLS = ((4, 2048), (1, 8192), (1, 16384))
SCHEDULE = Schedule(kv_block=64, kv_partition=512)
BF16 = torch.bfloat16
REGION = {
    "linear": "linear", "row_linear": "row_linear", "add_rmsnorm": "rmsnorm", "rope": "rope", "silu_mul": "swiglu",
    "token_logprobs": "logprob", "prefill": "attention", "decode": "attention",
}  # fmt: skip
"""Row of the table -> the gate that it needs."""


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(BF16)


def _products(model: dict, num_m: int, natives: Natives):
    hidden, inner, width = model["hidden"], model["mlp"], model["heads"] * model["dim"]
    for op, n, k in (
        ("linear", width, hidden), ("linear", inner, hidden),
        ("row_linear", hidden, width), ("row_linear", hidden, inner),
    ):  # fmt: skip
        made = copies(lambda n=n, k=k: (_normal(num_m, k), _normal(n, k)), 2 * (n * k + num_m * k))
        ours = linear.linear if op == "linear" else (lambda x, w: row_linear.row_linear(x, w, 1, None, x.dtype))
        yield (
            op,
            f"{n}x{k}",
            made,
            ours,
            lambda x, w: torch.mm(x, w.t()),
            2 * (n * k + num_m * (n + k)),
            2 * n * k * num_m,
        )


def _rows(model: dict, num_m: int, natives: Natives):
    hidden, inner, heads, dim = model["hidden"], model["mlp"], model["heads"], model["dim"]
    w, size = _normal(hidden), num_m * hidden
    made = copies(lambda: (_normal(num_m, hidden), _normal(num_m, hidden)), 4 * size)
    yield ("add_rmsnorm", str(hidden), made, lambda x, r: rmsnorm.add_rmsnorm(x, r, w, 1e-6),
           lambda x, r: natives.add_rmsnorm(x, r, w), 8 * size, 0)  # fmt: skip
    table, positions = torch.randn(16384, dim, device="cuda"), torch.arange(num_m, device="cuda") % 16384
    made = copies(lambda: (_normal(num_m, heads, dim),), 2 * num_m * heads * dim)
    yield ("rope", f"{heads}x{dim}", made, lambda x: rope.rope(x, positions, table),
           lambda x: natives.rope(x, positions, table), 4 * num_m * heads * dim, 0)  # fmt: skip
    size, out = num_m * inner, _normal(num_m, inner)

    def pair():
        both = _normal(num_m, 2 * inner)
        return (*(x.contiguous() for x in both.chunk(2, -1)), both)

    made = copies(pair, 4 * size)
    yield ("silu_mul", str(inner), made, lambda g, u, _both: swiglu.silu_mul(g, u),
           lambda _g, _u, both: natives.silu_mul(both, out), 6 * size, 0)  # fmt: skip


def _logprobs(model: dict, num_m: int):
    size = model["vocab"]
    ids = torch.randint(size, (num_m,), device="cuda")
    made = copies(lambda: (torch.randn(num_m, size, device="cuda") * 4,), 4 * num_m * size)
    yield ("token_logprobs", str(size), made, lambda x: logprob.token_logprobs(x, ids),
           lambda x: x.log_softmax(1).gather(1, ids[:, None]), 4 * num_m * size, 0)  # fmt: skip


def _prefill(model: dict, num: int, length: int, natives: Natives):
    heads, kv, dim = model["heads"], model["kv"], model["dim"]
    bounds = torch.arange(0, (num + 1) * length, length, dtype=torch.int32, device="cuda")
    tokens, scale = num * length, dim**-0.5
    made = [(_normal(tokens, heads, dim), _normal(tokens, kv, dim), _normal(tokens, kv, dim))]
    yield ("prefill", f"{num}x{length}", made,
           lambda q, k, v: attention.attention(q, k, v, bounds, scale, schedule=SCHEDULE),
           lambda q, k, v: natives.prefill(q, k, v, bounds, length, scale),
           4 * tokens * (heads + kv) * dim, 2 * num * length * length * heads * dim)  # fmt: skip


def _decode(model: dict, num: int, context: int, natives: Natives):
    heads, kv, dim, page = model["heads"], model["kv"], model["dim"], 64
    pages, scale = num * context // page, dim**-0.5
    table = torch.arange(pages, dtype=torch.int32, device="cuda").view(num, -1)
    starts = torch.arange(num + 1, dtype=torch.int32, device="cuda")
    lengths = torch.full((num,), context, dtype=torch.int32, device="cuda")
    num_bytes = 4 * num * context * kv * dim
    made = copies(lambda: (_normal(num, heads, dim), _normal(pages, 2, kv, dim, page)), num_bytes)
    yield ("decode", f"{num}x{context}", made,
           lambda q, c: attention.attention_paged(q, c, table, starts, lengths, scale, schedule=SCHEDULE),
           lambda q, c: natives.decode(q, c, table, lengths, starts, scale), num_bytes,
           4 * num * context * heads * dim)  # fmt: skip


def _work(model: dict, quick: bool, natives: Natives):
    """Generators of the cases of a model, with their number of rows."""
    for num, length in PREFILLS[:2] if quick else PREFILLS:
        yield num * length, _prefill(model, num, length, natives)
    for num, context in DECODES[2:5:2] + DECODES[:1] if quick else DECODES:
        yield num, _decode(model, num, context, natives)
    for num_m in QUICK_ROWS if quick else ROWS:
        yield num_m, _rows(model, num_m, natives)
        yield num_m, _products(model, num_m, natives)
        if num_m <= 4096:
            yield num_m, _logprobs(model, num_m)


def refusals() -> dict[str, str]:
    """{region: why} of every gate of sm90 that is not valid."""
    found = {}
    for region in dict.fromkeys(REGION.values()):
        try:
            require(region, "sm90")
        except GateError as error:
            found[region] = str(error)
    return found


def run(arguments: argparse.Namespace) -> int:
    """Times everything, prints a line for each, writes the JSON; 2 without a GPU, for an unknown model, or refused."""
    chosen = arguments.models or (["MiMo-7B", "Qwen3.5-35B-A3B"] if arguments.quick else list(MODELS))
    unknown = sorted(set(chosen) - MODELS.keys())
    if unknown or not torch.cuda.is_available():
        print(f"bench layers: unknown models {unknown}" if unknown else "bench layers: there is no CUDA device")
        return 2
    refused = refusals()
    for reason in refused.values():
        print(f"bench layers refuses: {reason}")
    natives, results, deadline = Natives(), [], time.monotonic() + arguments.seconds
    device = torch.cuda.get_device_name(0)
    print(f"{device}, torch {torch.__version__}; medians of replayed graphs, microseconds")
    for name in chosen:
        for num_m, cases in _work(MODELS[name], arguments.quick, natives):
            if time.monotonic() > deadline:
                continue
            try:
                for op, shape, made, ours, native, num_bytes, flops in cases:
                    if REGION[op] in refused:
                        continue
                    with torch.no_grad():
                        mine, theirs = milliseconds(ours, made), milliseconds(native, made)
                    floor = floor_ms(num_bytes, flops)
                    results.append({
                        "model": name, "op": op, "rows": num_m, "shape": shape, "native": natives.names[op],
                        "ours_ms": mine, "native_ms": theirs, "ratio": mine / theirs, "floor_ms": floor,
                    })  # fmt: skip
                    print(f"{name:16} {op:14} {shape:12} M {num_m:6} ours {mine * 1e3:9.1f} native {theirs * 1e3:9.1f} "
                          f"ratio {mine / theirs:5.2f}  floor {floor * 1e3:9.1f}", flush=True)  # fmt: skip
            except torch.cuda.OutOfMemoryError as error:
                print(f"{name} rows {num_m}: {error}"[:120])
            except Exception as error:  # one operator that fails leaves the others to be timed
                results.append({"model": name, "rows": num_m, "error": repr(error)})
                print(f"{name} rows {num_m}: {error!r}"[:300], flush=True)
    report = {
        "device": device, "torch": torch.__version__, "natives": natives.names, "refused": refused, "results": results,
    }  # fmt: skip
    arguments.out.write_text(json.dumps(report, indent=1))
    return 2 if refused else 0
