#!/usr/bin/env python3
"""One model on one GPU, checked end to end without a launcher: what `gpu_all.sh` runs of it, stage by stage.

    python scripts/gpu_smollm2.py site FOLDER              entry points and patches for packages that lie in a folder
    python scripts/gpu_smollm2.py offline MODEL OUT.json   our engine against the trainer's decoder, to the bit; vLLM's
                                                           second model runner with RUNNER=2 in the environment
    python scripts/gpu_smollm2.py native MODEL OUT.json    stock vLLM against transformers, for comparison
    python scripts/gpu_smollm2.py table FOLDER             what the stages left, in a few lines

`offline` and `native` sample the same prompts: CUDA graphs and prefix caching on, a cache so small that requests are
preempted. Each asserts that what it claims has happened.
"""

import argparse
import importlib.metadata
import json
import os
import random
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NUM_PROMPTS, MAX_TOKENS, PAGE, NUM_PAGES, MAX_LEN = 64, 128, 64, 96, 512
WHOLE_ROWS = 4, 8
"""Requests, and tokens of each, whose whole rows are compared."""
FORWARD_TOKENS = 8192
"""Tokens of one forward of the trainer's side."""
KERNELS = {"cpu": "cpu", "cuda": "kernel"}
COUNTERS = ("num_preemptions", "prefix_cache_hits")
DISTRIBUTION = "skyrl_isoexec-0.1.0.dist-info"


def lacking(folder: Path, requirements: str) -> list[str]:
    """Lines "name==version" of requirements of which neither a folder nor this Python has that version."""
    have: dict[str, str] = {}
    for found in importlib.metadata.distributions(path=[str(folder), *sys.path]):
        have.setdefault(_normal(found.metadata["Name"] or ""), found.version)  # the first on the path is imported
    asked = [line.split("#")[0].strip() for line in requirements.splitlines()]
    return [line for line in asked if line and have.get(_normal(line.split("==")[0])) != line.partition("==")[2]]


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def site(folder: Path) -> int:
    """Make the packages of a folder a host of this checkout: its entry points are found, its patches applied.

    1 if it lacks a package that a run needs, each of which is named.
    """
    needed = (ROOT / "requirements" / "gpu-host.txt").read_text(encoding="utf-8")
    for line in (missing := lacking(folder, needed)):
        print(f"neither {folder} nor this Python has {line}, of requirements/gpu-host.txt; install it", file=sys.stderr)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / DISTRIBUTION
    info.mkdir(exist_ok=True)
    groups = {**project["entry-points"], "console_scripts": project["scripts"]}
    lines = []
    for group, names in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in names.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "skyrl_isoexec", "patches", "apply", "--site", str(folder)]
    return subprocess.run([*command, "vllm", "megatron-core"], cwd=ROOT, check=False).returncode or int(bool(missing))


def prompts(model: Path) -> list[list[int]]:
    """Chat prompts of 20 to about 200 tokens, half of them with one common beginning of two pages."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    source = random.Random(11)
    words = "one two three four apples pears trains boxes red blue carries sells divides each day".split()
    common = " ".join(source.choice(words) for _ in range(2 * PAGE + 20))
    made = []
    for index in range(NUM_PROMPTS):
        own = " ".join(source.choice(words) for _ in range(source.randrange(8, 120)))
        text = f"{common} {own}" if index % 2 else own
        message = [{"role": "user", "content": f"{text}. How many are there in all?"}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
        made.append(list(ids)[-(MAX_LEN - MAX_TOKENS - 1) :])
    return made


def sample(engine: Any, asked: list[list[int]], tokens: int, logprobs: int, seed: int | None = None) -> list[Any]:
    """vLLM's outputs, in the order of the prompts."""
    from vllm import SamplingParams

    chosen = {"max_tokens": tokens, "temperature": 1.0, "logprobs": logprobs, "detokenize": False}
    wanted = [SamplingParams(**chosen, seed=None if seed is None else seed + i) for i in range(len(asked))]
    return engine.generate([{"prompt_token_ids": ids} for ids in asked], wanted, use_tqdm=False)


