"""`isoexec bench engine`: decode tokens per second of the unified model, of stock vLLM and of its batch-invariant mode.

Each arm is a process of its own with the same arguments, on the same GPU, one after another; the table divides stock's
rate by each arm's, so above 1 is slower than stock. A step's time in kernels is given beside the rates, which are the
host's where that is slower than the GPU.
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
    "isoexec": ("isoexec", {}),
    "stock": ("stock", {}),
    "batch-invariant": ("stock", {"VLLM_BATCH_INVARIANT": "1"}),
}
"""Arm -> (engine, its environment). What an engine needs of it for a model, its process adds: see `throughput`."""
OWN = frozenset(
    ("TORCHDYNAMO_DISABLE", "VLLM_BATCH_INVARIANT", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_USE_V2_MODEL_RUNNER")
)
"""Variables that decide how an engine computes: no arm has one from the caller."""
COMMAND = (sys.executable, "-m", "skyrl_isoexec.runtimes.vllm.throughput")


def ask(arm: str, question: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The answer of one arm; {"failed": why} if it gives none in time."""
    engine, variables = ARMS[arm]
    text = json.dumps({"arm": engine, **question})
    environment = {name: value for name, value in os.environ.items() if name not in OWN} | variables
    try:
        done = subprocess.run([*COMMAND, text], env=environment, stdout=subprocess.PIPE, text=True, timeout=seconds)
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
    for arm, answer in answers.items():
        lines += [
            f"{arm}, {row['sequences']} sequences: {row['kernels_s'] * 1e3:.2f} ms of a step in kernels"
            for row in answer.get("rows", [])
            if "kernels_s" in row
        ]
    lines += [f"{arm}: {answer['failed']}" for arm, answer in answers.items() if "failed" in answer]
    return "\n".join(lines)


def refusal(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, and the mend; None for nothing."""
    from skyrl_isoexec.model.checkpoint import CONFIG  # torch only where it is used

    unknown = sorted(set(arguments.arms) - ARMS.keys())
    if unknown or not arguments.arms:
        return f"--arms {', '.join(unknown) or 'names none'}: there are {', '.join(ARMS)}"
    if not (arguments.model / CONFIG).is_file():
        return f"{arguments.model} has no {CONFIG}; give the folder of a Hugging Face checkpoint"
    for name, least in (("sequences", 1), ("prompt", 1), ("tokens", 2), ("repeats", 1), ("seconds", 1)):
        given = getattr(arguments, name)
        if not (values := given if isinstance(given, list) else [given]) or min(values) < least:
            return f"--{name} {given}: give {least} or more"
    if lost := sorted(set(arguments.profiled) - set(arguments.sequences)):
        return f"--profiled {lost[0]} is none of --sequences {arguments.sequences}; name it there too"
    if not arguments.out.parent.is_dir() or arguments.out.is_dir() or not os.access(arguments.out.parent, os.W_OK):
        return f"--out {arguments.out} cannot be written; name a file in a folder that is there"
    return None


def run(arguments: argparse.Namespace, ask: Callable[..., dict[str, Any]] = ask) -> int:
    """Time every arm, write the JSON after each, print the table; 1 if an arm failed, 2 for wrong arguments."""
    if (found := refusal(arguments)) is not None:
        print(f"refused: {found}", file=sys.stderr)
        return 2
    question = {
        "model": str(arguments.model),
        "sequences": arguments.sequences,
        "prompt": arguments.prompt,
        "tokens": arguments.tokens,
        "repeats": arguments.repeats,
        "profiled": arguments.profiled,
        "runner": arguments.runner,
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
    parser.add_argument(
        "--profiled", nargs="*", type=int, default=[], help="numbers of sequences whose kernels are timed too"
    )
    parser.add_argument("--runner", type=int, choices=(1, 2), default=1, help="vLLM's, of our model: runtime.runner")
    parser.add_argument("--seconds", type=float, default=600, help="limit of one arm")
    parser.add_argument("--out", type=Path, default=Path("bench_engine.json"), help="JSON with every number")
    parser.set_defaults(run=run)
