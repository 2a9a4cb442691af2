"""Decode throughput of one engine, in a process of its own: `python -m skyrl_isoexec.runtimes.vllm.throughput JSON`.

The argument is a `Question`; the answer is one line of JSON, the last that is printed. Every sequence asks for the
log-probability of its tokens, as rollouts do. Prefill is timed by itself and taken off. Where the host is slower than
the GPU, rates say little of kernels: their time in a step comes from PyTorch's profiler, after all else was timed.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from skyrl_isoexec.model.checkpoint import CONFIG, read_config
from skyrl_isoexec.model.families import from_hf
from skyrl_isoexec.runtimes.vllm.pages import hybrid_page_size, state_kernels
from skyrl_isoexec.runtimes.vllm.settings import CPU_ENVIRONMENT, EngineSettings, HybridPages, cuda_environment
from skyrl_isoexec.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Question:
    """One arm, and what it is timed on."""

    arm: Literal["isoexec", "stock"]
    """The unified model, or vLLM's own; its batch-invariant mode is stock with VLLM_BATCH_INVARIANT=1."""
    model: str
    """Folder of a checkpoint."""
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
    profiled: tuple[int, ...] = ()
    """Numbers of sequences of which a decode step's kernels are timed too, each one of `sequences`; none on a CPU."""
    runner: int = 1
    """vLLM's model runner of the unified model; stock vLLM chooses its own."""
    implementation: str = "kernel"
    """Kernels of the unified model."""
    device: str = "cuda"
    """Or cpu, where only the command itself is tested."""


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
    fields = read_config(Path(question.model))
    config = from_hf(fields, dtype="bfloat16")
    if question.arm == "stock":
        invariant = os.environ.get("VLLM_BATCH_INVARIANT") == "1"
        chosen = {"attention_backend": "FLASH_ATTN"} if invariant and not config.latent else {}
        if config.hybrid:
            chosen |= {"additional_config": {"gdn_prefill_backend": "triton"}}  # the other compiles at run time
        if config.has_experts or config.hybrid:
            chosen["load_format"] = "dummy"  # random weights of the same sizes: its classes look for other names
        if str(fields["model_type"]) in WHOLE:
            chosen["language_model_only"] = True
        return arguments | chosen | ({"enforce_eager": True} if question.device == "cpu" else {})
    schedule = Schedule(num_leaves=1, kv_block=64, kv_partition=512)
    settings = EngineSettings(family=config.family, kernels=question.implementation, schedule=schedule)
    size = hybrid_page_size(config, 1, state_kernels(question.implementation, schedule)) if config.hybrid else 64
    pages = HybridPages(page_size=size, prefix_caching=False) if config.hybrid else None
    ours = settings.engine_arguments(dtype="bfloat16", device=question.device, hybrid=pages)
    return arguments | ours | {"block_size": size}


def environment(question: Question) -> dict[str, str]:
    """Variables of an arm that vLLM reads when it is imported; a stock engine on a GPU chooses its runner itself."""
    if question.device == "cpu":
        return CPU_ENVIRONMENT
    return cuda_environment(runner=None if question.arm == "stock" else question.runner)


WHOLE = {
    "qwen3_5_text": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
}
"""Text parts that vLLM 0.23.0 has within a whole model alone -> its type and class."""


def _dense_first(fields: Mapping[str, Any]) -> dict[str, int]:
    if "mlp_layer_types" not in fields:
        return {}
    return {"first_k_dense_replace": fields["mlp_layer_types"].count("dense"), "num_nextn_predict_layers": 0}


ADDED = {"glm4_moe_lite": _dense_first}
"""Type -> fields that vLLM 0.23.0 reads as they were named before transformers 5, from a configuration of today."""


def stock_folder(question: Question, folder: Path) -> str:
    """Where stock vLLM reads the model. For a text part, a configuration of the whole, of which it builds no tower.

    Its module imports torchvision, without which the arm fails.
    """
    fields: Mapping[str, Any] = read_config(Path(question.model))
    if (added := ADDED.get(fields["model_type"])) is not None:
        (folder / CONFIG).write_text(json.dumps(dict(fields) | added(fields)), encoding="utf-8")
        return str(folder)
    if fields["model_type"] not in WHOLE:
        return question.model
    kind, architecture = WHOLE[fields["model_type"]]
    text = {"mamba_ssm_dtype": "float32"} | dict(fields)  # as published; the class of transformers does not write it
    whole = {"architectures": [architecture], "model_type": kind, "text_config": text, "dtype": "bfloat16"}
    whole["tie_word_embeddings"] = fields.get("tie_word_embeddings", False)
    (folder / CONFIG).write_text(json.dumps(whole), encoding="utf-8")
    return str(folder)


PROFILED_TOKENS = 8, 40
"""Tokens of the two profiled runs; what the longer has more is decode steps of all sequences alone."""
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events that take time of the GPU."""


def gpu_seconds(folder: Path) -> float:
    """Seconds of the GPU in the traces of a folder, which are removed.

    Raises:
        RuntimeError: no trace has a kernel.
    """
    total = 0.0
    for path in folder.glob("*.trace.json.gz"):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        total += sum(event["dur"] for event in events if event.get("cat") in KERNELS) / 1e6
        path.unlink()
    if not total:
        raise RuntimeError(f"PyTorch's profiler left no trace of a kernel in {folder}; may it read the GPU's counters?")
    return total


def measure(question: Question) -> dict[str, Any]:
    """{"start_s", "rows": [{"sequences", "tokens_per_s", "first_token_s", "token_s"}]} of an engine started here.

    A row of a profiled number of sequences also has "kernels_s", the time of a decode step's kernels.
    """
    with tempfile.TemporaryDirectory() as made:
        return _measure(question, Path(made))


def _measure(question: Question, made: Path) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    begin, vocabulary = time.perf_counter(), from_hf(read_config(Path(question.model))).vocab_size
    model = stock_folder(question, made) if question.arm == "stock" else question.model
    traces = {"profiler": "torch", "torch_profiler_dir": str(made), "torch_profiler_with_stack": False}
    profiler = {"profiler_config": traces | {"torch_profiler_dump_cuda_time_total": False}}
    engine = LLM(model, **engine_arguments(question), **(profiler if question.profiled else {}))
    start = time.perf_counter() - begin
    source, (lowest, highest) = random.Random(0), (min(1000, vocabulary // 2), min(40000, vocabulary))

    def timed(count: int, tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [source.randrange(lowest, highest) for _ in range(question.prompt)]}
            for _ in range(count)
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
    for row in rows:
        if row["sequences"] in question.profiled:
            times = []
            for tokens in PROFILED_TOKENS:
                engine.start_profile()
                timed(row["sequences"], tokens)
                engine.stop_profile()
                times.append(gpu_seconds(made))
            row["kernels_s"] = (times[1] - times[0]) / (PROFILED_TOKENS[1] - PROFILED_TOKENS[0])
    return {"start_s": start, "rows": rows}


def main(arguments: list[str]) -> int:
    """Answer the question in the first argument."""
    given = json.loads(arguments[0])
    counts = {name: tuple(given.get(name, ())) for name in ("sequences", "profiled")}
    question = Question(**{**given, **counts})
    os.environ.update(environment(question))
    print(json.dumps({"question": dataclasses.asdict(question), **measure(question)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
