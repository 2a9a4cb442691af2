"""What is refused before a model is built: options that it cannot compute exactly, and the contract of another one."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig

from skyrl_isoexec.contract import Contract
from skyrl_isoexec.kernels.bundle import Kernels
from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.facts import model_fields
from skyrl_isoexec.model.families import lookup
from skyrl_isoexec.runtimes.vllm.pages import hybrid_page_size, state_bytes, token_bytes
from skyrl_isoexec.runtimes.vllm.settings import (
    ARCHITECTURE,
    CACHE_MODE,
    HYBRID_ARCHITECTURE,
    WORKERS,
    EngineSettings,
)

GRAPHS = ("NONE", "FULL_DECODE_ONLY")
"""Modes of vLLM's CUDA graphs in which a step is captured whole or not at all."""


def read_model_config(vllm_config: VllmConfig, settings: EngineSettings) -> DecoderConfig:
    """The decoder's configuration, in the engine's dtype; refuses a checkpoint of another family than the settings'."""
    model = vllm_config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    return lookup(settings.family).from_hf(model.hf_config.to_dict(), dtype=dtype)


def check_engine(vllm_config: VllmConfig, config: DecoderConfig, settings: EngineSettings) -> None:
    """Refuse (ValueError) options of the engine that this model does not compute exactly, naming them."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    block, architecture = settings.schedule.kv_block, HYBRID_ARCHITECTURE if config.hybrid else ARCHITECTURE
    rules = (
        ("architectures", model.architecture, model.architecture == architecture, f"{architecture} for this model"),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, parallel.pipeline_parallel_size == 1, "1"),
        (
            "enable_expert_parallel",
            parallel.enable_expert_parallel,
            not parallel.enable_expert_parallel,
            "off: experts are cut over tensor_parallel_size",
        ),
        ("quantization", model.quantization, model.quantization is None, "none"),
        ("kv_cache_dtype", cache.cache_dtype, cache.cache_dtype == "auto", "auto"),
        ("enable_lora", vllm_config.lora_config is not None, vllm_config.lora_config is None, "off"),
        ("speculative_config", vllm_config.speculative_config, vllm_config.speculative_config is None, "none"),
        (
            "worker_cls",
            parallel.worker_cls,
            not settings.enforce or parallel.worker_cls in WORKERS.values(),
            f"one of {', '.join(WORKERS.values())}, where requests are checked",
        ),
        ("block_size", cache.block_size, cache.block_size % block == 0, f"a multiple of schedule.kv_block = {block}"),
        (
            "max_model_len",
            model.max_model_len,
            model.max_model_len <= config.max_position,
            f"at most max_position_embeddings = {config.max_position}",
        ),
    )
    _apply(*rules, *_graph_rules(vllm_config, config.hybrid), *_latent_rules(vllm_config))


Rule = tuple[str, object, bool, str]
"""(option, its value, whether that is supported, what is)."""


def _apply(*rules: Rule) -> None:
    for name, value, holds, supported in rules:
        if not holds:
            raise ValueError(f"engine option {name} = {value!r} is not supported; supported: {supported}")


def check_pages(vllm_config: VllmConfig, config: DecoderConfig, kernels: Kernels) -> None:
    """Refuse (ValueError) options with which vLLM would not page the states of a hybrid as this model computes them."""
    if config.hybrid:
        _apply(*_page_rules(vllm_config, config, kernels))


def _page_rules(vllm_config: VllmConfig, config: DecoderConfig, kernels: Kernels) -> tuple[Rule, ...]:
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    caching, chunk = cache.enable_prefix_caching, kernels.schedule.gdn_chunk
    tp, size = vllm_config.parallel_config.tensor_parallel_size, cache.block_size
    needed, mode = hybrid_page_size(config, tp, kernels), CACHE_MODE if caching else "none"
    amx = vllm_config.device_config.device_type == "cpu" and torch.cpu._is_amx_tile_supported()
    off = "; vLLM turns it off for a hybrid on a CPU with AMX tiles: use another machine" if amx else ""
    asked = cache.user_specified_mamba_block_size or cache.mamba_cache_mode != "none"
    return (
        ("block_size", size, size % chunk == 0, f"a multiple of schedule.gdn_chunk = {chunk}"),
        (
            "block_size",
            size,
            size * token_bytes(config, tp) >= state_bytes(config, tp, kernels),
            f"at least {needed}, where keys and values fill the {state_bytes(config, tp, kernels)} bytes of a state",
        ),
        ("enable_prefix_caching", caching, caching or not asked, f"on with mamba_block_size or mamba_cache_mode{off}"),
        (
            "enable_chunked_prefill",
            scheduler.enable_chunked_prefill,
            scheduler.enable_chunked_prefill or not amx,
            f"on{off}",
        ),
        ("mamba_cache_mode", cache.mamba_cache_mode, cache.mamba_cache_mode == mode, mode),
        (
            "mamba_block_size",
            cache.mamba_block_size,
            not caching or (cache.user_specified_mamba_block_size and cache.mamba_block_size == size),
            f"block_size = {size}, said in so many words",
        ),
        (
            "disable_hybrid_kv_cache_manager",
            scheduler.disable_hybrid_kv_cache_manager,
            not scheduler.disable_hybrid_kv_cache_manager,
            "off",
        ),
        (
            "num_hidden_layers",
            config.num_layers,
            config.num_layers >= config.full_attention_interval,
            f"at least full_attention_interval = {config.full_attention_interval}: one layer attends",
        ),
    )


def _graph_rules(vllm_config: VllmConfig, hybrid: bool) -> tuple[Rule, ...]:
    """Rules of an engine on a GPU, where vLLM would compile a model, and choose a runner, of its own."""
    if vllm_config.device_config.device_type != "cuda":
        return ()
    compilation = vllm_config.compilation_config
    mode, graphs = compilation.mode.name, compilation.cudagraph_mode.name
    ubatching = vllm_config.parallel_config.use_ubatching
    return (
        ("compilation_config.mode", mode, mode == "NONE", "NONE"),
        ("compilation_config.cudagraph_mode", graphs, graphs in GRAPHS, " or ".join(GRAPHS)),
        (
            "VLLM_USE_V2_MODEL_RUNNER",
            int(vllm_config.use_v2_model_runner),
            not (vllm_config.use_v2_model_runner and hybrid),
            "0: that runner has no pages of states",
        ),
        ("enable_dbo", ubatching, not ubatching, "off"),
    )


def _latent_rules(vllm_config: VllmConfig) -> tuple[Rule, ...]:
    """Rules of an engine on a CPU, where vLLM cuts no prompt of a model that it would compute with latents itself."""
    if vllm_config.device_config.device_type != "cpu":
        return ()
    own = vllm_config.model_config.use_mla
    return (("VLLM_MLA_DISABLE", "0" if own else "1", not own, "1: vLLM turns chunked prefill off with latents"),)


def check_contract(vllm_config: VllmConfig, config: DecoderConfig, contract: Contract) -> None:
    """Refuse (ValueError) to build another model, or at other degrees, than the contract's; names every field."""
    parallel, model = vllm_config.parallel_config, contract.model
    degrees = {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "cp": parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size,
        "ep": parallel.tensor_parallel_size if parallel.enable_expert_parallel else 1,
    }
    said = {"model.family": model.family, "model.dtype": model.dtype}
    live: dict[str, object] = {"model.family": config.family, "model.dtype": config.dtype}
    said |= {f"model.fields.{name}": value for name, value in model.fields.items()}
    live |= {f"model.fields.{name}": value for name, value in model_fields(config).items()}
    said["deployment.engine.tp"] = contract.deployment["engine"]["tp"]
    live["deployment.engine.tp"] = degrees["tp"]
    wrong = [
        f"{name} is {said.get(name, 'absent')!r}, this engine's is {live.get(name, 'absent')!r}"
        for name in sorted(said.keys() | live.keys())
        if (name in said) != (name in live) or said[name] != live[name]
    ]
    for claim in contract.claims.topology:
        degree = degrees.get(claim.axis, claim.degrees[0])
        if degree not in claim.degrees:
            wrong.append(f"claims.topology.{claim.axis} is {claim.degrees}, this engine's degree is {degree}")
    if wrong:
        raise ValueError(f"the contract is another engine's: {'; '.join(wrong)}")
