"""The loop with latent attention: its keys in the engine's own pages, experts behind a biased router."""

from collections.abc import Callable
from pathlib import Path

import pytest

ENGINE = "generator.inference_engine"
TASK = ("task.digits=1", "task.shots=4", "task.held_out_one_in=9", "task.base.steps=150")
"""Prompts of 32 tokens: two pages, of which one is cached, and the second token of every answer needs a third."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_under_preemption_with_cached_beginnings(tmp_path: Path, complete: Callable[..., object]) -> None:
    """Trainer TP2, half of the heads a rank, against two engines with too few pages; bf16, seeded."""
    run = complete(
        tmp_path / "run",
        "+exec=isoexec",
        "model=tiny_mla",
        *TASK,
        "run=short",
        "trainer.max_training_steps=2",
        "trainer.policy.optimizer_config.num_warmup_steps=1",
        "generator.n_samples_per_prompt=8",
        "model.dtype=bfloat16",
        "topology=trainer_tp2",
        f"{ENGINE}.max_num_batched_tokens=100",
        f"{ENGINE}.max_num_seqs=16",
        f"++{ENGINE}.engine_init_kwargs.num_gpu_blocks_override=10",
        timeout=840,
    )
    found = {s: (r["isoexec/mismatched_tokens"], r["isoexec/compared_tokens"]) for s, r in run.steps.items()}
    assert sorted(found) == [1, 2], run.tail()
    assert all(mismatched == 0 and compared >= 100 for mismatched, compared in found.values()), found
    assert run.steps[2]["isoexec/num_preemptions"] > 0 and run.steps[2]["isoexec/prefix_cache_hits"] >= 64
    assert run.steps[1]["policy/grad_norm"] > 0  # the second step computed with other weights
    print(found)
