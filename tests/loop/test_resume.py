"""A run that dies after a checkpoint and is resumed goes on exactly as the run that never stopped."""

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

RUN = (
    "+exec=isoexec",
    "run=short",
    "trainer.max_training_steps=6",
    "trainer.ckpt_interval=3",
    "trainer.hf_save_interval=6",
    "generator.n_samples_per_prompt=8",
)
SAME = (
    "isoexec/rollouts_sha256",
    "isoexec/compared_tokens",
    "isoexec/mismatched_tokens",
    "reward/avg_raw_reward",
    "policy/final_loss",
    "policy/policy_loss",
    "policy/grad_norm",
    "policy/policy_lr",
)


def tensors(folder: Path) -> dict[str, bytes]:
    """{name: bytes} of an exported checkpoint, with dtype and shape in front."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                found[name] = f"{entry['dtype']} {entry['shape']} ".encode() + body[first:last]
    return found


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_killed_and_resumed_equals_uninterrupted(
    tmp_path: Path, start: Callable[..., object], complete: Callable[..., object]
) -> None:
    """The worker is killed while steps 4 to 6 run: what that shows about a killed worker is asserted here as well."""
    folder = tmp_path / "resumed"
    with start(folder, *RUN, "trainer.max_training_steps=60") as run:
        latest = folder / "checkpoints" / "latest_ckpt_global_step.txt"
        run.until(lambda: bool(run.named("PolicyWorker")))
        workers = run.named("PolicyWorker")
        run.until(lambda: latest.exists() and latest.read_text() == "3")
        workers[0].kill()
        before = time.monotonic()
        status = run.wait(60)
        left = run.left_over()
    said = [line for line in run.errors.splitlines() if line.startswith("failed: ")]
    print(f"ended {time.monotonic() - before:.1f} s after the fault: {said}")
    assert status == 1 and len(said) == 1, run.tail()
    assert "the trainer's rank 0 (process" in said[0] and "trainer.resume_mode=latest" in said[0]
    assert not left, left

    resumed = complete(folder, *RUN, "trainer.resume_mode=latest")
    whole = complete(tmp_path / "whole", *RUN)
    assert sorted(whole.steps) == sorted(resumed.steps) == [1, 2, 3, 4, 5, 6]
    for step in (4, 5, 6):
        for name in SAME:
            assert name in whole.steps[step], sorted(whole.steps[step])
            assert whole.steps[step][name] == resumed.steps[step][name], (step, name)
    paths = [run.folder / "export" / "global_step_6" / "policy" for run in (whole, resumed)]
    first, second = (tensors(path) for path in paths)
    assert first and first == second
    assert len({row["isoexec/rollouts_sha256"] for row in whole.steps.values()}) == 6
