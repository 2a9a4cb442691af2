"""Where a patched package lies: a root folder, the pristine hash of each file in it, and a store beside it.

An installed package is found through its distribution's RECORD, without importing it. A package unpacked into the
repository brings its RECORD along in its store.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from skyrl_isoexec.patching.errors import PatchRefusal
from skyrl_isoexec.patching.record import read_record, record_digest
from skyrl_isoexec.patching.store import Store
from skyrl_isoexec.patching.upstreams import Build, Upstream

STORE = ".isoexec-patches"


@dataclass(frozen=True, kw_only=True)
class Site:
    """One package in one environment."""

    upstream: Upstream
    """Its pin."""
    build: Build
    """The pinned wheel this tree comes from."""
    root: Path
    """Folder that paths are relative to."""
    recorded: Mapping[str, str]
    """Path to pristine SHA-256."""
    store: Store
    """Pristine bytes and journal."""

    def read(self, path: str) -> bytes | None:
        """A file's bytes or None; refuses a path that leads out of the root through a linked folder."""
        target = self.root / path
        if not target.parent.resolve().is_relative_to(self.root.resolve()):
            raise PatchRefusal(
                what=f"{path} lies behind a linked folder: patching it would change files of another environment",
                where=str(target.parent.resolve()),
                mend="install the package with copied files (pip, or uv with --link-mode=copy)",
            )
        return target.read_bytes() if target.is_file() else None


def find_site(upstream: Upstream, repository: Path, search: list[str] | None = None) -> Site | None:
    """The package's site or None where it is absent; refuses versions and builds that are not pinned.

    `search` replaces sys.path for installed packages."""
    if upstream.placement == "repository":
        return repository_site(upstream, repository)
    return installed_site(upstream, search)


def repository_store(upstream: Upstream, repository: Path) -> Store:
    """The store of a package that is unpacked into the repository."""
    return Store(repository / upstream.root / STORE)


def repository_site(upstream: Upstream, repository: Path) -> Site | None:
    """The unpacked tree; None until its RECORD, which is written last, is there."""
    store = repository_store(upstream, repository)
    record = store.folder / "RECORD"
    if not record.is_file():
        return None
    recorded = read_record(record.read_text(), upstream.root)
    (build,) = upstream.builds
    if record_digest(recorded) != build.record_sha256:
        raise PatchRefusal(
            what=f"{upstream.root}/ was unpacked from another wheel than {build.wheel}: its RECORD has digest "
            f"{record_digest(recorded)}, pinned is {build.record_sha256}",
            where=str(repository / upstream.root),
            mend=f"isoexec patches apply {upstream.package} (replaces the tree if nothing in it was edited)",
        )
    return Site(upstream=upstream, build=build, root=repository, recorded=recorded, store=store)


def installed_site(upstream: Upstream, search: list[str] | None = None) -> Site | None:
    """The installed distribution that owns files under the package's root."""
    owners: dict[str, tuple[Distribution, dict[str, str]]] = {}
    for name in dict.fromkeys(build.distribution for build in upstream.builds):
        for found in distributions(name=name) if search is None else distributions(name=name, path=search):
            recorded = read_record(found.read_text("RECORD") or "", upstream.root)
            if recorded:
                owners.setdefault(name, (found, recorded))
    if not owners:
        return None
    if len(owners) > 1:
        raise PatchRefusal(
            what=f"several distributions own {upstream.root}/: {', '.join(owners)}",
            where=str(next(iter(owners.values()))[0].locate_file("")),
            mend="uninstall them all and install one",
        )
    ((name, (found, recorded)),) = owners.items()
    root = Path(str(found.locate_file("")))
    builds = [build for build in upstream.builds if build.distribution == name]
    mend = f"install the pinned wheel: pip install --force-reinstall --no-deps {name}=={upstream.version}"
    if found.version != upstream.version:
        raise PatchRefusal(
            what=f"{name} {found.version} is installed, the patches are for {upstream.version}",
            where=str(root / upstream.root),
            mend=mend,
        )
    for build in builds:
        if record_digest(recorded) == build.record_sha256:
            store = Store(root / STORE / upstream.package)
            return Site(upstream=upstream, build=build, root=root, recorded=recorded, store=store)
    raise PatchRefusal(
        what=f"{name} {found.version} is installed from a wheel that is not pinned: its RECORD has digest "
        f"{record_digest(recorded)}, pinned are {', '.join(build.record_sha256 for build in builds)}",
        where=str(root / upstream.root),
        mend=mend,
    )
