"""`isoexec gate`, as a user runs it: every gate passes here, and writes the bytes that are in the repository."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_isoexec.contract import CASES
from skyrl_isoexec.gate import decoder
from skyrl_isoexec.gate.record import RECORDS, REGIONS, path_of


def isoexec(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "skyrl_isoexec", "gate", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def whole(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess, Path]:
    """All gates of the CPU, into an empty folder: (what the command said, the folder)."""
    folder = tmp_path_factory.mktemp("records")
    return isoexec(root, "--arch", "cpu", "--records", str(folder)), folder


@pytest.mark.slow
@pytest.mark.parametrize("region", REGIONS)
def test_the_gate_passes_and_reproduces_its_record(region: str, whole) -> None:
    done, folder = whole
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert re.search(rf"\] {region} passed: [\d,]+ elements equal", done.stdout)
    fresh, committed = path_of(region, "cpu", folder), path_of(region, "cpu")
    assert committed.is_file(), f"run: isoexec gate --arch cpu --region {region}"
    assert fresh.read_bytes() == committed.read_bytes(), f"{committed} is not what this source and machine give"


def test_list_has_one_line_for_each_gate(root: Path, tmp_path: Path) -> None:
    done = isoexec(root, "--list")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.returncode == 0 and [line[0] for line in lines] == list(REGIONS)
    assert all(line[1:3] == ["cpu", "valid"] and int(line[3].replace(",", "")) > 10**5 for line in lines)
    none = isoexec(root, "--list", "--records", str(tmp_path))
    assert all(line.split()[2:4] == ["missing", "0"] for line in none.stdout.splitlines())


def test_names_that_do_not_exist(root: Path) -> None:
    for arguments, message in (
        (("--region", "liner"), "did you mean 'linear'"),
        (("--arch", "cuda"), "no arch 'cuda'"),
    ):
        done = isoexec(root, *arguments)
        assert done.returncode == 2 and message in done.stderr and not done.stdout


def test_records_travel_with_an_installation(root: Path) -> None:
    """Nothing in them tells of the machine that made them."""
    assert '"skyrl_isoexec.gate" = ["records/*/*.json"]' in (root / "pyproject.toml").read_text()
    assert RECORDS == root / "skyrl_isoexec" / "gate" / "records"
    for path in RECORDS.rglob("*.json"):
        assert not re.search(rb"/home|/work|/root|/tmp|[Hh]ost|x86|AMD|Intel|202\d-", path.read_bytes()), path


def test_cases_are_those_of_a_contract() -> None:
    assert decoder.CASES == tuple(case.name for case in CASES)


def test_an_arch_whose_device_is_not_here_is_refused_by_name(root: Path, tmp_path: Path) -> None:
    """Before anything runs; what is recorded can be listed anywhere."""
    done = isoexec(root, "--arch", "sm90", "--records", str(tmp_path))
    if done.returncode == 0:
        pytest.skip("there is a Hopper GPU")
    assert done.returncode == 2 and "arch sm90 needs a CUDA device of compute capability 9.0" in done.stderr
    assert not done.stdout and not list(tmp_path.iterdir())
    assert isoexec(root, "--arch", "sm90", "--list").returncode == 0


def test_a_folder_that_cannot_hold_records_is_refused_first(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", Path("/proc/x")):
        done = isoexec(root, "--region", "rope", "--records", str(folder))
        assert done.returncode == 2 and not done.stdout
        assert f"--records {folder}" in done.stderr and "name a folder that can be written" in done.stderr
