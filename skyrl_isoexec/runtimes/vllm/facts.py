"""What a worker really runs, read back from the live process: for a launcher to compare with the contract."""

from __future__ import annotations

from typing import Any

from skyrl_isoexec.model.facts import Fact, decoder_facts, device_facts
from skyrl_isoexec.model.probe import probe
from skyrl_isoexec.model.sequences import gdn_heads
from skyrl_isoexec.runtimes.vllm.install import BACKEND, MODELS, has_logprobs
from skyrl_isoexec.runtimes.vllm.pages import state_shapes
from skyrl_isoexec.runtimes.vllm.settings import TRANSFER_BACKEND
from skyrl_isoexec.runtimes.vllm.steps import without_rehearsal

PATCHED = ("vllm",)
"""Patched upstreams that an engine's arithmetic passes through."""


def plugin_facts() -> dict[str, bool]:
    """Whether vLLM's registries hold our names; vLLM does not say when a plugin failed to load."""
    from vllm import ModelRegistry
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return {
        "plugin.architecture": ModelRegistry.models.keys() >= MODELS.keys(),
        "plugin.attention": AttentionBackendEnum.CUSTOM.get_path() == BACKEND,
        "plugin.transfer": TRANSFER_BACKEND in WeightTransferEngineFactory._registry,
    }


def engine_facts(worker: Any) -> dict[str, Fact]:
    """Options of vLLM as they are after its own defaults and corrections, and the type of the live cache.

    A hybrid has one more: how states are cached.
    """
    config, model = worker.vllm_config, worker.model_runner.get_model()
    cache, scheduler, kind = config.cache_config, config.scheduler_config, type(worker)
    hybrid = {"engine.mamba_cache_mode": cache.mamba_cache_mode} if model.config.hybrid else {}
    return {
        **hybrid,
        "engine.block_size": cache.block_size,
        "engine.cache_dtype": str(model.pages[model.last_attention].kv_cache.dtype).removeprefix("torch."),
        "engine.enable_chunked_prefill": scheduler.enable_chunked_prefill,
        "engine.enable_prefix_caching": cache.enable_prefix_caching,
        "engine.enforce": getattr(getattr(worker, "isoexec_settings", None), "enforce", False),
        "engine.enforce_eager": config.model_config.enforce_eager,
        "engine.logits_processors": foreign_processors(worker),
        "engine.logprobs_mode": str(config.model_config.logprobs_mode),
        "engine.max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "engine.max_num_seqs": scheduler.max_num_seqs,
        "engine.seed": config.model_config.seed,
        "engine.worker_class": f"{kind.__module__}.{kind.__qualname__}",
    }


def runner(worker: Any) -> int:
    """Which of vLLM's model runners a worker has, by its class: the second one's lie in a package of their own."""
    return 2 if type(worker.model_runner).__module__.startswith("vllm.v1.worker.gpu.") else 1


def foreign_processors(worker: Any) -> str:
    """Classes in the live sampler that change logits and are not vLLM's own; vLLM also loads those of any package.

    The second runner's sampler takes none: there it is the sampler itself that is looked at.
    """
    from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS

    if runner(worker) == 2:
        from vllm.v1.worker.gpu.sample.sampler import Sampler

        kind = type(worker.model_runner.sampler)
        return "" if kind is Sampler else f"{kind.__module__}.{kind.__qualname__}"
    kinds = {type(one) for one in worker.model_runner.input_batch.logitsprocs.all}
    return ", ".join(sorted(f"{k.__module__}.{k.__qualname__}" for k in kinds - set(BUILTIN_LOGITS_PROCESSORS)))


def own_attention(model: Any) -> bool:
    """Whether every layer attends over its pages with the model's kernels, scale and latent, if it has one."""
    pages = [p for layer, p in enumerate(model.pages) if model.config.attends(layer)]
    wanted = (model.kernels, model.config.scale, model.config.kv_lora_rank)
    return all((p.impl.kernels, p.impl.scale, getattr(p.impl, "latent", None)) == wanted for p in pages)


def own_recurrence(model: Any) -> bool:
    """Whether every other layer keeps its states with the model's kernels and heads, and as these lay them out."""
    pages = [p for layer, p in enumerate(model.pages) if not model.config.attends(layer)]
    if not pages:
        return True
    heads, shapes = gdn_heads(model.config, model.axis.size), state_shapes(model.config, model.axis.size, model.kernels)
    return all(
        p.kernels is model.kernels
        and p.heads == heads
        and tuple((tuple(state.shape[1:]), state.dtype) for state in p.kv_cache) == shapes
        for p in pages
    )


def graph_facts(worker: Any) -> dict[str, Fact]:
    """What decides how a GPU engine runs: its chip, and what vLLM compiles and captures, after its own corrections."""
    compilation = worker.vllm_config.compilation_config
    return {
        **device_facts(),
        "engine.compilation_mode": compilation.mode.name,
        "engine.cudagraph_mode": compilation.cudagraph_mode.name,
        "engine.runner": runner(worker),
    }


def worker_facts(worker: Any) -> dict[str, Fact]:
    """Facts of one worker, flat plain data; TypeError for a model that is not built from a contract."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    model = _model(worker)
    if model.settings.contract is None:
        raise TypeError("this engine was started without a contract and has no facts to compare with one")
    device = model.model.embed_tokens.weight.device
    with device:  # how arithmetic rounds is found out where the model computes
        found = decoder_facts(model, model.settings.decoded, PATCHED)
    return {
        **found,
        **plugin_facts(),
        **engine_facts(worker),
        **(graph_facts(worker) if device.type == "cuda" else {}),
        "runtime": "vllm",
        "model.class": type(model).__name__,
        "model.one_place": found["model.one_place"] and own_attention(model) and own_recurrence(model),
        "degree.tp": get_tp_group().world_size,
        "degree.pp": get_pp_group().world_size,
        "plugin.log_softmax": has_logprobs(model.kernels),
    }


def _model(worker: Any) -> Any:
    model = worker.model_runner.get_model()
    if type(model).__name__ not in MODELS:
        raise TypeError(f"a {type(model).__name__} is not built from a contract and has no facts")
    return model


class FactsExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`; the methods are called through `collective_rpc`."""

    def isoexec_facts(self) -> dict[str, Fact]:
        """See `worker_facts`."""
        return worker_facts(self)

    def isoexec_probe(self) -> dict[str, str | None]:
        """{"probe": digest of a short forward of the model}, see `model.probe`; RuntimeError in a sleeping worker."""
        if getattr(self, "isoexec_asleep", False):
            raise RuntimeError("this worker is asleep, without the memory of its weights; wake it up before the probe")
        return {"probe": probe(_model(self))}

    def isoexec_served(self) -> dict[str, str]:
        """{served.<op>.<case>: its module} for every kernel that a step of this process has used."""
        return without_rehearsal(_model(self).kernels.served_facts())

    def isoexec_replays(self) -> int:
        """How many steps captured graphs have computed in this process."""
        return _model(self).steps.replays
