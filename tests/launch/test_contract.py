"""The contract of a configuration: the same bytes everywhere, moved by what can change a bit, and by nothing else."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_isoexec.__main__ import main as isoexec
from skyrl_isoexec.contract import Contract, decode, digest, encode
from skyrl_isoexec.gate import run as gate_run
from skyrl_isoexec.gate import ways
from skyrl_isoexec.gate.record import GateError
from skyrl_isoexec.kernels.attention import gate as attention_gate
from skyrl_isoexec.launch import composition
from skyrl_isoexec.launch.compose import compose
from skyrl_isoexec.launch.composition import against_installation, compose_contract, decoder_config
from skyrl_isoexec.launch.expectation import expected
from skyrl_isoexec.schedule import Schedule

BASE = ("+exec=isoexec", "kernels.num_leaves=2", "runtime.page_size=32")
RELEVANT = {
    "kernels.kv_block": "32",
    "kernels.kv_partition": "256",
    "kernels.num_leaves": "4",
    "kernels": "reference",
    "model.dtype": "bfloat16",
    "model.shape.rms_norm_eps": "2e-6",
    "model.shape.rope_theta": "20000.0",
    "generator.sampling_params.temperature": "0.7",
}
"""Can change a bit."""
NEUTRAL = {
    "topology": "trainer_tp2",
    "runtime.kv_cache_mib": "128",
    "runtime.object_store_mib": "200",
    "run.name": "another",
    "run.seeded_requests": "false",
    "trainer.seed": "7",
    "trainer.gradient_checkpointing": "false",
    "trainer.max_training_steps": "9",
    "generator.inference_engine.max_num_seqs": "64",
    "generator.inference_engine.max_num_batched_tokens": "512",
    "generator.inference_engine.enable_prefix_caching": "false",
    "task.cache_dir": "/nowhere",
    "kernels.gdn": "cpr",
    "kernels.gdn_chunk": "32",
}
"""Proven not to."""


def built(*arguments: str) -> Contract:
    """The contract of a command line."""
    launch, cfg = compose([*BASE, *arguments])
    return compose_contract(launch, cfg, decoder_config(launch))


@pytest.fixture(scope="module")
def base() -> Contract:
    """The contract that others are compared with."""
    return built()


def test_same_bytes_in_another_process_folder_and_time(base: Contract, tmp_path: Path) -> None:
    variables = {"PYTHONHASHSEED": "7", "HOME": str(tmp_path), "TZ": "Asia/Tokyo", "LANG": "C"}
    done = subprocess.run(
        [sys.executable, "-m", "skyrl_isoexec", "contract", "build", *BASE],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        check=True,
    )
    assert done.stdout == encode(base)
    assert str(tmp_path) not in done.stdout.decode()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(300)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    relevant=st.sets(st.sampled_from(sorted(RELEVANT)), max_size=2), neutral=st.sets(st.sampled_from(sorted(NEUTRAL)))
)
def test_identities_move_with_what_they_are_of(base: Contract, relevant: set[str], neutral: set[str]) -> None:
    chosen = {name: RELEVANT[name] for name in relevant} | {name: NEUTRAL[name] for name in neutral}
    found = built(*(f"{name}={value}" for name, value in chosen.items())).identities
    assert (found.numerical_policy != base.identities.numerical_policy) == bool(relevant)
    assert (found.semantic != base.identities.semantic) == any(name.startswith("model.") for name in relevant)


@pytest.mark.parametrize("name", RELEVANT)
def test_each_relevant_choice_moves_the_policy(name: str, base: Contract) -> None:
    assert built(f"{name}={RELEVANT[name]}").identities.numerical_policy != base.identities.numerical_policy


@pytest.mark.parametrize("what", ["version", "kernel", "model", "launch", "patches"])
def test_code_moves_the_policy(what: str, base: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "0" * 64
    if what == "version":
        real = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "numpy" else real(name))
    elif what == "kernel":
        real = composition.impl_source
        monkeypatch.setattr(composition, "impl_source", lambda name: other if name == "rope.cpu" else real(name))
    elif what in ("model", "launch"):
        real = composition.source_digests
        monkeypatch.setattr(composition, "source_digests", lambda: {**real(), what: other})
    else:
        monkeypatch.setattr(composition, "series_digest", lambda package: other)
    found = built()
    assert found.identities.numerical_policy != base.identities.numerical_policy
    assert found.identities.semantic == base.identities.semantic
    monkeypatch.undo()
    assert against_installation(base) == []
    assert against_installation(found) != []


def test_no_record_no_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    def require(region: str, arch: str) -> str:
        raise GateError(f"gate: region {region}, arch {arch}: the record is missing")

    monkeypatch.setattr(composition, "require", require)
    with pytest.raises(GateError, match="region attention, arch cpu: the record is missing"):
        built()


def test_commands(base: Contract, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other, broken = tmp_path / "c.json", tmp_path / "d.json", tmp_path / "e.json"
    path.write_bytes(encode(base))
    other.write_bytes(encode(built("kernels.kv_block=32")))
    broken.write_bytes(encode(base).replace(b'"kv_block":16', b'"kv_block":32'))
    assert isoexec(["contract", "verify", str(path)]) == 0
    assert "9 gate records valid" in capsys.readouterr().out
    assert isoexec(["contract", "verify", str(broken)]) == 2
    said = capsys.readouterr().err
    assert "identities.numerical_policy" in said and "isoexec contract build" in said
    assert isoexec(["contract", "verify", str(tmp_path / "none.json")]) == 2
    assert isoexec(["contract", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert digest(base) in shown and "attention.cpu" in shown and "kv_block 16" in shown
    assert isoexec(["contract", "diff", str(path), str(path)]) == 0
    assert isoexec(["contract", "diff", str(path), str(other)]) == 1
    assert "kv_block" in capsys.readouterr().out
    assert isoexec(["contract", "build", "+exec=native"]) == 2
    assert "exec=native has no contract" in capsys.readouterr().err
    assert decode(path.read_bytes()) == base


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("verb", ["show", "build", "--help"])
def test_a_reader_that_leaves(verb: str, unbuffered: str, base: Contract, tmp_path: Path) -> None:
    """As `head` does: nothing is said, and the exit code is a closed pipe's."""
    path = tmp_path / "c.json"
    path.write_bytes(encode(base))
    arguments = {"show": [str(path)], "build": BASE, "--help": []}[verb]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "skyrl_isoexec", "contract", verb, *arguments],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 141 or verb == "--help"  # argparse itself passes over it where nothing is buffered


