"""Running one gate: prove, compare with what was recorded before, record.

What must stay equal: a gate that fails leaves the earlier record alone, and one source gives one set of digests.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from skyrl_isoexec.gate.device import OnDevice, require_device
from skyrl_isoexec.gate.models import DECODERS
from skyrl_isoexec.gate.record import FILES, OWN_ORDER, RECORDS, GateError, Record, load, mend, present_key, save
from skyrl_isoexec.kernels.numeric.proof import DTYPES, Proof
from skyrl_isoexec.schedule import Schedule

SCHEDULE = Schedule(num_leaves=8, kv_block=16, kv_partition=64)
"""The order of arithmetic that gates run with: leaves for eight ranks, partitions that short contexts cross."""
TENSOR_CORE = ("attention", "experts", "gdn", "gdn_cpr", "linear", "mla", "row_linear")
"""Operators whose order on the device no PyTorch function states."""
SHOWN = 5
"""Failures that a message lists; it counts the others."""

Progress = Callable[[str], None]


def prove(region: str, arch: str, proof: Proof) -> None:
    """Collect every check of a region in `proof`. GateError where there is no device of this arch."""
    device = require_device(arch)
    if arch == "cpu":
        _prove_here(region, arch, proof)
    else:
        prove_there(region, arch, proof, device)
    proof.finish()


def _prove_here(region: str, arch: str, proof: Proof) -> None:
    if region in DECODERS:
        import_module("skyrl_isoexec.gate.decoder").prove(region, proof, FILES[arch], SCHEDULE)
        return
    implementation = import_module(f"skyrl_isoexec.kernels.{region}.{FILES[arch]}")
    import_module(f"skyrl_isoexec.kernels.{region}.gate").prove(proof, implementation, SCHEDULE)


def prove_there(region: str, arch: str, proof: Proof, device: str) -> None:
    """The checks of an arch that takes bf16 alone, whose order is its own reference's, or none that PyTorch states."""
    if region in DECODERS:
        import_module("skyrl_isoexec.gate.decoder").prove_on(device, region, proof, FILES[arch], SCHEDULE)
        return
    implementation = OnDevice(import_module(f"skyrl_isoexec.kernels.{region}.{FILES[arch]}"), device)
    given = {} if region == "logprob" else {"dtypes": {"bf16": DTYPES["bf16"]}}
    if region in TENSOR_CORE:
        given["definition"] = None
    elif region in OWN_ORDER:
        given["definition"] = import_module(f"skyrl_isoexec.kernels.{region}.reference_{arch}")
    import_module(f"skyrl_isoexec.kernels.{region}.gate").prove(proof, implementation, SCHEDULE, **given)
    if device != "cpu":
        implementation.prove_replays(proof)


def run(region: str, arch: str, progress: Progress | None = None, records: Path = RECORDS) -> Record:
    """Prove a region and record it. GateError names the check and the counts where anything differs."""
    key, before = present_key(region, arch), load(region, arch, records)
    proof, broken = Proof(progress), None
    try:
        prove(region, arch, proof)
    except Exception as error:
        broken = error
    if broken is not None or proof.failures:
        raise GateError(_refusal(region, arch, proof, broken)) from broken
    if present_key(region, arch) != key:
        raise GateError(f"gate: region {region}, arch {arch}: its source changed meanwhile; run: {mend(region, arch)}")
    record = Record(
        region=region,
        arch=arch,
        key=key,
        checks={name: check.to_dict() for name, check in proof.checks.items()},
        reached=proof.hazards,
    )
    if before is not None and before.key == key:
        _refuse_other_bits(before, record)
    save(record, records)
    return record


def _refusal(region: str, arch: str, proof: Proof, broken: Exception | None) -> str:
    """What differs, by check and then by comparison, and what made the gate break off."""
    checks = {name: check for name, check in proof.checks.items() if check.differing}
    lines = [f"{name}: {check.differing} of {check.elements} elements" for name, check in checks.items()]
    lines += proof.failures[:SHOWN]
    if len(proof.failures) > SHOWN:
        lines.append(f"and {len(proof.failures) - SHOWN} more comparisons")
    if broken is not None:
        lines.append(f"broke off: {type(broken).__name__}: {broken}")
    return f"gate: region {region}, arch {arch} fails:" + "".join(f"\n  {line}" for line in lines)


def _refuse_other_bits(before: Record, now: Record) -> None:
    """GateError where the same source and versions gave other bits, or other counts, than are recorded."""
    for kind in ("checks", "reached"):
        old, new = getattr(before, kind), getattr(now, kind)
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                raise GateError(
                    f"gate: region {now.region}, arch {now.arch}: {kind} {name!r} was {old.get(name)} and is "
                    f"{new.get(name)}, with the same source and versions; the record is kept"
                )
