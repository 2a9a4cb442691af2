"""What `isoexec patches apply|revert|status` do, and how every verb goes through packages and reports refusals."""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from skyrl_isoexec.patching.errors import PatchRefusal
from skyrl_isoexec.patching.patchfile import read_series
from skyrl_isoexec.patching.site import Site, find_site
from skyrl_isoexec.patching.state import ABSENT, FOREIGN, MIXED, applied_state
from skyrl_isoexec.patching.transaction import apply, revert
from skyrl_isoexec.patching.unpack import ensure_unpacked
from skyrl_isoexec.patching.upstreams import Upstream, find_repository, read_upstreams

REFUSED = 2
"""Exit code of a refusal."""


def refusing(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The verb with refusals printed and turned into their exit code."""

    def wrapped(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except PatchRefusal as refusal:
            return report(refusal)

    return wrapped


def report(refusal: PatchRefusal) -> int:
    """Prints a refusal and returns its exit code."""
    print(f"isoexec patches: refused: {refusal}", file=sys.stderr)
    return REFUSED


def selected(arguments: argparse.Namespace) -> list[Upstream]:
    """The packages named on the command line, by default all."""
    repository = find_repository(arguments.repository)
    upstreams = read_upstreams(repository)
    unknown = [name for name in arguments.packages if name not in upstreams]
    if unknown:
        raise PatchRefusal(
            what=f"unknown package {', '.join(unknown)}; known: {', '.join(upstreams)}",
            where=str(repository / "patches" / "upstreams.toml"),
            mend="use a known name",
        )
    return [upstreams[name] for name in arguments.packages or upstreams]


def each(arguments: argparse.Namespace, act: Callable[[Upstream], str]) -> int:
    """Runs `act` for every selected package, prints what it says, and goes on after a refusal."""
    code = 0
    for upstream in selected(arguments):
        try:
            print(f"{upstream.package:<14} {act(upstream)}", flush=True)
        except PatchRefusal as refusal:
            code = report(refusal)
    return code


def run_apply(arguments: argparse.Namespace) -> int:
    """`isoexec patches apply`."""

    def act(upstream: Upstream) -> str:
        repository = find_repository(arguments.repository)
        patches = read_series(repository / "patches" / upstream.package)
        unpacked = 0
        if upstream.placement == "repository":
            unpacked = ensure_unpacked(upstream, repository, arguments.wheel_dir)
        written = apply(_site(arguments, upstream), patches)
        done = f"{len(patches)} patches applied: {len(written)} files written" if written else "already applied"
        return f"{upstream.version}  {done}{f', {unpacked} unpacked' if unpacked else ''}"

    return each(arguments, act)


def run_revert(arguments: argparse.Namespace) -> int:
    """`isoexec patches revert`."""

    def act(upstream: Upstream) -> str:
        patches = read_series(find_repository(arguments.repository) / "patches" / upstream.package)
        written = revert(_site(arguments, upstream), patches)
        return f"{upstream.version}  pristine: {len(written)} files written"

    return each(arguments, act)


def run_status(arguments: argparse.Namespace) -> int:
    """`isoexec patches status`; its exit code is 0 if every package is absent, pristine or patched."""
    bad = []

    def act(upstream: Upstream) -> str:
        repository = find_repository(arguments.repository)
        state = applied_state(upstream.package, repository, arguments.site and [arguments.site])
        bad.extend([upstream.package] if state.state in (MIXED, FOREIGN) else [])
        about = f"{state.num_patches} patches {state.series_digest[:16]}"
        line = f"{state.version:<8} {state.build or '-':<6} {state.state:<9} {about}"
        if state.state in (MIXED, FOREIGN):
            line += f"  {len(state.paths)} file(s): {', '.join(state.paths[:3])}"
        if state.state == MIXED:
            line += "  (mend: isoexec patches apply, or revert)"
        return line + (_shadow(upstream, repository) if state.state != ABSENT else "")

    code = each(arguments, act)
    return REFUSED if bad else code


def _site(arguments: argparse.Namespace, upstream: Upstream) -> Site:
    repository = find_repository(arguments.repository)
    site = find_site(upstream, repository, None if arguments.site is None else [arguments.site])
    if site is None:
        names = " or ".join(f"{build.distribution}=={upstream.version}" for build in upstream.builds)
        raise PatchRefusal(
            what=f"{upstream.package} is not there",
            where=arguments.site or sys.prefix,
            mend=f"install {names} with --no-deps (scripts/bootstrap.py does)"
            if upstream.placement == "installed"
            else f"isoexec patches apply {upstream.package}",
        )
    return site


def _shadow(upstream: Upstream, repository: Path) -> str:
    if upstream.placement != "repository":
        return ""
    spec = importlib.util.find_spec(upstream.root)
    origin = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
    if origin is not None and not origin.is_relative_to((repository / upstream.root).resolve()):
        return f"  WARNING: `import {upstream.root}` finds {origin.parent}, which is not patched: uninstall it"
    return ""
