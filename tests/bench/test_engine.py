"""The engine benchmark: one process an arm, the same question to all, a table, and no row for an arm that failed."""

import argparse
import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from skyrl_isoexec.bench.commands import add_parser
from skyrl_isoexec.bench.engine import ARMS, OWN, ask, run, table
from skyrl_isoexec.runtimes.vllm.throughput import Question, engine_arguments, gpu_seconds, stock_folder


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(dest="group", required=True))
    return parser.parse_args(["bench", "engine", *arguments])


def checkpoint(folder: Path) -> str:
    (folder / "config.json").write_text("{}")
    return str(folder)


def never(*_: object) -> dict[str, Any]:
    raise AssertionError("an arm was started")


def test_every_arm_is_asked_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def answer(arm: str, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        asked.append((arm, question))
        rate = {"isoexec": 100.0, "stock": 110.0}.get(arm)
        if rate is None:
            return {"failed": "exit code 1"}
        return {"rows": [{"sequences": count, "tokens_per_s": rate * count} for count in question["sequences"]]}

    out, folder = tmp_path / "bench.json", checkpoint(tmp_path)
    assert run(parsed(folder, "--sequences", "1", "16", "--out", str(out)), answer) == 1
    assert [arm for arm, _ in asked] == list(ARMS) and len({json.dumps(question) for _, question in asked}) == 1
    shown = capsys.readouterr().out
    assert "| 16 | 1,600 | 1,760 | - | 1.10 |" in shown and "batch-invariant: exit code 1" in shown
    assert json.loads(out.read_text())["arms"]["isoexec"]["rows"][1]["tokens_per_s"] == 1600.0


WRONG = {
    "--arms mine": "--arms mine: there are isoexec",
    "--arms": "--arms names none",
    "--sequences": "--sequences []: give 1 or more",
    "--sequences 4 -1": "--sequences [4, -1]",
    "--tokens 1": "--tokens 1: give 2 or more",
    "--repeats 0": "--repeats 0",
    "--seconds -5": "--seconds -5",
    "--sequences 4 --profiled 4 8": "--profiled 8 is none of --sequences [4]",
    "--out /nowhere/x.json": "--out /nowhere/x.json cannot be written",
    "--out /": "--out / cannot be written",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments_are_refused_before_an_arm(words: str, tmp_path: Path, capsys) -> None:
    assert run(parsed(checkpoint(tmp_path), *words.split()), never) == 2
    assert f"refused: {WRONG[words]}" in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused(tmp_path: Path, capsys) -> None:
    assert run(parsed(str(tmp_path / "none")), never) == 2
    assert "has no config.json" in capsys.readouterr().err


def test_no_arm_has_a_variable_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []

    def started(command: object, env: dict[str, str], **_: object) -> subprocess.CompletedProcess:
        given.append(env)
        return subprocess.CompletedProcess(command, 0, stdout='{"rows": []}')

    for name in ("VLLM_BATCH_INVARIANT", "TORCHDYNAMO_DISABLE", "HOME"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(subprocess, "run", started)
    for arm in ARMS:
        assert ask(arm, {}, 9.0) == {"rows": []}
    for (_, own), env in zip(ARMS.values(), given, strict=True):
        assert env["HOME"] == "1" and {name: env[name] for name in env.keys() & OWN} == own


def test_nothing_measured_is_an_empty_table() -> None:
    assert table({"stock": {"failed": "no answer in 9 s"}}).splitlines()[-1] == "stock: no answer in 9 s"


def test_kernels_are_named_where_they_were_timed() -> None:
    rows = [{"sequences": 1, "tokens_per_s": 9.0}, {"sequences": 128, "tokens_per_s": 99.0, "kernels_s": 0.0015}]
    assert table({"stock": {"rows": rows}}).splitlines()[-1] == "stock, 128 sequences: 1.50 ms of a step in kernels"


def test_a_trace_is_what_the_gpu_did(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "dur": 1500.0}, {"ph": "X", "cat": "gpu_memset", "dur": 500.0},
        {"ph": "X", "cat": "cpu_op", "dur": 9e6}, {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    with gzip.open(tmp_path / "rank0.1.pt.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert gpu_seconds(tmp_path) == 0.002
    with pytest.raises(RuntimeError, match="no trace of a kernel"):
        gpu_seconds(tmp_path)  # each is read once


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "head_dim": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
}  # fmt: skip
HYBRID = LLAMA | {
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "full_attention_interval": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "tie_word_embeddings": True,
}  # fmt: skip


def asked(folder: Path, arm: str, fields: dict[str, Any]) -> Question:
    (folder / "config.json").write_text(json.dumps(fields))
    return Question(arm=arm, model=str(folder), sequences=(1,), prompt=8, tokens=8, repeats=1, implementation="cpu")


def different(ours: dict[str, Any], stock: dict[str, Any]) -> set[str]:
    return {name for name in ours.keys() | stock.keys() if ours.get(name) != stock.get(name)}


def test_arms_differ_in_what_is_theirs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, stock = (engine_arguments(asked(tmp_path, arm, LLAMA)) for arm in ("isoexec", "stock"))
    assert different(ours, stock) == {
        "additional_config", "block_size", "compilation_config", "hf_overrides", "worker_cls", "worker_extension_cls",
    }  # fmt: skip
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    invariant = engine_arguments(asked(tmp_path, "stock", LLAMA))
    assert invariant == stock | {"attention_backend": "FLASH_ATTN"}


def test_a_hybrid_has_pages_for_its_states_and_stock_the_whole_model(tmp_path: Path) -> None:
    question = asked(tmp_path, "stock", HYBRID)
    ours, stock = engine_arguments(asked(tmp_path, "isoexec", HYBRID)), engine_arguments(question)
    assert ours["block_size"] % 64 == 0 and ours["hf_overrides"] == {"architectures": ["IsoExecHybridForCausalLM"]}
    assert stock["additional_config"] == {"gdn_prefill_backend": "triton"}
    assert (stock["load_format"], stock["language_model_only"]) == ("dummy", True)
    made = tmp_path / "whole"
    made.mkdir()
    assert stock_folder(question, made) == str(made)
    whole = json.loads((made / "config.json").read_text())
    assert whole["architectures"] == ["Qwen3_5ForConditionalGeneration"] and whole["text_config"] == HYBRID | {
        "mamba_ssm_dtype": "float32"
    }
    assert whole["tie_word_embeddings"] is True and "vision_config" not in whole
    assert stock_folder(asked(tmp_path, "stock", LLAMA), made) == str(tmp_path)


def test_a_stock_engine_reads_how_many_layers_are_dense(tmp_path: Path) -> None:
    """vLLM's class asks for fields by their names before transformers 5; all others are as they were."""
    fields = {"model_type": "glm4_moe_lite", "hidden_size": 8}
    new = fields | {"mlp_layer_types": ["dense", "sparse", "sparse"]}
    published = fields | {"first_k_dense_replace": 2}
    made = tmp_path / "stock"
    made.mkdir()
    for given, added in ((new, {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0}), (published, {})):
        assert stock_folder(asked(tmp_path, "stock", given), made) == str(made)
        assert json.loads((made / "config.json").read_text()) == given | added
