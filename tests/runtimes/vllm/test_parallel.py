"""Engines with processes of their own: two workers give the bits of one, and HTTP carries them unchanged."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from skyrl_isoexec.contract import digest  # noqa: E402
from skyrl_isoexec.model.digest import tensor_digest  # noqa: E402
from skyrl_isoexec.model.shard import Shard  # noqa: E402
from skyrl_isoexec.patching import series_digest  # noqa: E402
from skyrl_isoexec.schedule.bits import count_mismatches  # noqa: E402

pytestmark = pytest.mark.slow

TWO_WORKERS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def check(expected: Any, prompts: list[list[int]], results: list[dict[str, Any]]) -> None:
    """Log-probabilities of sampled tokens against the plain decoder outside vLLM."""
    got, want = [], []
    for prompt, result in zip(prompts, results, strict=True):
        rows = expected.logprobs(prompt + result["tokens"])
        got += result["logprobs"]
        want += [rows[len(prompt) - 1 + i, token].item() for i, token in enumerate(result["tokens"])]
    assert count_mismatches(torch.tensor(got), torch.tensor(want)) == (0, 32 * len(prompts))


def of_contract(contract, dtype: str, pages: Any = None, **changes: Any) -> dict[str, Any]:
    """Engine arguments of two workers that were handed a contract and serve committed weights only."""
    from skyrl_isoexec.contract import encode
    from skyrl_isoexec.runtimes.vllm.settings import settings_from_contract

    settings = settings_from_contract(encode(contract(dtype, tp=2, **changes)).decode(), enforce=True)
    return settings.engine_arguments(dtype=dtype, hybrid=pages) | TWO_WORKERS


@pytest.mark.parametrize("kind", ["experts", "hybrid", "latent"])
def test_two_workers_equal_one(
    arguments, checkpoint, of_transformers, contract, reference, prompts, hybrid, experts, latent, kind: str
) -> None:
    """TP=2 through vLLM's processes and collectives against the whole decoder, before and after an update.

    Experts come one by one from the first checkpoint, and whole in the update.
    """
    from skyrl_isoexec.runtimes.vllm.settings import HybridPages

    changes = {"experts": experts, "hybrid": hybrid, "latent": latent}[kind]
    pages = HybridPages(page_size=64, prefix_caching=True) if kind == "hybrid" else None
    first = of_transformers if kind == "experts" else checkpoint
    old, new = first("float32", seed=0, **changes), checkpoint("float32", seed=1, **changes)
    agreed = contract("float32", tp=2, **changes)
    made = digest(agreed)
    task = {
        "checkpoint": str(old),
        "new_checkpoint": str(new),
        "prompts": prompts,
        "contract": made,
        "arguments": arguments("float32")
        | of_contract(contract, "float32", pages, **changes)
        | {"max_num_batched_tokens": 24, "weight_transfer_config": {"backend": "gloo"}},
    }
    program = Path(__file__).with_name("two_workers.py")
    done = subprocess.run([sys.executable, program, json.dumps(task)], capture_output=True, text=True, timeout=280)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert found, done.stderr[-4000:]
    result = json.loads(found[0].removeprefix("RESULT"))
    check(reference(old), prompts, result["before"])
    check(reference(new), prompts, result["after"])
    first, second = result["facts"]
    assert first == second and first["degree.tp"] == 2 and first["contract.digest"] == made
    assert first["plugin.log_softmax"] and first["patch.vllm"] == series_digest("vllm")
    operators = len(agreed.composition) - 1  # one entry is the model's own code
    assert result["served"][0] == result["served"][1] and len(result["served"][0]) == 2 * operators
    for name, tensor in reference(new).decoder.named_parameters():
        for worker in result["arrived"]:
            part = worker[name]
            shard = Shard(dim=part["dim"], parts=part["parts"], blocks=tuple(part["blocks"]))
            assert part["digest"] == tensor_digest(shard.slice(tensor, part["rank"])), name


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    """One HTTP call; JSON both ways."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        content = reply.read()
    return json.loads(content) if content else None


@pytest.fixture
def server(arguments, checkpoint, contract, tmp_path):
    """vLLM's own server with two workers over the bfloat16 checkpoint: its address, and its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint("bfloat16"))]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
    for name, value in (arguments("bfloat16") | of_contract(contract, "bfloat16")).items():
        option = "--" + name.replace("_", "-")
        if value is True:
            command += [option]
        elif value is not False:
            command += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 240
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                call(url + "/version")
                break
            time.sleep(0.5)
        yield url, log
    finally:
        process.terminate()
        process.wait(60)


def test_http(server, checkpoint, contract, reference, prompts) -> None:
    """Tokens in, tokens and log-probabilities out, as JSON; facts and syncs over the same address."""
    url, log = server

    def rpc(method: str, **arguments: Any) -> list[dict[str, Any]]:
        return call(url + "/collective_rpc", {"method": method, "kwargs": arguments})["results"]

    def generate(prompt: list[int], **extra: Any) -> dict[str, Any]:
        sampling = {"max_tokens": 32, "logprobs": 0, "ignore_eos": True, "seed": 3} | extra
        return call(url + "/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling})["choices"][0]

    made = digest(contract("bfloat16", tp=2))
    assert rpc("isoexec_begin_sync", epoch=7) == [{"begun": 7}] * 2
    assert [part["lm_head.weight"]["rank"] for part in rpc("isoexec_arrived")] == [0, 1]
    assert rpc("isoexec_commit", epoch=7, contract_digest=made) == [{"committed": 7}] * 2
    results = []
    for prompt in prompts:
        choice = generate(prompt, extra_args={"isoexec_epoch": 7, "isoexec_scored": True})
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        results.append({"tokens": choice["token_ids"], "logprobs": logprobs})
    check(reference(checkpoint("bfloat16")), prompts, results)
    first, second = rpc("isoexec_facts")
    assert first == second and first["contract.digest"] == made and first["environment.TORCHDYNAMO_DISABLE"] == "1"
    with pytest.raises(urllib.error.HTTPError) as refusal:
        rpc("isoexec_commit", epoch=8, contract_digest="f00d")
    assert "isoexec refused: isoexec_commit: contract_digest is 'f00d'" in refusal.value.read().decode()
    with pytest.raises(urllib.error.URLError):
        generate(prompts[0])
    assert "isoexec refused: request" in log.read_text() and "isoexec_epoch is None" in log.read_text()
