"""The whole loop, launched as a user launches it: on every step, not one bit differs between rollout and trainer.

Few runs, each covering several settings at once: the two directions of unequal tensor-parallel degrees, colocated and
not, both number formats, cut prefills, preemption, seeded and unseeded sampling, a temperature.
"""

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SMALL = (
    "run=short",
    "trainer.max_training_steps=2",
    "trainer.policy.optimizer_config.num_warmup_steps=1",
    "generator.n_samples_per_prompt=8",
)
LONG = (
    "trainer.max_prompt_length=44",
    "generator.sampling_params.max_generate_length=14",
    "trainer.algorithm.dynamic_sampling.type=null",
    "generator.apply_overlong_filtering=false",
)
"""For `long_prompts`: prompts of up to three pages and answers that go on into a fourth."""
ENGINE = "generator.inference_engine"
MINIMUM, MINIMUM_ENDLESS = 100, 800
"""Least tokens that a step has to compare, of answers that end and of answers that go on to their limit."""


@pytest.fixture
def long_prompts(tmp_path: Path) -> str:
    """A data set of short problems that can be learnt, and of long ones that share their first seventeen symbols."""
    rows = []
    for a in range(10, 42):
        for prompt in (f"{a}+{a + 1}=", f"12+34+56+78+90+11{'+7' * (a % 12)}+{a}="):
            row = {"data_source": "addition", "env_class": "addition"}
            row["prompt"] = [{"role": "user", "content": prompt}]
            row["reward_spec"] = {"method": "rule", "ground_truth": str(2 * a + 1)}
            rows.append(json.dumps(row) + "\n")
    path = tmp_path / "long.jsonl"
    path.write_text("".join(rows))
    return f"data.train_data=[{path}]"


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port where SkyRL would start its first engine, taken by somebody else."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("0.0.0.0", 8000))
            other.listen(1)
        except OSError:
            pass  # taken already, which is as good
        yield 8000


def check(run: object, *, steps: int, minimum: int) -> None:
    """Every step is there, compared enough tokens, and found no difference."""
    found = {
        step: (row["isoexec/mismatched_tokens"], row["isoexec/compared_tokens"]) for step, row in run.steps.items()
    }
    assert sorted(found) == list(range(1, steps + 1)), run.tail()
    assert all(mismatched == 0 for mismatched, _ in found.values()), found
    assert all(compared >= minimum for _, compared in found.values()), found
    assert all(row["policy/rollout_train_logprobs_abs_diff_max"] == 0 for row in run.steps.values())
    print({step: f"{mismatched} of {compared}" for step, (mismatched, compared) in found.items()})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trainer_tp2_against_two_engines_colocated(
    tmp_path: Path, complete: Callable[..., object], busy_port: int
) -> None:
    """fp32, seeded, with a foreign listener on the first engine's port."""
    run = complete(tmp_path / "run", "+exec=isoexec", *SMALL, "topology=trainer_tp2")
    check(run, steps=2, minimum=MINIMUM)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engine_tp2_against_whole_trainer_apart(tmp_path: Path, complete: Callable[..., object]) -> None:
    """bf16, two threads a process, unseeded, temperature 0.7 with processed log-probabilities."""
    run = complete(
        tmp_path / "run",
        "+exec=isoexec",
        *SMALL,
        "topology=separate",
        "topology.engine.tp=2",
        "runtime.threads=2",
        "model.dtype=bfloat16",
        "run.seeded_requests=false",
        "generator.sampling_params.temperature=0.7",
    )
    check(run, steps=2, minimum=MINIMUM)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_prefills_cut_anywhere(tmp_path: Path, complete: Callable[..., object], long_prompts: str) -> None:
    """Trainer TP2 apart from an engine of budget 7, prefix caching on, bf16, seeded, temperature 0.7."""
    run = complete(
        tmp_path / "run",
        "+exec=isoexec",
        *SMALL,
        *LONG,
        long_prompts,
        "topology=separate",
        "topology.trainer.tp=2",
        "model.dtype=bfloat16",
        "generator.sampling_params.temperature=0.7",
        f"{ENGINE}.enable_prefix_caching=true",
        f"{ENGINE}.enable_chunked_prefill=true",
        f"{ENGINE}.max_num_batched_tokens=7",
        f"{ENGINE}.max_num_seqs=7",
    )
    check(run, steps=2, minimum=MINIMUM)
    assert run.steps[2]["isoexec/prefix_cache_hits"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_forced_preemption(tmp_path: Path, complete: Callable[..., object], long_prompts: str) -> None:
    """Engine TP2 on the trainer's devices, pages for two or three of sixteen endless answers; fp32, unseeded."""
    run = complete(
        tmp_path / "run",
        "+exec=isoexec",
        *SMALL,
        *LONG,
        long_prompts,
        "topology=engine_tp2",
        "run.seeded_requests=false",
        f"{ENGINE}.max_num_batched_tokens=64",
        f"{ENGINE}.max_num_seqs=16",
        "++generator.sampling_params.additional_kwargs.ignore_eos=true",
        f"++{ENGINE}.engine_init_kwargs.num_gpu_blocks_override=12",
    )
    check(run, steps=2, minimum=MINIMUM_ENDLESS)
    assert run.steps[2]["isoexec/num_preemptions"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_native_differs(tmp_path: Path, complete: Callable[..., object]) -> None:
    """The stock stack, counted the same way, does not agree: the count can be something else than 0."""
    run = complete(tmp_path / "run", "+exec=native", *SMALL)
    counts = {s: (r["isoexec/mismatched_tokens"], r["isoexec/compared_tokens"]) for s, r in run.steps.items()}
    assert sorted(counts) == [1, 2]
    assert sum(mismatched for mismatched, _ in counts.values()) > 0
    assert all(compared >= MINIMUM for _, compared in counts.values())
    print(counts)
