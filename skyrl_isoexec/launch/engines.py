"""Calls to every worker of every rollout engine, through the route that vLLM's servers have for it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TIMEOUT = 300.0
"""Seconds; a worker that is busy with a step answers after it."""


class EngineCallFailed(RuntimeError):
    """A worker raised, or its server did not answer."""


def call(urls: Sequence[str], method: str, **arguments: Any) -> dict[str, Any]:
    """{process: answer} of `method` on all workers of all servers at once, in the order of servers and ranks.

    EngineCallFailed names the server and says what came back.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(urls))) as pool:
        answers = list(pool.map(lambda url: _one(url, method, arguments), urls))
    found = {}
    for engine, results in enumerate(answers):
        for rank, result in enumerate(results):
            found[f"engine {engine} rank {rank}"] = result
    return found


def _one(url: str, method: str, arguments: dict[str, Any]) -> list[Any]:
    body = json.dumps({"method": method, "kwargs": arguments}).encode()
    request = urllib.request.Request(f"{url}/collective_rpc", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            text = answer.read()
    except (urllib.error.URLError, OSError) as error:
        said = error.read().decode(errors="replace")[-500:] if isinstance(error, urllib.error.HTTPError) else error
        raise EngineCallFailed(f"{method} on the engine at {url} failed: {said}") from error
    return json.loads(text)["results"] if text else []
