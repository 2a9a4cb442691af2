#!/usr/bin/env python3
"""Prove that tiles of a product give the same bits on this GPU, time them, and write the tables of admitted tiles.

    python scripts/tune_sm90.py [--seconds 240] [--models MODEL...] [--rows M...] [--out FOLDER] [--write]

For each shape and number of rows every candidate is compared with the first one, bit for bit, and timed in a replayed
CUDA graph over operands that together exceed the L2 cache; cuBLAS is timed beside it. A candidate that differs anywhere
is not admitted and is named at the end, and the exit code is 1. Nothing of this runs in training or serving.
"""

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import triton

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from skyrl_isoexec.kernels.attention import kernel as attention  # noqa: E402
from skyrl_isoexec.kernels.linear import kernel as linear  # noqa: E402
from skyrl_isoexec.kernels.numeric.sm90_product import Tile  # noqa: E402
from skyrl_isoexec.kernels.row_linear import kernel as row_linear  # noqa: E402
from skyrl_isoexec.schedule import Schedule  # noqa: E402

ROWS = (16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
"""Numbers of rows that are timed; a row of the table serves all numbers up to it."""
ORDER = (16, 256, 4096, 64, 512, 128, 1024, 16384, 32)
"""The same, what matters most first, should time run out."""
OPS = ("attention", "linear", "row_linear")
LINEAR = {
    "MiMo-7B": ((4096, 4096), (1024, 4096), (11008, 4096)),
    "Qwen3.5-9B": ((8192, 4096), (1024, 4096), (12288, 4096)),
    "Qwen3.5-35B-A3B": ((8192, 2048), (512, 2048), (4096, 2048)),
    "GLM-4.7-Flash": ((768, 2048), (576, 2048), (5120, 768), (1536, 2048), (10240, 2048)),
    "SmolLM2-135M": ((576, 576), (192, 576), (1536, 576)),
}
"""(N, K) of column-parallel linears."""
HEADS = {
    "MiMo-7B": (151680, 4096),
    "Qwen3.5-9B": (248320, 4096),
    "Qwen3.5-35B-A3B": (248320, 2048),
    "GLM-4.7-Flash": (154880, 2048),
    "SmolLM2-135M": (49152, 576),
}
"""(N, K) of linears to a vocabulary, whose results are fp32."""
ROW_LINEAR = {
    "MiMo-7B": ((4096, 4096), (4096, 11008)),
    "Qwen3.5-9B": ((4096, 4096), (4096, 12288)),
    "Qwen3.5-35B-A3B": ((2048, 4096), (2048, 512)),
    "GLM-4.7-Flash": ((2048, 5120), (2048, 1536), (2048, 10240)),
    "SmolLM2-135M": ((576, 576), (576, 1536)),
}
"""(N, K) of row-parallel linears; also timed with 2 and with 8 leaves."""
L2_BYTES = 60_000_000
SCHEDULE = Schedule(kv_block=64, kv_partition=512)

DECODE = {
    16: (
        "16 16 256 w4 s4", "16 16 512 w4 s3", "16 16 512 w2 s4", "16 32 128 w4 s6", "16 32 256 w4 s4",
        "16 32 512 w4 s3", "16 64 128 w4 s4", "16 64 128 w4 s6", "16 64 256 w4 s3", "16 64 256 w4 s5",
        "16 128 128 w4 s4",
    ),
    32: ("16 64 256 w4 s3", "32 32 256 w4 s4", "32 64 128 w4 s4", "32 64 256 w4 s3", "32 128 128 w4 s4"),
    64: (
        "16 64 256 w4 s3", "32 64 128 w4 s4", "32 64 256 w4 s4", "64 64 128 w4 s4", "64 64 256 w4 s3",
        "64 128 128 w4 s4",
    ),
    128: ("32 64 256 w4 s4", "64 64 128 w4 s4", "128 64 128 w4 s4", "128 128 64 w4 s5"),
}  # fmt: skip
"""Number of rows -> tiles of kind "swap"."""
NARROW = ("64 16 256 w4 s4", "64 32 128 w4 s5", "64 32 256 w4 s4", "64 64 128 w4 s4", "64 64 128 w4 s3")
MIDDLE = (
    "64 32 128 w4 s5", "64 32 256 w4 s4", "64 64 128 w4 s3", "64 64 128 w4 s4", "64 64 128 w4 s6", "64 96 128 w4 s4",
    "64 128 64 w4 s3", "64 128 128 w4 s3", "64 192 64 w4 s5", "64 256 64 w4 s4", "128 32 128 w4 s5", "128 64 64 w4 s3",
    "128 64 128 w4 s4", "128 96 64 w4 s5", "128 96 128 w8 s3", "128 128 64 w4 s4", "128 128 64 w8 s6",
    "128 192 64 w8 s4", "128 256 64 w8 s3", "256 64 64 w8 s4", "256 96 64 w8 s4", "256 128 64 w8 s3",
)  # fmt: skip
WIDE = (
    "64 128 64 w4 s5", "64 256 64 w4 s4", "128 128 64 w4 s4", "128 128 64 w8 s4", "128 128 128 w8 s3",
    "128 192 64 w8 s3", "128 192 64 w8 s4", "128 256 64 w8 s3", "256 96 64 w8 s4", "256 128 64 w8 s3",
)  # fmt: skip
"""Tiles of kind "tma" for few rows, for 128 to 512, and for more."""
TREES = (
    "64 64 64 w4 s4", "64 64 128 w4 s3", "64 64 128 w4 s4", "64 128 64 w4 s4", "64 128 64 w8 s5", "128 64 64 w8 s4",
    "128 128 32 w8 s6", "128 128 64 w8 s4", "128 128 64 w8 s3",
)  # fmt: skip
"""Tiles of kind "tma" that hold several leaves."""
ATTENTION = ((32, 8, 128), (16, 4, 256), (16, 2, 256))
CHOICES = ((64, 4, 2), (64, 4, 3), (64, 8, 2), (64, 8, 3), (128, 4, 2), (128, 8, 2), (128, 8, 3), (128, 16, 2))
"""(query heads, key-value heads, head dimension), and (rows, warps, stages) of tiles of their prefill."""


def candidates(num_m: int, num_leaves: int) -> list[Tile]:
    """Tiles worth trying at a number of rows."""
    texts = [f"swap {t} x1" for t in DECODE.get(num_m, ())] if num_leaves == 1 else []
    if num_leaves == 1:
        texts += [f"tma {t} x1" for t in (NARROW if num_m < 128 else MIDDLE if num_m <= 512 else WIDE)]
        texts += ["rows 128 128 64 w8 s3 x1"] if num_m > 128 else []
    else:
        texts += [f"tma {t} x1" for t in TREES] if num_m >= 64 else []
        split = num_leaves
        while split > 1 and num_m <= 512:
            m, swaps = min(64, max(16, num_m)), ("64 64 w4 s3", "64 128 w4 s3", "32 256 w4 s3")
            texts += [f"swap {m} {t} x{split}" for t in swaps] if num_m <= 128 else []
            texts += [f"rows {t} x{split}" for t in ("128 128 64 w8 s3", "64 128 64 w4 s4")] if num_m > 128 else []
            split //= 2 if num_m <= 128 else num_leaves
    return [Tile.parse(t) for t in dict.fromkeys(texts)]


def compile_one(job: tuple[str, int, str]) -> None:
    """Run a tile once on a small product, so that its machine code is in Triton's cache on disk."""
    name, leaves, text = job
    tile = Tile.parse(text)
    x, w = (torch.zeros(n, leaves * tile.k * 2, device="cuda", dtype=torch.bfloat16) for n in (tile.m, tile.n))
    try:
        if name == "row_linear":
            row_linear.forward(x, w, leaves, tile)
        else:
            for dtype in (torch.bfloat16, torch.float32):
                linear.forward(x, w, None, dtype, tile)
    except Exception:  # shows again, and is reported, where the tile is measured
        pass


def compile_attention(job: tuple[tuple[int, int, int], tuple[int, int, int]]) -> None:
    """As `compile_one`, for a prefill tile."""
    (heads, kv, dim), choice = job
    q, k = (torch.zeros(256, n, dim, device="cuda", dtype=torch.bfloat16) for n in (heads, kv))
    bounds = torch.tensor([0, 256], dtype=torch.int32, device="cuda")
    try:
        attention.forward(q, k, k, bounds, dim**-0.5, SCHEDULE, choice)
    except Exception:
        pass


def compile_all(jobs: list[tuple[str, int, str]], attend: bool) -> None:
    """Compile on many cores: it takes longer than measuring."""
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        shapes = ATTENTION if attend else ()
        slow = pool.map(compile_attention, [(shape, choice) for shape in shapes for choice in CHOICES])
        list(pool.map(compile_one, jobs)), list(slow)


def milliseconds(run, copies: list, repeats: int = 12) -> float:
    """Median time of `run(copy)` in a replayed graph over copies of the operands."""
    run(copies[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in copies:
            run(copy)
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / len(copies))
    return sorted(times)[len(times) // 2]


def measure(name: str, num_n: int, num_k: int, num_m: int, leaves: int, deadline: float) -> dict:
    """Every candidate's time and differing elements for one shape."""
    x = torch.randn(num_m, num_k, device="cuda").bfloat16()
    bytes_of_one = 2 * num_n * num_k
    copies = [
        (torch.randn(num_n, num_k, device="cuda") / num_k**0.5).bfloat16()
        for _ in range(max(1, min(24, 2 * L2_BYTES // bytes_of_one + 1)))
    ]
    native = milliseconds(lambda w: torch.mm(x, w.t()), copies)
    dtype = torch.float32 if (num_n, num_k) in HEADS.values() else torch.bfloat16

    def run(tile):
        if name == "linear":
            return lambda w: linear.forward(x, w, None, dtype, tile)
        return lambda w: row_linear.forward(x, w, leaves, tile)

    result = {"op": name, "n": num_n, "k": num_k, "m": num_m, "leaves": leaves, "native_ms": native, "tiles": {}}
    anchor = None
    for tile in candidates(num_m, leaves):
        if not tile.suits(num_n, num_k, leaves, True) or time.monotonic() > deadline:
            continue
        try:
            if name == "linear":
                bits = linear.forward(x, copies[0], None, torch.float32, tile)
            else:
                bits = run(tile)(copies[0])
            anchor = bits if anchor is None else anchor
            differing = int((bits.view(torch.int32) != anchor.view(torch.int32)).sum())
            result["tiles"][str(tile)] = {"ms": milliseconds(run(tile), copies), "differing": differing}
        except Exception as error:  # a tile that needs more than the chip has is simply no candidate
            result["tiles"][str(tile)] = {"error": repr(error)[:120]}
            torch.cuda.synchronize()
    return result


def attention_tiles(deadline: float) -> None:
    """Print the time of each prefill tile, and how many elements differ from the first: choices of `attention.tile`."""
    for heads, kv, dim in ATTENTION:
        for num, length in ((4, 2048), (1, 8192)):
            bounds = torch.arange(0, (num + 1) * length, length, dtype=torch.int32, device="cuda")
            rows = [torch.randn(num * length, n, dim, device="cuda").bfloat16() for n in (heads, kv, kv)]
            anchor, line = None, []
            for choice in CHOICES:
                if time.monotonic() > deadline:
                    break
                try:

                    def run(q, c=choice, r=rows, b=bounds, d=dim):
                        return attention.forward(q, *r[1:], b, d**-0.5, SCHEDULE, c)[0]

                    found = run(rows[0])
                    anchor = found if anchor is None else anchor
                    differing = int((found.view(torch.int16) != anchor.view(torch.int16)).sum())
                    ms = milliseconds(run, rows[:1], 5)
                    line.append(f"{choice} {ms * 1e3:.0f}" + (f" DIFFERING {differing}" if differing else ""))
                except Exception as error:
                    line.append(f"{choice} {repr(error)[:40]}")
            print(f"prefill {heads}x{dim} of {kv}, {num} x {length}: us {'; '.join(line)}", flush=True)


def best(result: dict) -> list[str]:
    """Admitted tiles of a result, quickest first."""
    timed = [(v["ms"], t) for t, v in result["tiles"].items() if v.get("differing") == 0]
    return [tile for _ms, tile in sorted(timed)]


def merged(old: list[list], new: dict[int, list[str]]) -> list[list]:
    """Rows [largest M, tiles] of a shape: numbers of rows that were measured have their winner, all others theirs."""

    def had(num_m: int) -> list[str]:
        return next(tiles for last, tiles in old if last is None or num_m <= last)

    rows: list[list] = []
    for num_m, tiles in [*((m, new.get(m) or had(m)) for m in ROWS), (None, new.get(ROWS[-1]) or old[-1][1])]:
        if rows and rows[-1][1] == tiles:
            rows[-1][0] = num_m
        else:
            rows.append([num_m, tiles])
    return rows


def write_table(path: Path, results: list[dict], made: dict[str, str]) -> None:
    """Put the winners of what was measured in their places: other numbers of rows, shapes and "default" stay."""
    data = json.loads(path.read_text(encoding="utf-8"))
    default = data["shapes"].pop("default")
    shapes = data["shapes"]
    for shape in sorted({f"{r['n']} {r['k']} {r['leaves']}" for r in results}):
        new = {r["m"]: best(r)[:1] for r in results if f"{r['n']} {r['k']} {r['leaves']}" == shape and best(r)}
        shapes[shape] = merged(shapes.get(shape, default), new)
    before = data["made"] if isinstance(data["made"], list) else [data["made"]]
    made = [*before, made]
    lines = [f"{json.dumps(shape)}: {json.dumps(rows)}" for shape, rows in sorted(shapes.items())]
    lines.append('"default": [\n' + ",\n".join(json.dumps(row) for row in default) + "\n]")
    text = '{\n"made": ' + json.dumps(made) + ',\n"shapes": {\n' + ",\n".join(lines) + "\n}\n}\n"
    path.write_text(text, encoding="utf-8")


def provenance(commit: str) -> dict[str, str]:
    """What a table says of how it was made."""
    return {
        "card": torch.cuda.get_device_name(0), "torch": torch.__version__, "triton": triton.__version__,
        "commit": commit, "command": " ".join(("python3", *sys.argv)),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240, help="stop adding shapes after this long")
    parser.add_argument("--models", nargs="*", choices=LINEAR, default=list(LINEAR), help="default: all")
    parser.add_argument("--rows", nargs="*", type=int, choices=ROWS, default=list(ORDER), help="default: all")
    parser.add_argument("--ops", nargs="*", choices=OPS, default=list(OPS), help="default: all")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for tune.json and the tables")
    parser.add_argument("--commit", default="unknown", help="of the repository, to be named in the tables")
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache and stop")
    parser.add_argument("--write", action="store_true", help="write the tables of the repository too")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    torch.manual_seed(0)
    work = [("linear", HEADS[name], 1) for name in arguments.models]
    work += [("linear", shape, 1) for name in arguments.models for shape in LINEAR[name]]
    work += [("row_linear", shape, n) for name in arguments.models for shape in ROW_LINEAR[name] for n in (1, 2, 8)]
    work = [one for one in work if one[0] in arguments.ops]
    jobs = [
        (name, leaves, str(t))
        for name, leaves in sorted({w[::2] for w in work})
        for m in arguments.rows
        for t in candidates(m, leaves)
    ]
    begin = time.monotonic()
    compile_all(list(dict.fromkeys(jobs)), "attention" in arguments.ops)
    print(f"{len(set(jobs))} kernels compiled in {time.monotonic() - begin:.0f} s", flush=True)
    if arguments.compile_only:
        return 0
    if "attention" in arguments.ops:
        attention_tiles(deadline)
    results = []
    for num_m in arguments.rows:
        for name, (num_n, num_k), leaves in dict.fromkeys(work):
            if time.monotonic() > deadline:
                break
            result = measure(name, num_n, num_k, num_m, leaves, deadline)
            results.append(result)
            first = (best(result) or ["none"])[0]
            ms = result["tiles"].get(first, {}).get("ms", float("nan"))
            flops = 2 * num_m * num_n * num_k
            print(
                f"{name:10} N {num_n:6} K {num_k:6} M {num_m:6} L {leaves}: cuBLAS {result['native_ms'] * 1e3:8.1f}  "
                f"ours {ms * 1e3:8.1f} us, {ms / result['native_ms']:5.2f}, {flops / ms / 1e9:6.0f} TF/s, {first}",
                flush=True,
            )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "tune.json").write_text(json.dumps(results))
    for name, module in (("linear", linear), ("row_linear", row_linear)):
        mine, source = [r for r in results if r["op"] == name], Path(module.__file__).parent / "tiles.json"
        copy = source if arguments.write else arguments.out / f"{name}_tiles.json"
        copy.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
        write_table(copy, mine, provenance(arguments.commit))
    refused = [
        (r["op"], r["n"], r["k"], r["m"], t, v["differing"])
        for r in results
        for t, v in r["tiles"].items()
        if v.get("differing")
    ]
    errors = sorted({(t, v["error"]) for r in results for t, v in r["tiles"].items() if "error" in v})
    print(f"{len(results)} shapes; tiles that differ: {refused or 'none'}; tiles that did not run: {errors or 'none'}")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
