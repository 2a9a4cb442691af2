"""The pins: which upstreams are patched, and the exact wheels the patches are written against.

Reads `patches/upstreams.toml`. A package may have several builds (a wheel per Python version, or one for CPU and one
for CUDA); they share a version and a patch series. Nothing here looks at what is installed.
"""

import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from skyrl_isoexec.patching.errors import PatchRefusal

PLACEMENTS = ("repository", "installed")


@dataclass(frozen=True, kw_only=True)
class Build:
    """One wheel of an upstream."""

    name: str
    """Key in upstreams.toml: "cpu", "cuda", "cp311"."""
    distribution: str
    """Name on PyPI."""
    wheel: str
    """File name of the wheel."""
    sha256: str
    """Hex digest of the wheel file."""
    record_sha256: str
    """Hex digest of the canonical RECORD rows (`record.record_digest`)."""
    python: str | None = None
    """The only Python this wheel is compiled for ("3.11"), or None."""

    def __post_init__(self) -> None:
        for field in ("sha256", "record_sha256"):
            if not re.fullmatch(r"[0-9a-f]{64}", getattr(self, field)):
                raise ValueError(f"{self.wheel}: {field} must be 64 hex digits, is {getattr(self, field)!r}")

    def fits_this_python(self) -> bool:
        """Whether this wheel can be imported by the running interpreter."""
        return self.python in (None, f"{sys.version_info.major}.{sys.version_info.minor}")


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """One patched package."""

    package: str
    """Folder under patches/ and the name used on the command line."""
    version: str
    """The only version the series is for."""
    root: str
    """Folder of the package inside the wheel."""
    placement: str
    """"repository" (unpacked into the checkout) or "installed" (patched in site-packages)."""
    builds: tuple[Build, ...]
    """Its wheels, the default first."""

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise ValueError(f"{self.package}: placement must be one of {PLACEMENTS}, is {self.placement!r}")
        if not self.builds:
            raise ValueError(f"{self.package}: no builds")
        if self.placement == "repository" and len(self.builds) != 1:
            raise ValueError(f"{self.package}: a package unpacked into the repository has exactly one build")

    def default_build(self) -> Build:
        """The first build that fits the running Python."""
        for build in self.builds:
            if build.fits_this_python():
                return build
        known = ", ".join(f"{build.name} (Python {build.python})" for build in self.builds)
        raise PatchRefusal(
            what=f"no pinned {self.package} {self.version} fits Python {sys.version.split()[0]}; known: {known}",
            where="patches/upstreams.toml",
            mend="use one of these versions of Python, or pin a build for this one",
        )


def find_repository(start: Path | None = None) -> Path:
    """The checkout this package runs from: the nearest folder above `start` that has patches/upstreams.toml."""
    start = Path(__file__).resolve() if start is None else start.resolve()
    for folder in (start, *start.parents):
        if (folder / "patches" / "upstreams.toml").is_file():
            return folder
    raise PatchRefusal(
        what="no checkout of IsoExec found: no patches/upstreams.toml in any folder above",
        where=str(start),
        mend="run from a checkout (pip install -e .), or name it with --repository",
    )


def read_upstreams(repository: Path) -> dict[str, Upstream]:
    """Every pinned upstream by package, in file order; refuses unknown, missing and ill-formed fields."""
    path = repository / "patches" / "upstreams.toml"
    try:
        tables = tomllib.loads(path.read_text())
        return {package: _upstream(package, table) for package, table in tables.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise PatchRefusal(
            what=f"the pins cannot be read: {type(error).__name__}: {error}",
            where=str(path),
            mend="restore the file from git, or correct the field that is named",
        ) from error


def _upstream(package: str, table: dict) -> Upstream:
    fields = dict(table)
    builds = tuple(Build(name=name, **build) for name, build in fields.pop("builds").items())
    return Upstream(package=package, builds=builds, **fields)
