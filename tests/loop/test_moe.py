"""The loop with a mixture of experts: one flipped bit before a router would send a token to another expert."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

SMALL = (
    "run=short",
    "trainer.max_training_steps=2",
    "trainer.policy.optimizer_config.num_warmup_steps=1",
    "generator.n_samples_per_prompt=8",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_experts_on_two_ranks(tmp_path: Path, complete: Callable[..., object]) -> None:
    """Trainer EP2, two replicas with four experts each, against two engines with all eight; bf16, seeded."""
    run = complete(
        tmp_path / "run",
        "+exec=isoexec",
        "model=tiny_moe",
        *SMALL,
        "model.dtype=bfloat16",
        "topology=trainer_ep2",
        timeout=840,
    )
    found = {s: (r["isoexec/mismatched_tokens"], r["isoexec/compared_tokens"]) for s, r in run.steps.items()}
    assert sorted(found) == [1, 2], run.tail()
    assert all(mismatched == 0 and compared >= 100 for mismatched, compared in found.values()), found
    trainers = json.loads((run.folder / "facts.json").read_text())["trainer"]
    assert [facts["degree.ep"] for facts in trainers.values()] == [2, 2]
    print(found)
