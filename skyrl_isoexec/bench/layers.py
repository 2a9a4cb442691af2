"""Every operator beside the stock one, on shapes of real models: a table, and JSON with all numbers.

Notable: both arms run in this process, on the same operands, as replayed CUDA graphs; a row shows the medians, their
ratio, and the floor, the time that the bytes or operations of the problem need at the ceilings of the chip. An operator
whose gate is not valid for this source is refused by name and not timed: a price without its proof says nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from skyrl_isoexec.bench import cases, cases_experts, cases_latent
from skyrl_isoexec.bench.cases import Case
from skyrl_isoexec.bench.natives import Natives
from skyrl_isoexec.bench.timing import floor_ms, milliseconds
from skyrl_isoexec.gate.record import GateError, require

ROWS = (1, 16, 64, 128, 256, 512, 1024, 4096, 16384)
QUICK_ROWS = (1, 64, 256, 4096)
MODELS: dict[str, dict[str, Any]] = {
    "MiMo-7B": {"hidden": 4096, "heads": 32, "kv": 8, "dim": 128, "mlp": 11008, "vocab": 151_680},
    "Qwen3.5-9B": {"hidden": 4096, "heads": 16, "kv": 4, "dim": 256, "mlp": 12288, "vocab": 248_320},
    "Qwen3.5-35B-A3B": {
        "hidden": 2048, "heads": 16, "kv": 2, "dim": 256, "mlp": 512, "vocab": 248_320,
        "experts": 256, "top": 8, "width": 512, "scoring": "softmax",
    },
    "GLM-4.7-Flash": {
        "hidden": 2048, "heads": 20, "dim": 256, "latent": 512, "rope": 64, "nope": 192, "value": 256,
        "experts": 64, "top": 4, "width": 1536, "scoring": "sigmoid",
    },
}  # fmt: skip
"""Widths from the models' public configurations; rows that the first two have say nothing new of the last."""
DECODES = ((1, 2048), (1, 32768), (16, 2048), (16, 32768), (128, 2048), (128, 8192))
"""(sequences, context)."""
PREFILLS = ((4, 2048), (1, 8192), (1, 16384))
LAYER = ("combine", "experts", "router", "swiglu")
REGIONS = {
    "linear": ("linear",), "row_linear": ("row_linear",), "add_rmsnorm": ("rmsnorm",), "rope": ("rope",),
    "silu_mul": ("swiglu",), "token_logprobs": ("logprob",), "prefill": ("attention",), "decode": ("attention",),
    "experts": LAYER, "experts_batch": LAYER,
    "mla_decode": ("mla",), "mla_prefill": ("mla",), "mla_form": ("mla",), "head_linear": ("mla",),
}  # fmt: skip
"""Row of the table -> the gates that it needs."""


def work(model: dict, quick: bool, natives: Natives) -> Iterator[tuple[int, Iterator[Case]]]:
    """Generators of the cases of a model, with their number of rows; one that fails leaves the others."""
    if "latent" in model:
        for num, context in cases_latent.DECODES:
            yield num, cases_latent.decode(model, num, context, natives)
        for whole in (False, True):
            yield cases_latent.PREFILL, cases_latent.prefill(model, natives, whole=whole)
        for num_m in cases_latent.ROWS:
            yield num_m, cases_latent.products(model, num_m)
    if "experts" in model:
        for num_m in (*cases_experts.STEPS, *cases_experts.BATCHES):
            yield num_m, cases_experts.cases(model, num_m)
    if "latent" in model:
        return
    for num, length in PREFILLS[:2] if quick else PREFILLS:
        yield num * length, cases.prefill(model, num, length, natives)
    for num, context in DECODES[2:5:2] + DECODES[:1] if quick else DECODES:
        yield num, cases.decode(model, num, context, natives)
    for num_m in QUICK_ROWS if quick else ROWS:
        yield num_m, cases.rows(model, num_m, natives)
        yield num_m, cases.products(model, num_m)
        if num_m <= 4096:
            yield num_m, cases.logprobs(model, num_m)


