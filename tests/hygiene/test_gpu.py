"""Tests of a GPU that alone were asked for are not passed over in silence; among others they are skipped."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without CUDA")
def test_asked_for_without_a_gpu(root: Path) -> None:
    for place in ("tests/gpu", "tests/gpu/test_rows.py"):
        done = run(root, "-m", "gpu", place)
        assert (done.returncode, done.stdout) == (4, "")
        assert done.stderr.split("\n\n")[0].strip() == (
            "ERROR: -m gpu: torch sees no CUDA device; run these tests on a host with a Hopper GPU"
        )
    assert run(root, "-m", "not gpu", "tests/gpu/test_rows.py").returncode == 5, "all are deselected"
    done = run(root, "tests/gpu/test_rows.py")
    assert done.returncode == 0 and "skipped" in done.stdout and "passed" not in done.stdout
