"""The table of operators: both arms of its rows compute the same, and an arm that fails leaves the other rows and arm.

On the CPU, at small sizes, with the CPU's implementations: it shows that the arms are called rightly, and no time.
"""

import argparse
import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyrl_isoexec.bench import cases, cases_experts, cases_latent, layers

MODELS = {
    "mixture": {"hidden": 64, "heads": 2, "kv": 1, "dim": 32, "mlp": 32, "vocab": 96,
                "experts": 8, "top": 3, "width": 32, "scoring": "softmax"},
    "latent": {"hidden": 64, "heads": 3, "dim": 48, "latent": 64, "rope": 16, "nope": 32, "value": 48,
               "experts": 8, "top": 2, "width": 32, "scoring": "sigmoid"},
}  # fmt: skip
OURS = {
    cases: ("attention", "linear", "logprob", "rmsnorm", "rope", "row_linear", "swiglu"),
    cases_experts: ("combine", "experts", "router", "swiglu"),
    cases_latent: ("mla",),
}
Outputs = dict[str, list[tuple[object, object]]]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict, list]]:
    """bench(models, refused) -> exit code, the JSON, and what each timed function returned."""
    for module, names in OURS.items():
        for name in names:
            monkeypatch.setattr(module, name, importlib.import_module(f"skyrl_isoexec.kernels.{name}.cpu"))
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(layers, "MODELS", MODELS)
    for name, value in {"QUICK_ROWS": (2,), "PREFILLS": ((2, 64),) * 2, "DECODES": ((2, 128),) * 5}.items():
        monkeypatch.setattr(layers, name, value)
    monkeypatch.setattr(cases_experts, "STEPS", (1, 5))
    monkeypatch.setattr(cases_experts, "BATCHES", (33,))
    for name, value in {"DECODES": ((1, 128), (3, 192)), "PREFILL": 160, "ROWS": (5,)}.items():
        monkeypatch.setattr(cases_latent, name, value)
    monkeypatch.setattr(cases, "copies", lambda make, num_bytes: [make()])
    monkeypatch.setattr(cases_latent, "copies", lambda make, num_bytes: [make()])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "none")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def run(*models: str, refused: tuple[str, ...] = (), seconds: float = 1e9) -> tuple[int, dict, list]:
        monkeypatch.setattr(layers, "refusals", lambda: dict.fromkeys(refused, "no gate"))
        returned = []

        def called(function: Callable, made: list[tuple]) -> float:
            returned.append(function(*made[0]))
            return 1.0

        out = tmp_path / "bench.json"
        given = argparse.Namespace(models=models, quick=True, seconds=seconds, out=out)
        code = layers.run(given, called)
        return code, json.loads(out.read_text()), returned

    return run


def failures(found: dict) -> int:
    """1: vLLM's fused experts cannot be called without a GPU."""
    failed = [row for row in found["results"] if "native_error" in row]
    assert {row["op"] for row in failed} <= {"experts"}
    return int(bool(failed))


def close(a: Tensor, b: Tensor) -> bool:
    """Within a few roundings to bf16."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item() < 0.02


def test_a_mixture_of_experts(bench: Callable[..., tuple[int, dict, list]]) -> None:
    code, found, returned = bench("mixture")
    assert code == failures(found)
    rows = [row for row in found["results"] if row["op"].startswith("experts")]
    assert [(row["op"], row["rows"]) for row in rows] == [("experts", 1), ("experts", 5), ("experts_batch", 33)]
    batch = rows[-1]
    assert batch["ratio"] == 1.0 and batch["native"] == "torch topk, grouped_mm", batch
    at = sum(2 if row["native_ms"] else 1 for row in found["results"][:2])
    assert close(returned[at], returned[at + 1])
    assert {row["op"] for row in found["results"]} >= {"prefill", "decode", "linear", "token_logprobs"}


def test_latent_attention(bench: Callable[..., tuple[int, dict, list]], capsys: pytest.CaptureFixture[str]) -> None:
    code, found, returned = bench("latent")
    results = found["results"]
    assert code == failures(found) and not any("error" in row for row in results), results
    assert [row["op"] for row in results[:5]] == ["mla_decode"] * 2 + ["mla_prefill", "mla_form", "head_linear"]
    assert all(row["native"] == "torch bmm" for row in results[:2])
    for at in (0, 2):
        assert close(returned[at], returned[at + 1])
    assert close(returned[8], returned[9].transpose(0, 1))
    assert "vllm FlashMLA cannot be called" in capsys.readouterr().out


def test_the_latent_form_is_the_expanded_one(
    bench: Callable[..., tuple[int, dict, list]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Tensor] = []

    def attend(_: object, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> None:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        kept.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale))

    monkeypatch.setattr(layers.Natives, "prefill", attend)
    _, found, returned = bench("latent")
    (at,) = [i for i, row in enumerate(found["results"]) if row["op"] == "mla_form"]
    assert close(returned[2 * at], kept[-1].transpose(0, 1))


def test_a_refused_region_leaves_the_others(bench: Callable[..., tuple[int, dict, list]]) -> None:
    code, found, _ = bench("latent", refused=("router",))
    assert code == 2 and {row["op"] for row in found["results"]} == {
        "mla_decode", "mla_prefill", "mla_form", "head_linear",
    }  # fmt: skip


def test_a_stock_arm_that_fails_says_why(bench: Callable[..., tuple[int, dict, list]]) -> None:
    monkey = pytest.MonkeyPatch()
    monkey.setattr(cases_experts, "of_vllm", lambda module, name: None)
    _, found, _ = bench("mixture")
    monkey.undo()
    first = found["results"][0]
    assert first["ours_ms"] == 1.0 and first["ratio"] is None and "cannot be imported" in first["native_error"]


def test_rows_without_time_are_named(bench: Callable[..., tuple[int, dict, list]], capsys) -> None:
    code, found, returned = bench("mixture", seconds=0.0)
    assert code == 1 and not returned and found["results"]
    assert all(row["error"] == "no time within 0 s" for row in found["results"])
    assert f"{len(found['results'])} of {len(found['results'])} rows failed" in capsys.readouterr().out