Sampled = tuple[list[int], list[int], list[float]]
"""(prompt, sampled tokens, their log-probabilities)."""


def sampled(outputs: list[Any]) -> list[Sampled]:
    """What every output is, in plain data."""
    found = []
    for output in outputs:
        answer = output.outputs[0]
        ids = list(answer.token_ids)
        found.append(
            (list(output.prompt_token_ids), ids, [row[i].logprob for row, i in zip(answer.logprobs, ids, strict=True)])
        )
    return found


def counters(engine: Any) -> dict[str, int]:
    """Preemptions and prefix-cache hits so far."""
    names = ("vllm:num_preemptions", "vllm:prefix_cache_hits")
    values = {name: sum(m.value for m in engine.get_metrics() if m.name == name) for name in names}
    return {name.removeprefix("vllm:"): int(value) for name, value in values.items()}


def arguments() -> dict[str, Any]:
    """Arguments of both engines."""
    return {
        "max_model_len": MAX_LEN,
        "max_num_seqs": NUM_PROMPTS,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": NUM_PAGES,
        "block_size": PAGE,
        "gpu_memory_utilization": 0.3,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "max_logprobs": -1,
        "seed": 7,
    }


def batches(rows: list[list[int]]) -> Iterator[list[int]]:
    """Indices of sequences that fit into one forward."""
    batch, size = [], 0
    for index, row in enumerate(rows):
        if batch and size + len(row) > FORWARD_TOKENS:
            yield batch
            batch, size = [], 0
        batch.append(index)
        size += len(row)
    yield batch


class Trainer:
    """The unified decoder as a trainer runs it: packed rows, no cache, every kernel of its own loading."""

    def __init__(self, model: Path, device: str, schedule: Any) -> None:
        from skyrl_isoexec.kernels.bundle import load_kernels
        from skyrl_isoexec.model.axes import SingleAxis
        from skyrl_isoexec.model.checkpoint import iter_tensors, load, read_config
        from skyrl_isoexec.model.decoder import Decoder
        from skyrl_isoexec.model.families import from_hf
        from skyrl_isoexec.runtimes.megatron.logprob import token_logprobs

        config, axis = from_hf(read_config(model), dtype="bfloat16"), SingleAxis()
        self.vocabulary = config.vocab_size
        self.kernels, self.device = load_kernels(KERNELS[device], schedule), device
        self.decoder = Decoder(config, self.kernels, axis, schedule, device=device)
        load(self.decoder, iter_tensors(model))
        self.score = token_logprobs(self.kernels, axis, schedule.num_leaves)

    def logits(self, rows: list[list[int]]) -> Any:
        """fp32 [T, V] of packed sequences."""
        import torch

        lengths = [len(row) for row in rows]
        starts = torch.tensor([0, *lengths], device=self.device).cumsum(0).to(torch.int32)
        positions = torch.cat([torch.arange(n, device=self.device) for n in lengths])
        ids = torch.tensor([i for row in rows for i in row], device=self.device)
        x_TH = self.decoder.layers(self.decoder.embed(ids), positions, self.decoder.end_to_end(starts))
        return self.decoder.full_logits(x_TH)

    def scored(self, rows: list[list[int]]) -> list[Any]:
        """Per sequence, fp32 log-probabilities of its tokens after the first; with gradients if they are enabled."""
        import torch

        logits = self.logits(rows)
        targets = torch.tensor([i for row in rows for i in (*row[1:], 0)], device=self.device)
        scores = self.score(logits, targets)
        return [part[:-1].detach().cpu() for part in scores.split([len(row) for row in rows])]


