"""The engine benchmark: one process an arm, the same question to all, a table, and no row for an arm that failed."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_isoexec.bench.commands import add_parser
from skyrl_isoexec.bench.engine import ARMS, run, table
from skyrl_isoexec.runtimes.vllm.throughput import Question, engine_arguments


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(dest="group", required=True))
    return parser.parse_args(["bench", "engine", *arguments])


def test_every_arm_is_asked_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def answer(arm: str, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        asked.append((arm, question))
        rate = {"isoexec": 100.0, "stock": 110.0}.get(arm)
        if rate is None:
            return {"failed": "exit code 1"}
        return {"rows": [{"sequences": count, "tokens_per_s": rate * count} for count in question["sequences"]]}

    out = tmp_path / "bench.json"
    assert run(parsed("folder", "--sequences", "1", "16", "--out", str(out)), answer) == 1
    assert [arm for arm, _ in asked] == list(ARMS) and len({json.dumps(question) for _, question in asked}) == 1
    shown = capsys.readouterr().out
    assert "| 16 | 1,600 | 1,760 | - | 1.10 |" in shown and "batch-invariant: exit code 1" in shown
    assert json.loads(out.read_text())["arms"]["isoexec"]["rows"][1]["tokens_per_s"] == 1600.0


def test_an_unknown_arm_is_refused(tmp_path: Path) -> None:
    assert run(parsed("folder", "--arms", "mine", "--out", str(tmp_path / "x.json"))) == 2


def test_nothing_measured_is_an_empty_table() -> None:
    assert table({"stock": {"failed": "no answer in 9 s"}}).splitlines()[-1] == "stock: no answer in 9 s"


def test_arms_differ_in_what_is_theirs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"model": "folder", "family": "llama", "sequences": (1,), "prompt": 8, "tokens": 8, "repeats": 1}
    ours, stock = (engine_arguments(Question(arm=arm, **common)) for arm in ("isoexec", "stock"))
    assert {name for name in ours.keys() | stock.keys() if ours.get(name) != stock.get(name)} == {
        "additional_config", "block_size", "compilation_config", "hf_overrides", "worker_cls", "worker_extension_cls",
    }  # fmt: skip
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert engine_arguments(Question(arm="stock", **common)) == stock | {"attention_backend": "FLASH_ATTN"}
