"""What the engine is told: the strict form of `additional_config["isoexec"]`, and the host's arguments and environment.

There are two forms. With a contract, its text is all that is passed, and everything else is read from it; without one,
for offline use, the choices are passed by name, and no other process is promised the same ones.

Needs no vLLM and no torch, so that a launcher can compose and check an engine before it starts one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_isoexec.contract import Contract, decode, digest, validate
from skyrl_isoexec.kernels.selection import select
from skyrl_isoexec.schedule import Schedule

ARCHITECTURE = "IsoExecForCausalLM"
HYBRID_ARCHITECTURE = "IsoExecHybridForCausalLM"
"""The name for a model with recurrent layers."""
KEY = "isoexec"
FACTS_EXTENSION = "skyrl_isoexec.runtimes.vllm.facts.FactsExtension"
TRANSFER_BACKEND = "gloo"

WORKERS = {
    "cpu": "skyrl_isoexec.runtimes.vllm.cpu_worker.GuardedCPUWorker",
    "cuda": "skyrl_isoexec.runtimes.vllm.cuda_worker.GuardedWorker",
}

CONFIG_FORMAT = "isoexec"
STAND_INS = {"mimo": "qwen2"}
"""Families that transformers does not know -> the family whose configuration class has their fields; see `parser`."""

CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_MLA_DISABLE": "1",
}
"""Variables of the hosts that every process of a CPU engine needs before it imports torch.

The first keeps vLLM from compiling parts of its sampler, which it does even when told to be eager; the second lets
several workers share the cores of one machine. The third concerns vLLM's own latent attention, which it does not have
on a CPU: with it vLLM turns chunked prefill off, for our model too.
"""


def cuda_environment(*, runner: int | None) -> dict[str, str]:
    """The same for a CUDA engine of our model with vLLM's first or second runner; for None, of a stock one.

    vLLM's flashinfer sampler gives no log-probabilities and compiles itself at run time. Its second runner is the
    faster one, and vLLM's own choice for dense models; it has no pages of states yet.
    """
    chosen = {} if runner is None else {"VLLM_USE_V2_MODEL_RUNNER": str(runner - 1)}
    return {"VLLM_USE_FLASHINFER_SAMPLER": "0"} | chosen


CACHE_MODE = "all"
"""vLLM's `mamba_cache_mode` with a prefix cache: a state for every page; without one it is "none"."""