def compared(found: list[Sampled], score: Callable[[list[list[int]]], list[Any]]) -> dict[str, Any]:
    """Sampled tokens of the engine against a scorer: as bits, and as absolute differences."""
    import torch

    from skyrl_isoexec.schedule.bits import count_mismatches

    rows = [prompt + answer for prompt, answer, _ in found]
    engine, trainer = [], []
    for batch in batches(rows):
        for index, scores in zip(batch, score([rows[i] for i in batch]), strict=True):
            prompt, _, logprobs = found[index]
            engine.append(torch.tensor(logprobs, dtype=torch.float32))
            trainer.append(scores[len(prompt) - 1 :].float())
    mine, theirs = torch.cat(engine), torch.cat(trainer)
    mismatched, count = count_mismatches(mine, theirs)
    difference = (mine - theirs).abs()
    assert count > 0, "nothing was compared"
    return {
        "compared": count,
        "mismatched": mismatched,
        "mean_abs": difference.mean().item(),
        "max_abs": difference.max().item(),
    }


def whole_rows(outputs: list[Any], trainer: Trainer) -> dict[str, int]:
    """Every entry of the vocabulary on sampled rows, as bits."""
    import torch

    from skyrl_isoexec.schedule.bits import count_mismatches

    mismatched = count = 0
    for output in outputs:
        prompt, answer = list(output.prompt_token_ids), output.outputs[0]
        with torch.no_grad():
            rows = trainer.kernels.logprobs(trainer.logits([prompt + list(answer.token_ids)]))
        rows = rows[len(prompt) - 1 : -1].cpu()
        for row, entries in zip(rows, answer.logprobs, strict=True):
            assert len(entries) == row.shape[0], f"{len(entries)} of {row.shape[0]} entries came"
            got = torch.full_like(row, float("nan"))
            got[torch.tensor(list(entries))] = torch.tensor([entry.logprob for entry in entries.values()])
            wrong, number = count_mismatches(got, row)
            mismatched, count = mismatched + wrong, count + number
    return {"compared": count, "mismatched": mismatched}


def offline(model: Path, out: Path) -> int:
    """Our engine, in this process, against the trainer's decoder; 1 if a bit differs."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCHDYNAMO_DISABLE="1")
    from skyrl_isoexec.runtimes.vllm.settings import CPU_ENVIRONMENT, EngineSettings, cuda_environment

    os.environ.update(CPU_ENVIRONMENT | cuda_environment(runner=int(os.environ.get("RUNNER", "1"))))
    import torch
    from vllm import LLM

    from skyrl_isoexec.schedule import Schedule

    schedule = Schedule(num_leaves=1, kv_block=64, kv_partition=512)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU only the stage itself is checked
    settings = EngineSettings(family="llama", kernels=KERNELS[device], schedule=schedule)
    times = {"begin": time.perf_counter()}
    engine = LLM(
        str(model),
        **settings.engine_arguments(dtype="bfloat16", device=device),
        **arguments(),
        logprobs_mode="processed_logprobs",
    )
    times["started"] = time.perf_counter()
    asked = prompts(model)
    outputs = sample(engine, asked, MAX_TOKENS, 0) + sample(engine, asked[:16], MAX_TOKENS, 0, seed=5)
    times["sampled"] = time.perf_counter()
    happened = counters(engine) | {"graph_steps": engine.collective_rpc("isoexec_replays")[0]}
    trainer = Trainer(model, device, schedule)
    with torch.no_grad():
        result = {"no_grad": compared(sampled(outputs), trainer.scored)}
    result["grad"] = compared(sampled(outputs[:16]), trainer.scored)
    few, tokens = WHOLE_ROWS
    result["vocabulary"] = whole_rows(sample(engine, asked[:few], tokens, trainer.vocabulary), trainer)
    times["compared"] = time.perf_counter()
    served = engine.collective_rpc("isoexec_served")[0]
    seconds = {name: round(at - times["begin"], 1) for name, at in times.items() if name != "begin"}
    result |= {"happened": happened, "served": served, "seconds": seconds}
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result), flush=True)
    missing = [name for name, number in happened.items() if not number]
    if missing:
        print(f"did not happen: {', '.join(missing)}", flush=True)
    return int(bool(missing) or any(result[name]["mismatched"] for name in ("no_grad", "grad", "vocabulary")))


def native(model: Path, out: Path) -> int:
    """Stock vLLM with its own CUDA graphs, but not compiled, against transformers' forward of the same weights."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCHDYNAMO_DISABLE="1", VLLM_PLUGINS="")
    import torch
    from transformers import AutoModelForCausalLM
    from vllm import LLM

    graphs = {"compilation_config": {"mode": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY"}}
    engine = LLM(str(model), dtype="bfloat16", **arguments(), **graphs)
    outputs = sample(engine, prompts(model), MAX_TOKENS, 0)
    happened = counters(engine)
    stock = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.bfloat16, attn_implementation="sdpa").cuda()

    @torch.no_grad()
    def score(rows: list[list[int]]) -> list[Any]:
        scores = []
        for row in rows:
            ids = torch.tensor([row], device="cuda")
            logprobs = stock(ids).logits[0, :-1].float().log_softmax(-1)
            scores.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu())
        return scores

    result = {"no_grad": compared(sampled(outputs), score), "happened": happened}
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result), flush=True)
    return 0


