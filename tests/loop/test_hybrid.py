"""The loop with a hybrid model: gated delta rules beside attention, their states in the engine's own pages."""

from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_isoexec.launch.compose import compose
from skyrl_isoexec.launch.task import prepare_checkpoint

MODEL = ("+exec=isoexec", "model=tiny_hybrid")
SMALL = (
    "run=short",
    "trainer.max_training_steps=2",
    "trainer.policy.optimizer_config.num_warmup_steps=1",
    "generator.n_samples_per_prompt=8",
)
ENGINE = "generator.inference_engine"


@pytest.fixture(scope="module")
def base() -> Path:
    """The model's base checkpoint, trained now if it is not cached."""
    return prepare_checkpoint(compose([*MODEL])[0])


def check(run: object, *, minimum: int) -> None:
    """Both steps are there, compared enough tokens, and found no difference."""
    found = {s: (r["isoexec/mismatched_tokens"], r["isoexec/compared_tokens"]) for s, r in run.steps.items()}
    assert sorted(found) == [1, 2], run.tail()
    assert all(mismatched == 0 and compared >= minimum for mismatched, compared in found.values()), found
    print(found)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_row_causal_with_cached_beginnings(base: Path, tmp_path: Path, complete: Callable[..., object]) -> None:
    """Trainer TP2 against two engines, fp32, seeded; steps of 50 tokens cut prompts inside of chunks."""
    run = complete(
        tmp_path / "run",
        *MODEL,
        *SMALL,
        "topology=trainer_tp2",
        f"{ENGINE}.max_num_batched_tokens=50",
        f"{ENGINE}.max_num_seqs=32",
    )
    check(run, minimum=100)
    assert run.steps[2]["isoexec/prefix_cache_hits"] >= 64


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_cpr_and_experts_under_preemption(tmp_path: Path, complete: Callable[..., object]) -> None:
    """Engine TP2 on the trainer's devices, bf16, unseeded; endless answers that cross into a second page.

    Its base is hardly trained: what it answers does not matter here.
    """
    run = complete(
        tmp_path / "run",
        "+exec=isoexec",
        "model=tiny_hybrid_moe",
        "task.base.steps=10",
        *SMALL,
        "kernels.gdn=cpr",
        "model.dtype=bfloat16",
        "runtime.page_size=128",
        "topology=engine_tp2",
        "run.seeded_requests=false",
        "generator.sampling_params.max_generate_length=24",
        "trainer.algorithm.dynamic_sampling.type=null",
        "generator.apply_overlong_filtering=false",
        f"{ENGINE}.max_num_batched_tokens=256",
        f"{ENGINE}.max_num_seqs=16",
        "++generator.sampling_params.additional_kwargs.ignore_eos=true",
        f"++{ENGINE}.engine_init_kwargs.num_gpu_blocks_override=14",
    )
    check(run, minimum=800)
    assert run.steps[2]["isoexec/num_preemptions"] > 0