def test_expected_facts_name_both_runtimes(base: Contract) -> None:
    trainer, engine = expected(base, "trainer"), expected(base, "engine")
    assert trainer["runtime"] == "megatron" and engine["runtime"] == "vllm"
    assert trainer["contract.digest"] == engine["contract.digest"] == digest(base)
    shared = {name for name in trainer if name.startswith(("kernel.", "model.", "constant.", "version.", "source."))}
    assert len(shared) > 40 and all(
        trainer[name] == engine[name] for name in shared & engine.keys() if name != "model.class"
    )


@pytest.mark.parametrize(
    ("block", "partition", "shown"), [(16, 64, True), (64, 512, True), (64, 256, False), (128, 512, False)]
)
def test_a_gpu_has_the_orders_that_were_compared_there(block: int, partition: int, shown: bool) -> None:
    order = Schedule(kv_block=block, kv_partition=partition)
    composition._order(order, "cpu")
    if shown:
        composition._order(order, "sm90")
    else:
        with pytest.raises(GateError, match=f"kernels.kv_block={block}, kernels.kv_partition={partition}: no gate"):
            composition._order(order, "sm90")


def test_what_is_claimed_is_what_gates_and_gpu_tests_compute(root: Path) -> None:
    """The orders of attention, the default among them, and the most stages of a pipeline."""
    gate = (gate_run.SCHEDULE.kv_block, gate_run.SCHEDULE.kv_partition)
    long = (attention_gate.LONG["kv_block"], attention_gate.LONG["kv_partition"])
    text = (root / "tests" / "gpu" / "test_attention.py").read_text(encoding="utf-8")
    found = re.search(r"Schedule\(kv_block=(\d+), kv_partition=(\d+)\)", text)
    on_gpu = tuple(map(int, found.groups()))
    launch, _ = compose(["+exec=isoexec", "runtime=cuda", "kernels=sm90", "model.dtype=bfloat16"])
    assert composition.SOFTMAX["sm90"] == (gate, long, on_gpu)
    assert (launch.kernels.kv_block, launch.kernels.kv_partition) == on_gpu
    assert max(composition.STAGES) == max(len(bounds) - 1 for bounds in ways.BOUNDS)
