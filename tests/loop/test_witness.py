"""The evidence that a step leaves: its digest follows every bit of the rollouts, its counters are the engine's own."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

from skyrl_isoexec.launch import witness

TEXT = """\
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1.6e+01
vllm:num_requests_running{engine="0",model_name="m"} 2.0
"""


def batch() -> dict[str, torch.Tensor]:
    return {
        "sequences": torch.arange(6).view(2, 3),
        "attention_mask": torch.ones(2, 3, dtype=torch.int64),
        "loss_mask": torch.ones(2, 2, dtype=torch.int64),
        "rollout_logprobs": -torch.arange(4, dtype=torch.float32).view(2, 2),
        "rewards": torch.zeros(2),
    }


def test_digest_follows_bits_of_rollouts_only() -> None:
    first = witness.digest(batch())
    assert first == witness.digest(batch()) and len(first) == 64
    other = batch()
    other["rewards"] += 1
    assert witness.digest(other) == first
    for name in witness.ROLLOUT:
        changed = batch()
        changed[name].view(-1).view(torch.uint8)[0] ^= 1
        assert witness.digest(changed) != first, name


def test_digest_needs_everything() -> None:
    for name in witness.ROLLOUT:
        with pytest.raises(KeyError, match=name):
            witness.digest({**batch(), name: None})


def test_counters_are_read_from_prometheus_text() -> None:
    assert witness.parse(TEXT) == [("isoexec/num_preemptions", 3), ("isoexec/prefix_cache_hits", 16)]


def test_counters_are_summed_over_servers_and_missing_ones_left_out() -> None:
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(TEXT.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Metrics)
    url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert witness.counters([url, url]) == {"isoexec/num_preemptions": 6, "isoexec/prefix_cache_hits": 32}
    finally:
        server.shutdown()
        server.server_close()
    assert witness.counters([url]) == {}