def steps(path: Path) -> dict[str, Any]:
    """A run's metrics, added up over its steps."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "isoexec/compared_tokens" in row]
    number = "policy/rollout_train_logprobs_abs_diff_"
    return {
        "steps": len(rows),
        "compared": sum(row["isoexec/compared_tokens"] for row in rows),
        "mismatched": sum(row["isoexec/mismatched_tokens"] for row in rows),
        "mean_abs": sum(row.get(f"{number}mean", 0.0) for row in rows) / max(1, len(rows)),
        "max_abs": max((row.get(f"{number}max", 0.0) for row in rows), default=0.0),
        "rewards": [round(row.get("reward/avg_raw_reward", float("nan")), 3) for row in rows],
        "step_s": [round(row.get("timing/step", float("nan")), 1) for row in rows],
        "counters": {name: rows[-1][f"isoexec/{name}"] for name in COUNTERS if rows and f"isoexec/{name}" in rows[-1]},
    }


def table(folder: Path) -> int:
    """A few lines about every stage that left a file."""
    for name in ("offline", "native"):
        file = folder / f"{name}.json"
        if not file.is_file():
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        for part in ("no_grad", "grad", "vocabulary"):
            if part in found:
                one = found[part]
                spread = "".join(f", {key} {one[key]:.2e}" for key in ("mean_abs", "max_abs") if key in one)
                print(f"{name:<8} {part:<11} {one['mismatched']} of {one['compared']} differ{spread}")
        print(f"{name:<8} happened    {found['happened']}")
    for path in sorted(folder.glob("*.metrics.jsonl")):
        found = steps(path)
        (folder / f"{path.stem}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        arm, differ = path.name.split(".")[0], f"{found['mismatched']} of {found['compared']} differ"
        spread = f"mean_abs {found['mean_abs']:.2e}, max_abs {found['max_abs']:.2e}"
        print(f"run {arm:<8} {found['steps']} steps, {differ}, {spread}, {found['counters']}")
        print(f"    reward {found['rewards']}\n    step_s {found['step_s']}")
    for path in sorted(folder.glob("engine_*.json")):
        from skyrl_isoexec.bench.engine import table as engines

        print(f"{path.stem}\n{engines(json.loads(path.read_text(encoding='utf-8'))['arms'])}")
    return 0


def main() -> int:
    """Run one stage; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in ("site", "table"):
        verbs.add_parser(name).add_argument("folder", type=Path)
    for name in ("offline", "native"):
        verb = verbs.add_parser(name)
        verb.add_argument("model", type=Path)
        verb.add_argument("out", type=Path)
    given = parser.parse_args()
    if given.verb in ("site", "table"):
        return {"site": site, "table": table}[given.verb](given.folder)
    return {"offline": offline, "native": native}[given.verb](given.model, given.out)


if __name__ == "__main__":
    sys.exit(main())
