"""What a trainer process really is: read back from the objects that compute, never from the settings that asked."""

from __future__ import annotations

import torch
from megatron.core import parallel_state

from ...contract import decode, float_bits
from ...model.facts import Fact, decoder_facts, device_facts
from ...model.probe import probe as decoder_probe
from .adapter import MegatronDecoder
from .weights import unwrap

PATCHED = ("megatron-core", "skyrl")
"""Patched upstreams that a trainer runs."""


def facts(module: torch.nn.Module, contract_text: str, *, temperature: float, seed: int) -> dict[str, Fact]:
    """Flat facts of this process. `contract_text` is what it was given; the last two are what its worker uses.

    TypeError for a model that is not built from a contract.
    """
    stage = _decoder(module).stage
    device = stage.cos_sin_PR.device  # a parameter of an offloaded trainer is elsewhere
    with device:  # how arithmetic rounds is found out where the model computes
        found = decoder_facts(stage, decode(contract_text), PATCHED)
    if device.type == "cuda":
        found |= device_facts()
    return {
        **found,
        "runtime": "megatron",
        "model.class": type(unwrap(module)).__name__,
        "constant.temperature": float_bits(temperature),
        "degree.tp": parallel_state.get_tensor_model_parallel_world_size(),
        "degree.pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "degree.dp": parallel_state.get_data_parallel_world_size(),
        "degree.ep": 1 if stage.axes["ep"] is None else stage.axes["ep"].size,
        "seed.run": seed,
    }


def served(module: torch.nn.Module) -> dict[str, str]:
    """{served.<op>.<case>: module of the kernel} for every kernel that a forward of this process has used."""
    return _decoder(module).stage.kernels.served_facts()


def probe(module: torch.nn.Module) -> str | None:
    """Digest of a short forward of the live model, None for a part of a pipeline; see `model.probe`. Collective."""
    return decoder_probe(_decoder(module).stage)


def _decoder(module: torch.nn.Module) -> MegatronDecoder:
    model = unwrap(module)
    if not isinstance(model, MegatronDecoder):
        raise TypeError(f"a {type(model).__name__} is not built from a contract and has no facts")
    return model
