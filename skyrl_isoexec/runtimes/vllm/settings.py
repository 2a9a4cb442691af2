"""What the engine is told: the strict form of `additional_config["isoexec"]`, and the host's arguments and environment.

Needs no vLLM, so that a launcher can compose and check an engine before it starts one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from skyrl_isoexec.schedule import Schedule

ARCHITECTURE = "IsoExecForCausalLM"
KEY = "isoexec"
FACTS_EXTENSION = "skyrl_isoexec.runtimes.vllm.facts.FactsExtension"
TRANSFER_BACKEND = "gloo"

CONFIG_FORMAT = "isoexec"
STAND_INS = {"mimo": "qwen2"}
"""Families that transformers does not know -> the family whose configuration class has their fields; see `parser`."""

CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Variables of the hosts that every process of a CPU engine needs before it imports torch.

The first keeps vLLM from compiling parts of its sampler, which it does even when told to be eager; the second lets
several workers share the cores of one machine.
"""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Which model, which kernels and which order of arithmetic an engine computes."""

    family: str
    """Name of a family under `model/families`."""
    kernels: str
    """Name of an implementation set, for `load_kernels`."""
    schedule: Schedule

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `additional_config`."""
        return {"family": self.family, "kernels": self.kernels, "schedule": self.schedule.to_dict()}

    @classmethod
    def from_additional_config(cls, additional: Mapping[str, Any]) -> EngineSettings:
        """The settings under `KEY`; ValueError names what is missing, unknown or of the wrong type."""
        if KEY not in additional:
            raise ValueError(f'additional_config["{KEY}"] is missing: {ARCHITECTURE} has no settings of its own')
        given, known = additional[KEY], {field.name for field in fields(cls)}
        if not isinstance(given, Mapping):
            raise ValueError(f'additional_config["{KEY}"] is {given!r}, not a mapping')
        unknown, missing = sorted(given.keys() - known), sorted(known - given.keys())
        if unknown or missing:
            raise ValueError(f'additional_config["{KEY}"]: unknown keys {unknown}, missing keys {missing}')
        for name in ("family", "kernels"):
            if not isinstance(given[name], str):
                raise ValueError(f'additional_config["{KEY}"]["{name}"] is {given[name]!r}, not a string')
        if not isinstance(given["schedule"], Mapping):
            raise ValueError(f'additional_config["{KEY}"]["schedule"] is {given["schedule"]!r}, not a mapping')
        schedule = Schedule.from_dict(dict(given["schedule"]))
        return cls(family=given["family"], kernels=given["kernels"], schedule=schedule)

    def engine_arguments(self, *, dtype: str) -> dict[str, Any]:
        """Arguments of vLLM's engine that select this model; the caller adds its own sizes, degrees and sampling mode.

        `dtype` is explicit because vLLM's "auto" turns a float32 checkpoint into bfloat16 on the CPU.
        """
        parser = {"config_format": CONFIG_FORMAT} if self.family in STAND_INS else {}
        return parser | {
            "dtype": dtype,
            "hf_overrides": {"architectures": [ARCHITECTURE]},
            "additional_config": {KEY: self.to_dict()},
            "worker_extension_cls": FACTS_EXTENSION,
        }
