"""What this machine has: devices, cores, memory, free ports, variables, patched upstreams."""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil
import torch

from ...patching import PatchRefusal, applied_state
from ..cluster import WATCHED
from ..composition import PATCHED
from ..config import LaunchConfig
from .refusal import Refusal

ROUTER = "generator.inference_engine.router_init_kwargs"
STORE_MIB = 75
"""Ray starts no smaller object store."""


def device(name: str) -> None:
    """Refuse a device that this machine does not have."""
    if name == "cuda" and not torch.cuda.is_available():
        raise Refusal("runtime.device=cuda, but torch sees no CUDA device; choose runtime=cpu kernels=cpu")


def cores(threads: int) -> None:
    """Refuse more threads than there are cores."""
    count = os.cpu_count() or 1
    if threads > count:
        raise Refusal(f"runtime.threads={threads} is more than the {count} cores of this machine; set it to {count}")


def memory(launch: LaunchConfig) -> None:
    """Refuse an object store that Ray does not start, and more of the host's memory than there is."""
    store, cache = launch.runtime.object_store_mib, launch.runtime.kv_cache_mib
    cache = 0 if launch.runtime.device == "cuda" else cache
    if store < STORE_MIB:
        raise Refusal(
            f"runtime.object_store_mib={store} is below the {STORE_MIB} MiB that Ray needs; set it to "
            f"{STORE_MIB} or more"
        )
    engines, total = launch.topology.engine.num or 1, psutil.virtual_memory().total // 2**20
    asked = store + cache * engines * launch.topology.engine.tp
    if asked > total:
        raise Refusal(
            f"runtime.object_store_mib={store} and runtime.kv_cache_mib={cache} of {engines} engine(s) are {asked} "
            f"MiB, and this machine has {total}; lower them"
        )


def ports(cfg: Any) -> None:
    """Refuse ports of the router that somebody else listens on."""
    for name in ("port", "prometheus_port"):
        port(cfg.generator.inference_engine.router_init_kwargs.get(name), f"{ROUTER}.{name}")


def port(number: Any, key: str) -> None:
    """Refuse what is not a port, or one that somebody else listens on. None is no port."""
    if number is None:
        return
    if type(number) is not int or not 0 < number < 2**16:
        raise Refusal(f"{key}={number} is not a port; give a number from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", number))
        except OSError as error:
            raise Refusal(f"{key}={number}: the port is in use ({error.strerror}); choose a free one") from error


def variables() -> None:
    """Refuse variables of the hosts that a run leaves unset: every process would inherit them."""
    for name in WATCHED:
        if name in os.environ:
            raise Refusal(
                f"environment.{name} is {os.environ[name]!r}, the contract says unset: it can change what is computed; "
                "unset it"
            )


def patches() -> None:
    """Refuse an upstream whose files are not exactly its pin plus our series."""
    for package in PATCHED:
        try:
            state = applied_state(package)
        except PatchRefusal as error:
            raise Refusal(f"patch.{package}: {error}") from error
        if state.state != "patched":
            files = ", ".join(state.paths[:3]) or "no file"
            raise Refusal(
                f"patch.{package} is {state.state!r} ({files}), the contract says 'patched' with series "
                f"{state.series_digest[:16]}; {state.mend}"
            )
