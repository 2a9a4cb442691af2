"""Decode throughput of one engine, in a process of its own: `python -m skyrl_isoexec.runtimes.vllm.throughput JSON`.

The argument is a `Question`; the answer is one line of JSON, the last that is printed. Every sequence asks for the
log-probability of its tokens, as rollouts do. Prefill is timed by itself and taken off.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

from skyrl_isoexec.runtimes.vllm.settings import EngineSettings
from skyrl_isoexec.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Question:
    """One arm, and what it is timed on."""

    arm: Literal["isoexec", "stock"]
    """The unified model, or vLLM's own; its batch-invariant mode is stock with VLLM_BATCH_INVARIANT=1."""
    model: str
    """Folder of a checkpoint."""
    family: str
    """Its family; used by the unified model alone."""
    sequences: tuple[int, ...]
    """Numbers of sequences that decode together."""
    prompt: int
    """Tokens of a prompt."""
    tokens: int
    """Tokens that each sequence decodes."""
    repeats: int
    """Timed runs of each number of sequences; medians are given."""
    kv_cache_mib: int = 16384
    """Memory of the cache."""
    implementation: str = "kernel"
    """Kernels of the unified model."""


def engine_arguments(question: Question) -> dict[str, Any]:
    """Arguments of vLLM's engine for an arm; all that is not the arm's own is equal."""
    arguments: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": question.prompt + question.tokens + 64,
        "max_num_seqs": max(question.sequences),
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": question.kv_cache_mib * 2**20,
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,  # repeated prompts would be found in it
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    if question.arm == "stock":
        invariant = os.environ.get("VLLM_BATCH_INVARIANT") == "1"
        return arguments | ({"attention_backend": "FLASH_ATTN"} if invariant else {})
    schedule = Schedule(num_leaves=1, kv_block=64, kv_partition=512)
    settings = EngineSettings(family=question.family, kernels=question.implementation, schedule=schedule)
    return arguments | settings.engine_arguments(dtype="bfloat16", device="cuda") | {"block_size": 64}


def measure(question: Question) -> dict[str, Any]:
    """{"start_s", "rows": [{"sequences", "tokens_per_s", "first_token_s", "token_s"}]} of an engine started here."""
    from vllm import LLM, SamplingParams

    begin = time.perf_counter()
    engine = LLM(question.model, **engine_arguments(question))
    start = time.perf_counter() - begin
    source = random.Random(0)

    def timed(count: int, tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [source.randrange(1000, 40000) for _ in range(question.prompt)]} for _ in range(count)
        ]
        wanted = SamplingParams(
            max_tokens=tokens, min_tokens=tokens, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False
        )
        begin = time.perf_counter()
        engine.generate(prompts, wanted, use_tqdm=False)
        return time.perf_counter() - begin

    rows = []
    for count in question.sequences:
        timed(count, 8)
        first = statistics.median(timed(count, 1) for _ in range(question.repeats))
        whole = statistics.median(timed(count, question.tokens) for _ in range(question.repeats))
        decoded = max(whole - first, 1e-9)
        steps = question.tokens - 1
        rows.append(
            {
                "sequences": count,
                "tokens_per_s": count * steps / decoded,
                "first_token_s": first,
                "token_s": decoded / steps,
            }
        )
    return {"start_s": start, "rows": rows}


def main(arguments: list[str]) -> int:
    """Answer the question in the first argument."""
    given = json.loads(arguments[0])
    question = Question(**{**given, "sequences": tuple(given["sequences"])})
    print(json.dumps({"question": dataclasses.asdict(question), **measure(question)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
