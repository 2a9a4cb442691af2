"""`isoexec bench engine`: decode tokens per second of the unified model, of stock vLLM and of its batch-invariant mode.

Each arm is a process of its own with the same arguments, on the same GPU, one after another; the table divides stock's
rate by each arm's, so above 1 is slower than stock.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ARMS: Mapping[str, tuple[str, dict[str, str]]] = {
    "isoexec": (
        "isoexec",
        {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "TORCHDYNAMO_DISABLE": "1"},
    ),
    "stock": ("stock", {"VLLM_USE_FLASHINFER_SAMPLER": "0"}),
    "batch-invariant": ("stock", {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_BATCH_INVARIANT": "1"}),
}
"""Arm -> (engine, its environment). What the unified model needs of it is in `runtimes/vllm/settings.py`."""
COMMAND = (sys.executable, "-m", "skyrl_isoexec.runtimes.vllm.throughput")


def ask(arm: str, question: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The answer of one arm; {"failed": why} if it gives none in time."""
    engine, environment = ARMS[arm]
    text = json.dumps({"arm": engine, **question})
    try:
        done = subprocess.run(
            [*COMMAND, text], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer in {seconds:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": f"exit code {done.returncode}; its output is above"}
    return json.loads(lines[-1])


def table(answers: Mapping[str, dict[str, Any]]) -> str:
    """One row per number of sequences."""
    rates = {
        arm: {row["sequences"]: row["tokens_per_s"] for row in answer.get("rows", [])}
        for arm, answer in answers.items()
    }
    counts = sorted({count for rate in rates.values() for count in rate})
    lines = ["| sequences | " + " | ".join(f"{arm}, tokens/s" for arm in rates) + " | stock / isoexec |"]
    lines.append("|" + "---|" * (len(rates) + 2))
    for count in counts:
        cells = [f"{rate[count]:,.0f}" if count in rate else "-" for rate in rates.values()]
        stock, ours = rates.get("stock", {}).get(count), rates.get("isoexec", {}).get(count)
        cells.append(f"{stock / ours:.2f}" if stock and ours else "-")
        lines.append(f"| {count} | " + " | ".join(cells) + " |")
    lines += [f"{arm}: {answer['failed']}" for arm, answer in answers.items() if "failed" in answer]
    return "\n".join(lines)


def run(arguments: argparse.Namespace, ask: Callable[..., dict[str, Any]] = ask) -> int:
    """Time every arm, write the JSON after each, print the table; 1 if an arm failed."""
    unknown = set(arguments.arms) - ARMS.keys()
    if unknown:
        print(f"refused: no arm {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}", file=sys.stderr)
        return 2
    question = {
        "model": str(arguments.model),
        "sequences": arguments.sequences,
        "prompt": arguments.prompt,
        "tokens": arguments.tokens,
        "repeats": arguments.repeats,
    }
    answers: dict[str, dict[str, Any]] = {}
    for arm in arguments.arms:
        answers[arm] = ask(arm, question, arguments.seconds)
        arguments.out.write_text(json.dumps({"question": question, "arms": answers}, indent=1) + "\n", encoding="utf-8")
    print(table(answers))
    return 1 if any("failed" in answer for answer in answers.values()) else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("model", type=Path, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), help=f"default: {', '.join(ARMS)}")
    parser.add_argument("--sequences", nargs="*", type=int, default=[1, 16, 128, 256])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens that are decoded")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600, help="limit of one arm")
    parser.add_argument("--out", type=Path, default=Path("bench_engine.json"), help="JSON with every number")
    parser.set_defaults(run=run)
