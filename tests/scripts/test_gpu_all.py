"""What a GPU host is asked to do, by a stand-in for its Python: order, devices, deadline, what a failure leaves out."""

import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_isoexec.launch import composition
from skyrl_isoexec.launch.compose import compose
from skyrl_isoexec.launch.preflight import check, machine

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """\
#!{python} -IS
import json, os, sys, time
given = sys.argv[1:]
def note(what):
    with open({log!r}, "a") as file:
        file.write(json.dumps([what, given, os.environ.get("CUDA_VISIBLE_DEVICES"), time.monotonic()]) + "\\n")
note("begin")
region = given[given.index("--region") + 1] if "--region" in given else None
time.sleep({slow}.get(region, 0.1))
note("end")
if given[:2] == ["-m", "skyrl.train"]:
    folder = next(item for item in given if item.startswith("run_dir=")).removeprefix("run_dir=")
    os.makedirs(folder + "/logs")
    open(folder + "/metrics.jsonl", "w").write("{{}}\\n")
sys.exit(int(region in {fails!r}))
"""
SHAPE = ("hidden_size=64", "vocab_size=64")
MIXTURE = (*SHAPE, "moe_intermediate_size=32")
SMALL = {
    "hybrid": (*SHAPE, "intermediate_size=64"),
    "moe": (*MIXTURE, "num_experts=8", "shared_expert_intermediate_size=32"),
    "mla": (*MIXTURE, "intermediate_size=64", "n_routed_experts=8"),
}
"""What makes a checkpoint of the script's small, and leaves the size of its pages."""
WORDS = {
    "gates": "--region", "run": "/runs/smollm2 ", "hybrid": "/runs/hybrid ", "moe": "/runs/moe ", "mla": "/runs/mla ",
    "checks": "offline", "flips": "expert_flips", "tests": "-m pytest", "bench": "bench layers",
    "engines": "bench engine ",
}  # fmt: skip
"""Part of the script -> words of its commands alone."""
Calls = list[tuple[str, list[str], str, float]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[Calls, set[str], str]]:
    """run(parts, deadline) -> what the stand-in saw, names in the archive, and what was printed."""

    def run_it(
        *parts: str, deadline: int = 60, slow: dict[str, float] | None = None, fails: tuple[str, ...] = (), **env: str
    ) -> tuple[Calls, set[str], str]:
        log, tools = tmp_path / "calls.jsonl", tmp_path / "tools"
        tools.mkdir()
        (tools / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0\necho GPU 1\n")
        (tools / "python").write_text(
            STAND_IN.format(python=sys.executable, log=str(log), slow=slow or {}, fails=fails)
        )
        for tool in tools.iterdir():
            tool.chmod(0o755)
        path = f"{tools}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", ROOT / "scripts" / "gpu_all.sh", tmp_path, tmp_path, tmp_path / "out", str(deadline), *parts],
            env={**os.environ, "PATH": path, "PYTHON": str(tools / "python"), "TMPDIR": str(tmp_path), **env},
            capture_output=True,
            text=True,
            timeout=120,
        )
        with tarfile.open(tmp_path / "out" / "all.tgz") as archive:
            names = {name.removeprefix("./") for name in archive.getnames()}
        return [tuple(json.loads(line)) for line in log.read_text().splitlines()], names, done.stdout + done.stderr

    return run_it


def trained(calls: Calls) -> dict[str, list[str]]:
    """{name of a run: its arguments}."""
    runs = [given[2:] for what, given, *_ in calls if what == "begin" and given[:2] == ["-m", "skyrl.train"]]
    return {next(item for item in given if item.startswith("run_dir=")).rpartition("/")[2]: given for given in runs}


def at(calls: Calls, what: str, *words: str) -> float:
    """When the only call with these words began or ended."""
    (found,) = [when for seen, given, _, when in calls if seen == what and all(w in " ".join(given) for w in words)]
    return found


def test_runs_wait_for_their_gates_alone(run: Callable[..., Any]) -> None:
    parts = ("gates", "run", "hybrid", "moe", "mla", "flips")
    calls, names, printed = run(*parts, slow={"decoder_mla": 4, "experts": 2})
    assert set(trained(calls)) == {"smollm2", "hybrid", "moe", "mla"}, printed
    assert at(calls, "end", "region decoder_mla") < at(calls, "begin", "skyrl.train", "/runs/mla ")
    assert at(calls, "end", "region experts") < at(calls, "begin", "skyrl.train", "/runs/moe ")
    assert at(calls, "begin", "skyrl.train", "/runs/hybrid ") < at(calls, "end", "region experts")
    assert {f"{name}.metrics.jsonl" for name in trained(calls)} <= names
    assert {"run_moe.tgz", "times.txt", "gate_gdn.log", "flips_decoder_mla.log", "records"} <= names
    assert not any(name.startswith(("runs", "hybrid/", "moe/")) for name in names)


def test_a_failed_gate_leaves_out_what_waits_for_it(run: Callable[..., Any]) -> None:
    calls, names, printed = run("gates", "run", "hybrid", "moe", "mla", fails=("decoder_hybrid_moe", "attention"))
    assert set(trained(calls)) == {"mla"}, "latent attention does not need the other one"
    assert "gate decoder_hybrid_moe failed" in printed or "gate attention failed: what waits for it" in printed
    assert "run_moe.log" not in names and "run_mla.log" in names


def test_a_deadline_ends_what_is_left_and_packs_the_rest(run: Callable[..., Any]) -> None:
    begin = time.monotonic()
    calls, names, printed = run("gates", "moe", deadline=7, slow={"gdn": 60})
    assert time.monotonic() - begin < 25 and not trained(calls)
    assert "gate_gdn, exit 124" in printed and "gate_experts.log" in names


@pytest.mark.parametrize("second", ["bench engines", "moe mla checks tests", ""])
def test_parts_go_to_the_second_gpu_by_name(run: Callable[..., Any], second: str) -> None:
    calls, _, _ = run(SECOND=second)
    devices = {
        part: {device for what, given, device, _ in calls if what == "begin" and word in " ".join(given)}
        for part, word in WORDS.items()
    }
    assert devices == {part: {"1" if part in second.split() else "0"} for part in devices}


def test_every_run_is_accepted_up_to_the_device(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the checkpoints' pages, but small: preflight looks at all but the GPU, the gates and the cores."""
    calls, _, printed = run("hybrid", "moe", "mla")
    made = [given for what, given, *_ in calls if what == "begin" and given[0].endswith("random_checkpoint.py")]
    assert len(made) == 3, printed
    monkeypatch.setattr(machine, "device", lambda name: None)
    monkeypatch.setattr(machine, "cores", lambda threads: None)
    monkeypatch.setattr(machine, "patches", lambda: None)
    monkeypatch.setattr(composition, "require", lambda region, arch: f"gates/{arch}/{region}@{'0' * 16}")
    for given in made:
        name = given[-1].rpartition("/")[2]
        out = tmp_path / f"small_{name}"
        small = [part for change in SMALL[name] for part in ("--set", change)]
        subprocess.run([sys.executable, *given[:-1], out, *small], cwd=ROOT, check=True, timeout=120)
        arguments = [a for a in trained(calls)[name] if not a.startswith(("model.path=", "run_dir="))]
        launch, cfg = compose([*arguments, f"model.path={out}", f"run_dir={tmp_path / name}"])
        contract = check(launch, cfg)
        assert contract is not None and contract.deployment["device"] == "cuda"
        engine = cfg.generator.inference_engine.engine_init_kwargs
        assert engine["num_gpu_blocks_override"] == 100
