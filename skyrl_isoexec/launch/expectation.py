"""What a process of a run has to answer when it is asked for its facts: read from the contract, field by field.

`contract.differences` compares; nothing that is expected may be missing, and nothing unexpected may be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ..contract import Contract, differences, digest, from_bits
from ..kernels.bundle import MAIN
from ..model.facts import eps_fact
from ..runtimes.vllm.settings import ARCHITECTURE, CACHE_MODE, HYBRID_ARCHITECTURE

Role = Literal["trainer", "engine"]
Fact = str | int | bool | None

RUNTIME = {"trainer": "megatron", "engine": "vllm"}
TRAINER_CLASS = "MegatronDecoder"
PATCHED = {"trainer": ("megatron-core", "skyrl"), "engine": ("vllm",)}
"""Patched packages that a process of a role runs."""
ENGINE_OPTIONS = (
    "block_size",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enforce_eager",
    "logprobs_mode",
    "max_num_batched_tokens",
    "max_num_seqs",
    "worker_class",
)
ENFORCED = {"engine.enforce": True, "engine.logits_processors": ""}
"""What every engine of a contract has: a guard, and nobody else's code between logits and tokens."""
GRAPH_OPTIONS = ("compilation_mode", "cudagraph_mode", "runner")
"""Options that only an engine on a GPU has."""
PLUGIN = ("architecture", "attention", "transfer", "log_softmax")


class FactsRefused(RuntimeError):
    """A process is not what the contract says; the text names process, field and both values."""


def expected(contract: Contract, role: Role) -> dict[str, Fact]:
    """Every fact of a process of `role`, with the value that the contract gives it."""
    deployment, identity = contract.deployment, contract.identities
    hybrid = contract.model.fields["full_attention_interval"] != 1
    engine_class = HYBRID_ARCHITECTURE if hybrid else ARCHITECTURE
    facts: dict[str, Fact] = {
        "runtime": RUNTIME[role],
        "contract.digest": digest(contract),
        "contract.semantic": identity.semantic,
        "contract.numerical_policy": identity.numerical_policy,
        "model.class": TRAINER_CLASS if role == "trainer" else engine_class,
        "model.one_place": True,
        "constant.eps": _eps(contract),
        "numeric.flush_subnormals": False,
        "numeric.rounding": "nearest",
        "numeric.threads": deployment["threads"],
        "degree.tp": deployment[role]["tp"],
        "degree.pp": deployment["trainer"]["pp"] if role == "trainer" else 1,
    }
    facts.update({f"model.{name}": value for name, value in contract.model.fields.items()})
    facts.update(_kernels(contract, role))
    facts.update({f"version.{name}": value for name, value in contract.versions.items()})
    facts.update({f"source.{name}": value for name, value in contract.sources.items() if "/" not in name})
    facts.update({f"patch.{name}": contract.sources[f"patches/{name}"] for name in PATCHED[role]})
    facts.update({f"environment.{name}": value for name, value in deployment["environment"].items()})
    if role == "trainer":
        facts["degree.dp"] = deployment["trainer"]["dp"]
        facts["degree.ep"] = deployment["trainer"]["ep"]
        facts["seed.run"] = deployment["seeds"]["run"]
        facts["constant.temperature"] = _constant(contract, "temperature")
    else:
        facts.update({f"plugin.{name}": True for name in PLUGIN})
        facts.update({f"engine.{name}": deployment["engine"][name] for name in ENGINE_OPTIONS})
        facts.update(ENFORCED)
        facts["engine.seed"] = deployment["seeds"]["run"]  # SkyRL gives every engine its own one
        facts["engine.cache_dtype"] = contract.model.dtype
        if hybrid:
            facts["engine.mamba_cache_mode"] = CACHE_MODE if deployment["engine"]["enable_prefix_caching"] else "none"
    if deployment["device"] == "cuda":
        (arch,) = {entry.impl.arch for entry in contract.composition}
        from ..kernels.numeric.sm90 import ASSEMBLER_VERSION  # needs Triton, which a CPU may be without

        facts["device.arch"], facts["device.assembler"] = arch, ASSEMBLER_VERSION
        if role == "engine":
            facts.update({f"engine.{name}": deployment["engine"][name] for name in GRAPH_OPTIONS})
    return facts


def _eps(contract: Contract) -> str:
    found = (contract.model.fields[name] for name in ("rms_norm_eps", "latent_norm_eps"))
    return eps_fact(from_bits(bits) for bits in found if bits is not None)


def _kernels(contract: Contract, role: Role) -> dict[str, Fact]:
    cases = {case.name for case in contract.cases if case.role == role}
    facts: dict[str, Fact] = {}
    for entry in contract.composition:
        if not cases & set(entry.cases):
            continue
        op, file = entry.impl.id.split(".")
        if op == "decoder":
            continue  # the model's own code: `source.model`
        facts[f"kernel.{op}.function"] = f"skyrl_isoexec.kernels.{op}.{file}.{MAIN[op]}"
        facts[f"kernel.{op}.source"] = entry.impl.source
        for name, value in entry.constants.items():
            if name != "temperature":
                facts[f"constant.{name}"] = value
    return facts


def _constant(contract: Contract, name: str) -> Fact:
    found = {entry.constants[name] for entry in contract.composition if name in entry.constants}
    (value,) = found
    return value


def served(contract: Contract, cases: tuple[str, ...]) -> dict[str, Fact]:
    """{served.<op>.<case>: module} for `cases`: the kernels that a process must have used once it has run them."""
    facts: dict[str, Fact] = {}
    for entry in contract.composition:
        op, file = entry.impl.id.split(".")
        if op == "decoder":
            continue
        for case in set(entry.cases) & set(cases):
            facts[f"served.{op}.{case}"] = f"skyrl_isoexec.kernels.{op}.{file}"
    return facts


def unlike(contract: Contract, cases: tuple[str, ...], found: Mapping[str, Fact], process: str) -> list[str]:
    """Kernels that served one of `cases` in a process and are not the contract's; none at all is a difference.

    What a process did not use is not one: a pipeline stage has only its own operators.
    """
    of_cases = {name: value for name, value in found.items() if name.rsplit(".", 1)[1] in cases}
    if not of_cases:
        return [f"{process}: no kernel served {', '.join(cases)}"]
    wanted = {name: value for name, value in served(contract, cases).items() if name in of_cases}
    return differences(wanted, of_cases, process)


def refuse(problems: list[str]) -> None:
    """FactsRefused with all problems, if there are any."""
    if problems:
        raise FactsRefused("; ".join(problems))
