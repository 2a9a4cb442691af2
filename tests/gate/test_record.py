"""A record counts for exactly the source and the versions it was made with, and says what else it needs."""

import dataclasses
import functools
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_isoexec.gate import record
from skyrl_isoexec.gate.record import REGIONS, GateError, Key, Record, load, present_key, ref, require, save, status
from skyrl_isoexec.kernels.sources import PACKAGE

CHECKS = {"fp32 rows": {"comparisons": 2, "elements": 10, "digest": "0" * 64}}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of what gates prove, to be edited."""
    for name in ("kernels", "schedule", "model", "gate"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE / name, tmp_path / PACKAGE.name / name, ignore=ignore)
    shutil.copy(PACKAGE / "__init__.py", tmp_path / PACKAGE.name)
    return tmp_path / PACKAGE.name


def made(region: str, **changes: object) -> Record:
    """A record for the present source and versions."""
    fields = {"region": region, "arch": "cpu", "checks": CHECKS, "reached": {"ties": 3}}
    return Record(**fields | {"key": present_key(region, "cpu")} | changes)


def edit(path: Path) -> None:
    path.write_text(path.read_text() + "\nmoved = 1\n")


def test_missing_valid_stale(package: Path, records: Path) -> None:
    """An edit of the implementation or of its gate makes a record stale; one elsewhere, or of a comment, does not."""
    assert status("rope", "cpu", records, package) == "missing"
    save(made("rope"), records)
    assert status("rope", "cpu", records, package) == "valid"
    assert require("rope", "cpu", records, package) == ref("rope", "cpu")
    edit(package / "kernels" / "swiglu" / "cpu.py")
    (package / "kernels" / "rope" / "cpu.py").write_text(
        "# comment\n" + (package / "kernels" / "rope" / "cpu.py").read_text()
    )
    assert status("rope", "cpu", records, package) == "valid"
    for name in ("rope/cpu.py", "rope/gate.py", "rope/cases.py", "rope/reference.py", "numeric/proof.py"):
        path = package / "kernels" / name
        before = path.read_text()
        edit(path)
        assert status("rope", "cpu", records, package) == "stale", name
        path.write_text(before)
    assert status("rope", "cpu", records, package) == "valid"


NEEDED = ["model/mlp.py", "kernels/rope/cpu.py", "kernels/rope/reference.py", "kernels/linear/reference.py"]
NEEDED += ["schedule/tree.py", *(f"gate/{name}.py" for name in ("decoder", "engine", "experts", "models", "ways"))]


@pytest.mark.parametrize("name", NEEDED)
def test_the_decoder_needs_every_part(package: Path, records: Path, name: str) -> None:
    save(made("decoder"), records)
    assert status("decoder", "cpu", records, package) == "valid"
    edit(package / name)
    assert status("decoder", "cpu", records, package) == "stale"


@functools.cache
def keys(arch: str) -> dict[str, Key]:
    """Those of the package itself, which `package` is a copy of."""
    return {region: present_key(region, arch) for region in REGIONS}


WHOLE = tuple(record.DECODERS)
WITH_EXPERTS = ("decoder_hybrid_moe", "decoder_mla", "decoder_moe")
MOVED = [
    ("gate/run.py", "cpu", REGIONS),
    ("gate/device.py", "cpu", REGIONS),
    ("gate/run.py", "sm90", REGIONS),
    ("gate/device.py", "sm90", REGIONS),
    ("gate/models.py", "cpu", WHOLE),
    ("gate/experts.py", "cpu", WHOLE),
    ("kernels/router/reference.py", "cpu", ("router", *WITH_EXPERTS)),
    ("kernels/router/reference.py", "sm90", ("router",)),
    ("kernels/router/cases.py", "cpu", ("router",)),
    ("kernels/combine/reference.py", "cpu", ("combine", *WITH_EXPERTS)),
    ("kernels/attention/reference.py", "cpu", ("attention", *(name for name in WHOLE if name != "decoder_mla"))),
    ("kernels/gdn_cpr/reference.py", "cpu", ("gdn_cpr", "decoder_hybrid", "decoder_hybrid_moe")),
    ("kernels/mla/reference.py", "cpu", ("mla", "decoder_mla")),
    ("kernels/logprob/reference_sm90.py", "cpu", ()),
    ("kernels/logprob/reference_sm90.py", "sm90", ("logprob", *WHOLE)),  # its kernel imports it
    ("kernels/rmsnorm/reference_sm90.py", "sm90", ("rmsnorm",)),
    ("kernels/linear/tiles.json", "sm90", ("linear",)),
    ("kernels/experts/tiles.json", "sm90", ("experts",)),
    ("kernels/linear/tiles.json", "cpu", ()),
]
"""A file, an arch, and every region whose record an edit of it makes stale."""


@pytest.mark.parametrize(("name", "arch", "regions"), MOVED)
def test_an_edit_moves_what_it_decides_and_nothing_else(
    package: Path, name: str, arch: str, regions: tuple[str, ...]
) -> None:
    """What says which bits are expected, and what runs the proof, is in a key wherever it takes part."""
    edit(package / name)
    moved = {region for region in REGIONS if present_key(region, arch, package) != keys(arch)[region]}
    assert moved == set(regions)


def test_refusals_name_everything(package: Path, records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Region, arch, status, what moved, and the command that mends it."""
    with pytest.raises(GateError, match="region rope, arch cpu.*missing.*isoexec gate --arch cpu --region rope"):
        require("rope", "cpu", records, package)
    save(made("rope"), records)
    edit(package / "kernels" / "rope" / "cpu.py")
    pattern = r"region rope, arch cpu: the record is stale \(source rope.cpu changed\); run: isoexec gate --arch cpu"
    with pytest.raises(GateError, match=pattern):
        require("rope", "cpu", records, package)
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9" if name == "numba" else installed(name))
    with pytest.raises(GateError, match=rf"versions numba {re.escape(installed('numba'))} -> 9"):
        require("rope", "cpu", records)
    assert status("rope", "cpu", records) == "stale"


