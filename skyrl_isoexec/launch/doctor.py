"""`isoexec doctor`: what this machine can run, and why not.

Every line is looked at now, here: nothing is assumed because another line is in order. Standard library only at import,
so that it answers on a machine where the set-up has gone wrong.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

PYTHONS = ((3, 11), (3, 12))
PLUGIN = "skyrl_isoexec.runtimes.vllm.install:register"
CPU_GIB, DISK_GIB = 8, 2
"""Memory that the embedded default needs free, and disk that a run needs."""
PORTS = 8
"""Ports that a run of two engines opens."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at."""

    name: str
    ok: bool
    found: str
    needed_for: str = "cpu, gpu"
    """Which kind of run cannot start without it."""
    mend: str = ""


def add_parser(groups: argparse._SubParsersAction) -> None:
    """Adds the command to the `isoexec` parser."""
    command = groups.add_parser("doctor", help="what this machine can run, and why not", description=__doc__)
    command.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Print every finding; 0 if runs on the CPU can start, else 2."""
    findings = []
    for look in (_python, _torch, _gpu, _packages, _patches, _plugin, _gates, _memory, _disk, _ports):
        try:
            found = list(look())
        except Exception as error:  # a broken installation must not end the report
            found = [Finding(name=look.__name__.strip("_"), ok=False, found=f"{type(error).__name__}: {error}")]
        for one in found:
            print(f"{'ok' if one.ok else 'NO':>2}  {one.name:<26} {one.found}", flush=True)
            if not one.ok and one.mend:
                print(f"{'':>2}  {'':<26} -> {one.mend}", flush=True)
        findings += found
    print()
    able = {kind: [one.name for one in findings if not one.ok and kind in one.needed_for] for kind in ("cpu", "gpu")}
    for kind, missing in able.items():
        print(f"runs on {kind}: " + ("yes" if not missing else f"no, because of: {', '.join(missing)}"))
    return 2 if able["cpu"] else 0


def _python() -> Iterator[Finding]:
    here = sys.version_info[:2]
    supported = " or ".join(f"{a}.{b}" for a, b in PYTHONS)
    yield Finding(name="python", ok=here in PYTHONS, found=platform.python_version(), mend=f"use Python {supported}")
    machine = f"{platform.system()} {platform.machine()}"
    yield Finding(
        name="system", ok=machine == "Linux x86_64", found=machine, mend="the pinned wheels are for Linux x86_64"
    )


def _torch() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield Finding(name="torch", ok=False, found="not installed", mend="make setup")
        return
    import torch

    yield Finding(name="torch", ok=True, found=torch.__version__)
    tiny = torch.tensor([1e-40]) * 1.0
    yield Finding(
        name="subnormal numbers",
        ok=bool(tiny != 0),
        found="kept" if bool(tiny != 0) else "flushed to zero",
        mend="something in this process set the processor to flush them; unset it",
    )


def _gpu() -> Iterator[Finding]:
    driver = shutil.which("nvidia-smi")
    listed = ""
    if driver is not None:
        query = [driver, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
        listed = "; ".join(done.stdout.split("\n")).strip("; ") if done.returncode == 0 else ""
    yield Finding(
        name="gpu driver",
        ok=bool(listed),
        found=listed or "no NVIDIA driver answers",
        needed_for="gpu",
        mend="install the NVIDIA driver, or run on the CPU (the default)",
    )
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(f"{torch.cuda.get_device_name(i)} sm{''.join(map(str, _capability(i)))}" for i in range(count))
    yield Finding(
        name="gpu of torch",
        ok=count > 0 and all(_capability(i) == (9, 0) for i in range(count)),
        found=names or f"none (torch {torch.__version__})",
        needed_for="gpu",
        mend="kernels exist for sm90 (H100, H200); torch has to be a CUDA build",
    )


def _capability(index: int) -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(index)


def _packages() -> Iterator[Finding]:
    for name in ("ray", "megatron-core", "vllm", "transformers", "numba"):
        try:
            yield Finding(name=name, ok=True, found=importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name=name, ok=False, found="not installed", mend="make setup")


def _patches() -> Iterator[Finding]:
    from ..patching import applied_state

    for package in ("skyrl", "vllm", "megatron-core"):
        state = applied_state(package)
        files = f": {', '.join(state.paths[:3])}" if state.paths else ""
        yield Finding(
            name=f"patches of {package}",
            ok=state.state == "patched",
            found=f"{state.version} {state.state}, {state.num_patches} patches{files}",
            mend=state.mend,
        )


def _plugin() -> Iterator[Finding]:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    ours = [point.value for point in points if point.name == "isoexec"]
    allowed = os.environ.get("VLLM_PLUGINS")
    yield Finding(
        name="plugin of vllm",
        ok=PLUGIN in ours,
        found=", ".join(ours) or "not registered",
        mend="install this package again: pip install --no-deps -e .",
    )
    if allowed is not None and "isoexec" not in allowed.split(","):
        yield Finding(name="VLLM_PLUGINS", ok=False, found=allowed, mend="unset it: it keeps vLLM from the plugin")


def _gates() -> Iterator[Finding]:
    from ..gate.record import REGIONS, status

    for arch, kind in (("cpu", "cpu"), ("sm90", "gpu")):
        bad = {region: status(region, arch) for region in REGIONS}
        bad = {region: found for region, found in bad.items() if found != "valid"}
        yield Finding(
            name=f"gates of {arch}",
            ok=not bad,
            found=f"{len(REGIONS)} valid" if not bad else ", ".join(f"{region} {how}" for region, how in bad.items()),
            needed_for=kind,
            mend=f"isoexec gate --arch {arch}",
        )


def _memory() -> Iterator[Finding]:
    pages = {name: os.sysconf(name) for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES", "SC_PAGE_SIZE")}
    total = pages["SC_PHYS_PAGES"] * pages["SC_PAGE_SIZE"] / 2**30
    with open("/proc/meminfo", encoding="ascii") as file:
        kib = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    free = kib / 2**20
    yield Finding(
        name="memory",
        ok=free >= CPU_GIB,
        found=f"{free:.0f} GiB available of {total:.0f}",
        mend=f"free {CPU_GIB} GiB: the embedded default starts about ten processes",
    )


def _disk() -> Iterator[Finding]:
    for name, folder in (("disk", os.getcwd()), ("temporary disk", os.environ.get("TMPDIR", "/tmp"))):
        free = shutil.disk_usage(folder).free / 2**30
        yield Finding(name=name, ok=free >= DISK_GIB, found=f"{free:.0f} GiB free at {folder}", mend="free some space")


def _ports() -> Iterator[Finding]:
    opened: list[socket.socket] = []
    try:
        for _ in range(PORTS):
            one = socket.socket()
            opened.append(one)
            one.bind(("127.0.0.1", 0))
        found, ok = f"{PORTS} local ports could be opened", True
    except OSError as error:
        found, ok = f"only {len(opened) - 1} of {PORTS} local ports: {error}", False
    finally:
        for one in opened:
            one.close()
    yield Finding(name="ports", ok=ok, found=found, mend="close what holds them, or raise the limit of open files")