COMPILATION = {"mode": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY"}
"""`compilation_config` of a CUDA engine: vLLM compiles nothing, captures decode steps whole, runs others eagerly."""


@dataclass(frozen=True, kw_only=True)
class HybridPages:
    """How the cache of a model with recurrent layers is paged."""

    page_size: int
    """Tokens of a page: whole chunks and softmax blocks, at least `pages.hybrid_page_size`."""
    prefix_caching: bool
    """Whether the engine was told to find cached prefixes; without, a sequence has one page of states."""

    def engine_arguments(self) -> dict[str, Any]:
        """The engine's arguments for it. vLLM takes no size of states from an engine without a prefix cache."""
        if not self.prefix_caching:
            return {"block_size": self.page_size}
        return {"block_size": self.page_size, "mamba_block_size": self.page_size, "mamba_cache_mode": CACHE_MODE}


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Which model, which kernels and which order of arithmetic an engine computes, and for whom."""

    family: str
    """Name of a family under `model/families`."""
    kernels: str | Mapping[str, str]
    """For `load_kernels`: name of an implementation set, or operator -> name of its file."""
    schedule: Schedule
    enforce: bool = False
    """Whether only requests of the committed epoch are served, see `guard`."""
    contract: str | None = None
    """Canonical JSON of the contract that the three choices come from; made by `settings_from_contract`."""

    @property
    def decoded(self) -> Contract | None:
        """The contract as data."""
        return None if self.contract is None else decode(self.contract)

    @property
    def contract_digest(self) -> str | None:
        """SHA-256 of the contract, from the text that came."""
        return None if self.contract is None else digest(decode(self.contract))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `additional_config`."""
        if self.contract is not None:
            return {"contract": self.contract, "enforce": self.enforce}
        kernels = self.kernels if isinstance(self.kernels, str) else dict(self.kernels)
        chosen = {"family": self.family, "kernels": kernels, "schedule": self.schedule.to_dict()}
        return {"contract": None, "enforce": self.enforce} | chosen

    @classmethod
    def from_additional_config(cls, additional: Mapping[str, Any]) -> EngineSettings:
        """The settings under `KEY`; ValueError names what is missing, unknown or of the wrong type."""
        if KEY not in additional:
            raise ValueError(f'additional_config["{KEY}"] is missing: {ARCHITECTURE} has no settings of its own')
        given = additional[KEY]
        if not isinstance(given, Mapping):
            raise ValueError(f'additional_config["{KEY}"] is {given!r}, not a mapping')
        known = dict(BY_CONTRACT if given.get("contract") is not None else BY_NAME)
        unknown, missing = sorted(given.keys() - known.keys()), sorted(known.keys() - given.keys())
        if unknown or missing:
            raise ValueError(f'additional_config["{KEY}"]: unknown keys {unknown}, missing keys {missing}')
        for name, (kinds, needed) in known.items():
            if not isinstance(given[name], kinds):
                raise ValueError(f'additional_config["{KEY}"]["{name}"] is {given[name]!r}, not {needed}')
        if given["contract"] is not None:
            return settings_from_contract(given["contract"], enforce=given["enforce"])
        schedule = Schedule.from_dict(dict(given["schedule"]))
        return cls(family=given["family"], kernels=given["kernels"], schedule=schedule, enforce=given["enforce"])

    def engine_arguments(self, *, dtype: str, device: str = "cpu", hybrid: HybridPages | None = None) -> dict[str, Any]:
        """Arguments of vLLM's engine that select this model; the caller adds its own sizes, degrees and sampling mode.

        `dtype` is explicit because vLLM's "auto" turns a float32 checkpoint into bfloat16 on the CPU. `hybrid` is for a
        model with recurrent layers, and no other: ValueError if a contract says otherwise.
        """
        interval = 1 if self.decoded is None else self.decoded.model.fields.get("full_attention_interval", 1)
        if self.decoded is not None and (interval != 1) != (hybrid is not None):
            raise ValueError(
                f"hybrid is {hybrid!r}, the contract says model.full_attention_interval = {interval}; pages of states "
                "are for models in which it is not 1"
            )
        parser = {"config_format": CONFIG_FORMAT} if self.family in STAND_INS else {}
        arguments = parser | {
            "dtype": dtype,
            "hf_overrides": {"architectures": [ARCHITECTURE if hybrid is None else HYBRID_ARCHITECTURE]},
            "additional_config": {KEY: self.to_dict()},
            "worker_cls": worker_class(device),
            "worker_extension_cls": FACTS_EXTENSION,
        }
        if hybrid is not None:
            arguments |= hybrid.engine_arguments()
        return arguments if device == "cpu" else arguments | {"compilation_config": dict(COMPILATION)}


BY_CONTRACT: Mapping[str, tuple[Any, str]] = {
    "contract": (str, "a string"),
    "enforce": (bool, "true or false"),
}
BY_NAME: Mapping[str, tuple[Any, str]] = {
    "contract": (type(None), "null"),
    "enforce": (bool, "true or false"),
    "family": (str, "a string"),
    "kernels": ((str, Mapping), "a string or a mapping"),
    "schedule": (Mapping, "a mapping"),
}
"""Keys of the two forms -> (types, their name)."""


def settings_from_contract(text: str, *, enforce: bool) -> EngineSettings:
    """What the contract says of an engine. ContractError if it is not valid, or needs two kernels for one operator."""
    contract = decode(text)
    validate(contract)
    kernels, schedule = select(contract, "engine")
    return EngineSettings(
        family=contract.model.family, kernels=kernels, schedule=schedule, enforce=enforce, contract=text
    )


def worker_class(device: str) -> str:
    """The engine argument `worker_cls` for "cpu" or "cuda"; ValueError for another device."""
    if device not in WORKERS:
        raise ValueError(f"device is {device!r}; supported: {', '.join(WORKERS)}")
    return WORKERS[device]
