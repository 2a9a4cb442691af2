"""Hazard 14: a micro-batch of nothing but padding neither counts, nor fails, nor moves a bit."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_with_padding_micro_batches(tmp_path: Path, complete: Callable[..., object]) -> None:
    """Micro-batches are cut by tokens on two replicas, and the one with fewer of them gets padding."""
    run = complete(
        tmp_path / "run",
        "+exec=isoexec",
        "run=short",
        "topology.trainer.dp=2",
        "topology.engine.num=2",
        "trainer.max_tokens_per_microbatch=64",
        "trainer.max_training_steps=2",
        timeout=540,
    )
    found = {s: (r["isoexec/mismatched_tokens"], r["isoexec/compared_tokens"]) for s, r in run.steps.items()}
    assert sorted(found) == [1, 2], run.tail()
    assert all(mismatched == 0 and compared >= 100 for mismatched, compared in found.values()), found
    padding = {s: r["policy/num_padding_microbatches"] for s, r in run.steps.items()}
    assert any(padding.values()), f"no rank was given padding: {padding}"