def refusals() -> dict[str, str]:
    """{region: why} of every gate of sm90 that is not valid."""
    found = {}
    for region in dict.fromkeys(region for needed in REGIONS.values() for region in needed):
        try:
            require(region, "sm90")
        except GateError as error:
            found[region] = str(error)
    return found


def measure(case: Case, native: str, time_of: Callable[..., float]) -> dict[str, Any]:
    """One row. A stock arm that fails says why, and leaves ours its time."""
    with torch.no_grad():
        mine = time_of(case.ours, case.made)
        try:
            theirs, error = time_of(case.native, case.made), None
        except Exception as caught:
            theirs, error = None, repr(caught)[:300]
    found = {
        "op": case.op, "shape": case.shape, "native": native, "ours_ms": mine, "native_ms": theirs,
        "ratio": mine / theirs if theirs else None, "floor_ms": floor_ms(case.num_bytes, case.flops),
    }  # fmt: skip
    return found if error is None else found | {"native_error": error}


def shown(name: str, num_m: int, row: dict[str, Any]) -> str:
    """A line of the table."""
    theirs = f"{row['native_ms'] * 1e3:9.1f} ratio {row['ratio']:5.2f}" if row["native_ms"] else row["native_error"]
    return (
        f"{name:16} {row['op']:14} {row['shape']:12} M {num_m:6} ours {row['ours_ms'] * 1e3:9.1f} native {theirs}  "
        f"floor {row['floor_ms'] * 1e3:9.1f}"
    )


def run(arguments: argparse.Namespace, time_of: Callable[..., float] = milliseconds) -> int:
    """Times everything, prints a line for each, writes the JSON.

    2 without a GPU, for an unknown model, or if an operator was refused; 1 if one failed on either side or had no time.
    """
    quick = ["MiMo-7B", "Qwen3.5-35B-A3B", "GLM-4.7-Flash"]
    chosen = arguments.models or (quick if arguments.quick else list(MODELS))
    unknown = sorted(set(chosen) - MODELS.keys())
    if unknown or not torch.cuda.is_available():
        print(f"bench layers: unknown models {unknown}" if unknown else "bench layers: there is no CUDA device")
        return 2
    refused = refusals()
    for reason in refused.values():
        print(f"bench layers refuses: {reason}")
    natives, results, deadline = Natives(), [], time.monotonic() + arguments.seconds
    natives.names |= cases_experts.NAMES | cases_latent.NAMES
    natives.names |= {op: f"{natives.names['prefill']}, expanded" for op in ("mla_prefill", "mla_form")}
    device = torch.cuda.get_device_name(0)
    print(f"{device}, torch {torch.__version__}; medians of replayed graphs, microseconds")
    for name in chosen:
        for num_m, found in work(MODELS[name], arguments.quick, natives):
            if time.monotonic() > deadline:
                results.append({"model": name, "rows": num_m, "error": f"no time within {arguments.seconds:.0f} s"})
                continue
            try:
                for case in found:
                    if refused.keys() & set(REGIONS[case.op]):
                        continue
                    row = measure(case, natives.names[case.op], time_of)
                    results.append({"model": name, "rows": num_m, **row})
                    print(shown(name, num_m, row), flush=True)
            except Exception as error:  # one operator that fails leaves the others to be timed
                results.append({"model": name, "rows": num_m, "error": repr(error)})
                print(f"{name} rows {num_m}: {error!r}"[:300], flush=True)
    report = {
        "device": device, "torch": torch.__version__, "natives": natives.names, "refused": refused, "results": results,
    }  # fmt: skip
    arguments.out.write_text(json.dumps(report, indent=1))
    failed = [row for row in results if row.keys() & {"error", "native_error"}]
    if failed:
        print(f"bench layers: {len(failed)} of {len(results)} rows failed or had no time; {arguments.out} says which")
    return 2 if refused else int(bool(failed))
