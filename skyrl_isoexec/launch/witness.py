"""What a step leaves as evidence beside its metrics: a digest of its rollouts and the engines' own counters."""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

import torch

DIGEST = "isoexec/rollouts_sha256"
ROLLOUT = ("sequences", "attention_mask", "loss_mask", "rollout_logprobs")
COUNTERS = {
    "vllm:num_preemptions_total": "isoexec/num_preemptions",
    "vllm:prefix_cache_hits_total": "isoexec/prefix_cache_hits",
}
"""{vLLM's counter: the metric that holds its sum over the engines since they started}."""


def digest(batch: Mapping[str, torch.Tensor | None]) -> str:
    """SHA-256 over shapes, dtypes and bytes of a step's token ids, masks and rollout log-probabilities, in order.

    KeyError if the batch lacks one of them.
    """
    found = hashlib.sha256()
    for name in ROLLOUT:
        tensor = batch[name]
        if tensor is None:
            raise KeyError(name)
        tensor = tensor.detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def counters(urls: Sequence[str]) -> dict[str, int]:
    """Sums of COUNTERS over the servers; without a counter that none shows, and empty if one does not answer."""
    sums: dict[str, int] = {}
    for url in urls:
        try:
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
                text = answer.read().decode()
        except (urllib.error.URLError, OSError):
            return {}
        for name, value in parse(text):
            sums[name] = sums.get(name, 0) + value
    return sums


def parse(text: str) -> list[tuple[str, int]]:
    """(our metric, value) for every sample of COUNTERS in Prometheus' text format."""
    found = []
    for line in text.splitlines():
        name = line.split("{", 1)[0].split(" ", 1)[0]
        if name in COUNTERS:
            found.append((COUNTERS[name], int(float(line.rsplit(" ", 1)[1]))))
    return found
