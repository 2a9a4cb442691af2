"""Engines with processes of their own: two workers give the bits of one, and HTTP carries them unchanged."""

import contextlib
import hashlib
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


def test_two_workers_equal_one(arguments, checkpoint, reference, prompts) -> None:
    """TP=2 through vLLM's processes and collectives against the whole decoder, before and after an update."""
    old, new = checkpoint("float32"), checkpoint("float32", seed=1)
    task = {
        "checkpoint": str(old),
        "new_checkpoint": str(new),
        "prompts": prompts,
        "arguments": arguments("float32")
        | TWO_WORKERS
        | {"max_num_batched_tokens": 24, "weight_transfer_config": {"backend": "gloo"}},
    }
    program = Path(__file__).with_name("two_workers.py")
    done = subprocess.run([sys.executable, program, json.dumps(task)], capture_output=True, text=True, timeout=280)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert found, done.stderr[-4000:]
    result = json.loads(found[0].removeprefix("RESULT"))
    check(reference(old), prompts, result["before"])
    check(reference(new), prompts, result["after"])
    assert [facts["tp"] for facts in result["facts"]] == [{"rank": 0, "size": 2}, {"rank": 1, "size": 2}]
    assert all(facts["log_softmax_is_ours"] and facts["weights_complete"] for facts in result["facts"])
    assert len({facts["pid"] for facts in result["facts"]}) == 2
    for name, tensor in reference(new).decoder.named_parameters():
        for worker in result["digests"]:
            part = worker[name]
            piece = tensor.detach() if part["dim"] is None else tensor.detach().chunk(2, part["dim"])[part["rank"]]
            data = piece.contiguous().view(torch.uint8).numpy().tobytes()
            assert part["sha256"] == hashlib.sha256(data).hexdigest(), name


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    """One HTTP call; JSON both ways."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        content = reply.read()
    return json.loads(content) if content else None


@pytest.fixture
def server(arguments, checkpoint, tmp_path):
    """vLLM's own server with two workers over the bfloat16 checkpoint: its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint("bfloat16"))]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
    for name, value in (arguments("bfloat16") | TWO_WORKERS).items():
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
        yield url
    finally:
        process.terminate()
        process.wait(60)


def test_http(server, checkpoint, reference, prompts) -> None:
    """Tokens in, tokens and log-probabilities out, as JSON; facts over the same address."""
    results = []
    for prompt in prompts:
        sampling = {"max_tokens": 32, "logprobs": 0, "ignore_eos": True, "seed": 3}
        reply = call(server + "/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling})
        choice = reply["choices"][0]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        results.append({"tokens": choice["token_ids"], "logprobs": logprobs})
    check(reference(checkpoint("bfloat16")), prompts, results)
    workers = call(server + "/collective_rpc", {"method": "isoexec_facts"})["results"]
    assert [facts["tp"]["rank"] for facts in workers] == [0, 1]
    for facts in workers:
        assert facts["architecture"] == "IsoExecForCausalLM" and facts["log_softmax_is_ours"]
        assert facts["environment"]["TORCHDYNAMO_DISABLE"] == "1"