@pytest.mark.parametrize(
    ("region", "arch", "message"),
    [
        ("ropes", "cpu", "no region 'ropes': did you mean 'rope'"),
        ("xyz", "cpu", "no region 'xyz': known are attention, .*, decoder"),
        ("rope", "sm80", "no arch 'sm80': did you mean 'sm90'"),
    ],
)
def test_unknown_names(region: str, arch: str, message: str) -> None:
    for function in (status, require, ref, load):
        with pytest.raises(GateError, match=message):
            function(region, arch)


def test_an_arch_without_implementation(package: Path, records: Path) -> None:
    (package / "kernels" / "rope" / "cpu.py").unlink()
    with pytest.raises(GateError, match="region rope, arch cpu.*kernels/rope/cpu.py does not exist"):
        require("rope", "cpu", records, package)


def test_reference_names_the_key(records: Path) -> None:
    """The name changes with the key, and has the form that a contract accepts."""
    names = {ref(region, "cpu") for region in REGIONS}
    assert len(names) == len(REGIONS)
    assert all(re.fullmatch(r"gates/cpu/[a-z_]+@[0-9a-f]{16}", name) for name in names)
    key = present_key("rope", "cpu")
    other = record.ref_of("rope", "cpu", key | {"versions": key["versions"] | {"torch": "0"}})
    assert other != ref("rope", "cpu") == record.ref_of("rope", "cpu", key)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data.replace(b'","', b'", "', 1),
        lambda data: data.replace(b"}", b"", 1),
        lambda data: data.replace(b',"key":', b',"host":"x","key":'),
        lambda data: data.replace(b'"region":"rope"', b'"region":"linear"'),
    ],
)
def test_a_damaged_record_is_refused(records: Path, damage) -> None:
    save(made("rope"), records)
    path = record.path_of("rope", "cpu", records)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(GateError, match="rope.json is no record.*isoexec gate --arch cpu --region rope"):
        require("rope", "cpu", records)


def test_round_trip(records: Path) -> None:
    save(made("linear"), records)
    assert load("linear", "cpu", records) == made("linear") and made("linear").elements == 10
    assert Record.decode(made("linear").encode()) == made("linear")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made("linear").arch = "sm90"


def test_importing_records_imports_no_torch() -> None:
    code = "import sys, skyrl_isoexec.gate.record, skyrl_isoexec.gate.commands as c; c.add_parser\n"
    code += "assert not {'numba', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("checks", [{}, [], {"a": {}}, {"a": {"elements": 0, "comparisons": 1, "digest": "x"}}])
def test_a_record_that_compared_nothing_is_none(checks: object) -> None:
    fields = {"region": "rope", "arch": "cpu", "key": {"source": {}, "versions": {}}, "checks": checks, "reached": {}}
    data = (json.dumps(fields, sort_keys=True, separators=(",", ":")) + "\n").encode()
    with pytest.raises(ValueError, match="no check|does not say|compared nothing"):
        Record.decode(data)
