"""The last step of composing: what one choice here means in SkyRL's, Megatron's and vLLM's own settings.

Everything is written into SkyRL's configuration, which is then the whole truth about the run and is stored as such.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..contract import Contract, encode
from ..model.config import DecoderConfig
from ..runtimes.vllm.pages import page_bytes, pages_of_sequence
from ..runtimes.vllm.settings import TRANSFER_BACKEND, HybridPages, settings_from_contract
from .config import LaunchConfig

EXTENSION = "skyrl_isoexec.launch.engine_extension.EngineExtension"
LOGPROBS_MODE = "processed_logprobs"
"""After the temperature, which is what the trainer scores."""
OURS = (
    "additional_config",
    "compilation_config",
    "dtype",
    "hf_overrides",
    "logprobs_mode",
    "mamba_block_size",
    "mamba_cache_mode",
    "weight_transfer_config",
    "worker_cls",
    "worker_extension_cls",
)
"""Engine arguments that decide what is computed or compared; a user's other value is refused."""
NEUTRAL = (
    "block_size",
    "disable_log_stats",
    "enable_log_requests",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_logprobs",
    "max_model_len",
    "num_gpu_blocks_override",
    "seed",
    "uvicorn_log_level",
)
"""Engine arguments of a user's that leave every log-probability alone; in the isoexec arm all others are refused."""


def num_pages(launch: LaunchConfig, model: DecoderConfig, *, prefix_caching: bool) -> int:
    """Pages of the engine's cache that fit into runtime.kv_cache_mib; ValueError if that is not one sequence."""
    size, budget = launch.runtime.page_size, launch.runtime.kv_cache_mib * 2**20
    pages = budget // page_bytes(model, launch.topology.engine.tp, size)
    spare = 1 if model.hybrid else 0  # a pool of several groups has a page that is nobody's
    if pages < spare + pages_of_sequence(model, size, model.max_position, prefix_caching):
        raise ValueError(
            f"runtime.kv_cache_mib={launch.runtime.kv_cache_mib} holds {pages} pages of {size} tokens, less than one "
            f"sequence of {model.max_position}; raise it"
        )
    return pages


def engine_arguments(
    launch: LaunchConfig, model: DecoderConfig, contract: Contract | None, *, prefix_caching: bool
) -> dict[str, Any]:
    """What vLLM's engine is given beside SkyRL's own arguments."""
    arguments: dict[str, Any] = {
        "worker_extension_cls": EXTENSION,
        "logprobs_mode": LOGPROBS_MODE,
        "max_model_len": model.max_position,
    }
    if contract is not None:
        settings = settings_from_contract(encode(contract).decode(), enforce=True)
        states = HybridPages(page_size=launch.runtime.page_size, prefix_caching=prefix_caching)
        chosen = settings.engine_arguments(
            dtype=model.dtype, device=launch.runtime.device, hybrid=states if model.hybrid else None
        )
        arguments.update(chosen, worker_extension_cls=EXTENSION)
        arguments["block_size"] = launch.runtime.page_size
    pages = num_pages(launch, model, prefix_caching=prefix_caching)
    if launch.runtime.transport == "gloo":
        arguments["weight_transfer_config"] = {"backend": TRANSFER_BACKEND}
    if launch.runtime.device == "cuda":
        arguments["kv_cache_memory_bytes"] = launch.runtime.kv_cache_mib * 2**20
    else:
        arguments["num_gpu_blocks_override"] = pages
        arguments["enable_sleep_mode"] = False  # there is no device memory to give back
    return arguments


def assemble(launch: LaunchConfig, cfg: Any, checkpoint: Path, model: DecoderConfig, contract: Contract | None) -> None:
    """Complete SkyRL's configuration in place for this checkpoint; trainer and engine get the contract's same bytes.

    A user's own engine arguments win, but for those in OURS: ValueError.
    """
    policy, ref = cfg.trainer.policy.model, cfg.trainer.ref.model
    if ref.path in (None, policy.path):
        ref.path = str(checkpoint)
    policy.path = str(checkpoint)
    told: dict[str, Any] = {"exec": launch.exec.name, "transport": launch.runtime.transport}
    if contract is not None:
        told["contract"] = encode(contract).decode()
    for role in (cfg.trainer.policy, cfg.trainer.ref):
        role.megatron_config.model_config_kwargs = {**role.megatron_config.model_config_kwargs, "isoexec": told}
    engine = cfg.generator.inference_engine
    arguments = engine_arguments(launch, model, contract, prefix_caching=engine.enable_prefix_caching)
    if contract is not None and engine.engine_init_kwargs.get("enable_expert_parallel"):
        raise ValueError(
            "generator.inference_engine.engine_init_kwargs.enable_expert_parallel=true: an engine's experts are cut "
            "over its tensor ranks; leave it out, and set topology.engine.tp"
        )
    unproven = sorted(engine.engine_init_kwargs.keys() - {*OURS, *NEUTRAL}) if contract is not None else []
    if unproven:
        raise ValueError(
            f"generator.inference_engine.engine_init_kwargs.{unproven[0]}={engine.engine_init_kwargs[unproven[0]]!r}: "
            f"nobody has shown that it leaves the bits alone; leave it out (known are {', '.join(NEUTRAL)})"
        )
    for name in OURS:
        if name in arguments and engine.engine_init_kwargs.get(name, arguments[name]) != arguments[name]:
            raise ValueError(
                f"generator.inference_engine.engine_init_kwargs.{name}={engine.engine_init_kwargs[name]!r} is not "
                f"{arguments[name]!r}, which this run needs; leave it out"
            )
    engine.engine_init_kwargs = {**arguments, **engine.engine_init_kwargs}
