"""What a gate has proved, as a file that travels with the code: for which source and versions, on how many elements.

A record is valid only for the source it was made from and the versions that compute. It holds no time, host or path, so
that another machine with the same source and versions writes the same bytes. Standard library only.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from skyrl_isoexec.gate.models import DECODERS, operators
from skyrl_isoexec.kernels.bundle import OPS
from skyrl_isoexec.kernels.sources import PACKAGE, impl_source, import_digest, source_digest

RECORDS = Path(__file__).resolve().parent / "records"
REGIONS = (*OPS, *DECODERS)
"""One operator each, or whole models of one kind."""
FILES = {"cpu": "cpu", "sm90": "kernel"}
"""Arch -> name of its file in every operator's folder."""
VERSIONS = {"cpu": ("llvmlite", "numba", "torch"), "sm90": ("torch", "triton")}
"""Arch -> distributions that decide what it computes."""
OWN_ORDER = ("logprob", "rmsnorm")
"""Operators that a device adds in another order, which `reference_<arch>.py` states."""

Status = Literal["valid", "missing", "stale"]
Key = dict[str, dict[str, str]]


class GateError(ValueError):
    """A gate that is unknown, has not been passed for this source, or does not pass."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One passed gate."""

    region: str
    arch: str
    key: Mapping[str, Mapping[str, str]]
    """"source": digests of the implementations, their definitions and the gate; "versions": those of what computes."""
    checks: Mapping[str, Mapping[str, int | str]]
    """Name of a check -> "comparisons", "elements" and the "digest" of the bits that were equal."""
    reached: Mapping[str, int]
    """Name of a hazard -> how often it occurred in the inputs or results."""

    @property
    def elements(self) -> int:
        """Number of elements compared."""
        return sum(check["elements"] for check in self.checks.values())

    def encode(self) -> bytes:
        """Canonical JSON and a line end."""
        return f"{_canonical(asdict(self))}\n".encode()

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """The inverse of `encode`; ValueError for any other bytes."""
        loaded = json.loads(data)
        if not isinstance(loaded, dict) or loaded.keys() != {field.name for field in fields(cls)}:
            raise ValueError("its fields are not those of a record")
        if not all(isinstance(loaded[name], dict) and loaded[name] for name in ("key", "checks")):
            raise ValueError("it holds no key or no check")
        for name, check in loaded["checks"].items():
            if not isinstance(check, dict) or type(check.get("elements")) is not int or check["elements"] < 0:
                raise ValueError(f"check {name!r} does not say how many elements it compared")
        if not any(check["elements"] for check in loaded["checks"].values()):
            raise ValueError("it compared nothing")
        record = cls(**loaded)
        if record.encode() != data:
            raise ValueError("it is not in canonical form")
        return record


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def check_names(region: str, arch: str) -> None:
    """GateError for a region or an arch that does not exist, naming the nearest that does."""
    for kind, name, known in (("region", region, REGIONS), ("arch", arch, tuple(VERSIONS))):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise GateError(f"gate: no {kind} {name!r}: {hint}")


def _version(distribution: str) -> str:
    """Of a distribution, without the suffix that says where it was built."""
    try:
        return importlib.metadata.version(distribution).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _definitions(region: str, arch: str, ops: Iterable[str]) -> tuple[str, ...]:
    """What says which bits are expected, where the gate does not import it by its name."""
    if region in DECODERS:
        return tuple(f"{op}.reference" for op in ops) if arch == "cpu" else ()
    return (f"{region}.reference_{arch}",) if arch != "cpu" and region in OWN_ORDER else ()


def present_key(region: str, arch: str, package: Path = PACKAGE) -> Key:
    """What a record of this region would be for, now. GateError if an implementation for the arch does not exist."""
    check_names(region, arch)
    whole, own = region in DECODERS, package / "gate"
    gate = own / "decoder.py" if whole else package / "kernels" / region / "gate.py"
    ops = operators(region) if whole else (region,)
    try:
        names = (*(f"{op}.{FILES[arch]}" for op in ops), *_definitions(region, arch, ops))
        source = {name: impl_source(name, package) for name in names}
    except ValueError as error:
        raise GateError(f"gate: region {region}, arch {arch}: {error}") from None
    source[f"{region}.gate"] = import_digest(gate, package)
    source["gate.run"] = source_digest(own / "run.py", own / "device.py")
    tiles = package / "kernels" / region / "tiles.json"  # a decoder's are those that its operators' gates have tried
    if arch != "cpu" and tiles.is_file():
        source[f"{region}.tiles"] = source_digest(tiles)
    return {"source": source, "versions": {name: _version(name) for name in VERSIONS[arch]}}


def ref_of(region: str, arch: str, key: Mapping[str, Mapping[str, str]]) -> str:
    """Name of the record for a key."""
    return f"gates/{arch}/{region}@{hashlib.sha256(_canonical(key).encode()).hexdigest()[:16]}"


def ref(region: str, arch: str) -> str:
    """Name of the record that the present source and versions need: "gates/<arch>/<region>@<16 hex digits>"."""
    return ref_of(region, arch, present_key(region, arch))


def path_of(region: str, arch: str, records: Path = RECORDS) -> Path:
    """Where a record lies."""
    check_names(region, arch)
    return records / arch / f"{region}.json"


def load(region: str, arch: str, records: Path = RECORDS) -> Record | None:
    """The record of a region, or None. GateError for a file that is not one."""
    path = path_of(region, arch, records)
    if not path.is_file():
        return None
    try:
        record = Record.decode(path.read_bytes())
        if (record.region, record.arch) != (region, arch):
            raise ValueError(f"it is of region {record.region}, arch {record.arch}")
    except (ValueError, TypeError) as error:
        raise GateError(f"gate: {path} is no record: {error}; delete it and run: {mend(region, arch)}") from None
    return record


def save(record: Record, records: Path = RECORDS) -> None:
    """Write a record in the place of an earlier one."""
    path = path_of(record.region, record.arch, records)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(".new")
    staging.write_bytes(record.encode())
    staging.replace(path)


def moved(old: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What differs between two keys, by name; versions with both values."""
    names = []
    for part in sorted(old.keys() | new.keys()):
        before, now = old.get(part, {}), new.get(part, {})
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                values = f" {before.get(name)} -> {now.get(name)}" if part == "versions" else ""
                names.append(f"{part} {name}{values}")
    return names


def mend(region: str, arch: str) -> str:
    """The command that makes a record."""
    return f"isoexec gate --arch {arch} --region {region}"


def status(region: str, arch: str, records: Path = RECORDS, package: Path = PACKAGE) -> Status:
    """Whether there is a record, and whether it is for the present source and versions."""
    record = load(region, arch, records)
    if record is None:
        return "missing"
    return "valid" if record.key == present_key(region, arch, package) else "stale"


def require(region: str, arch: str, records: Path = RECORDS, package: Path = PACKAGE) -> str:
    """The name of the valid record of a region; GateError says what is wrong and how to mend it."""
    key, record = present_key(region, arch, package), load(region, arch, records)
    if record is not None and record.key == key:
        return ref_of(region, arch, key)
    state = "missing" if record is None else "stale"
    changed: Iterable[str] = [] if record is None else moved(record.key, key)
    reason = f" ({', '.join(changed)} changed)" if record is not None else ""
    raise GateError(f"gate: region {region}, arch {arch}: the record is {state}{reason}; run: {mend(region, arch)}")
