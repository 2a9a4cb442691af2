"""What state a package is in, judged by the bytes of every Python file of it, and of any file that a series touches.

Each file is pristine (the hash in RECORD), patched (exactly what the current series makes of it), older (what an
earlier series or a killed run made of it, as the journal knows) or foreign. In a tree unpacked into the repository,
which is ours as a whole, files of other kinds count as well, and Python files that are in no RECORD. `applied_state`
and `series_digest` are what the contract reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skyrl_isoexec.patching.errors import PatchRefusal
from skyrl_isoexec.patching.git import patched_files
from skyrl_isoexec.patching.patchfile import Patch, digest_series, read_series, touched_paths
from skyrl_isoexec.patching.record import content_hash
from skyrl_isoexec.patching.site import Site, find_site
from skyrl_isoexec.patching.upstreams import Upstream, find_repository, read_upstreams

ABSENT, PRISTINE, PATCHED, MIXED, FOREIGN = "absent", "pristine", "patched", "mixed", "foreign"
Contents = dict[str, bytes | None]


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The files of one site against one series. Contents and hashes of None: there is no such file."""

    site: Site
    """Where it was taken."""
    actual: Mapping[str, str | None]
    """Path to the hash of what is there now."""
    pristine: Contents
    """Upstream bytes of the touched files; without those that are lost."""
    target: Contents | None
    """What the series makes of them; None if pristine bytes are lost or the series does not apply."""
    foreign: tuple[str, ...]
    """Paths whose content is neither upstream's nor ours."""
    differing: tuple[str, ...]
    """Paths whose content is not the target; all paths without a target."""
    changed: tuple[str, ...]
    """Paths whose content is not pristine."""

    @property
    def state(self) -> str:
        """PATCHED also where the series is empty and nothing is changed."""
        if self.foreign:
            return FOREIGN
        if not self.differing:
            return PATCHED
        return MIXED if self.changed else PRISTINE

    @property
    def mend(self) -> str:
        """What makes it PATCHED; empty where it is."""
        upstream, build = self.site.upstream, self.site.build
        if self.state == PATCHED:
            return ""
        again = f"isoexec patches apply {upstream.package}"
        if self.state != FOREIGN:
            return again
        keep = f"keep your edits as a patch in patches/{upstream.package}/, then "
        if upstream.placement == "repository":
            return f"{keep}remove the files and run: {again}"
        pip = f"pip install --force-reinstall --no-deps {build.distribution}=={upstream.version}"
        return f"{keep}restore pristine files and patch them: {pip} && {again}"

    def refuse_foreign(self) -> None:
        """Raises if there is a file that must not be overwritten."""
        if self.foreign:
            raise PatchRefusal(
                what=f"{len(self.foreign)} file(s) of {self.site.upstream.package} are neither pristine nor ours: "
                f"{', '.join(self.foreign[:5])}{', ...' if len(self.foreign) > 5 else ''}",
                where=str(self.site.root),
                mend=self.mend,
            )


def survey(site: Site, patches: tuple[Patch, ...], *, tolerant: bool = False) -> Survey:
    """Compares every relevant file. `tolerant` takes a series that does not apply (for revert) as having no target."""
    journal = site.store.journal()
    touched = set(touched_paths(patches)) | set(journal)
    owned = {path for path in site.recorded if path.endswith(".py") or site.upstream.placement == "repository"}
    contents = {path: site.read(path) for path in sorted(touched | owned | _strays(site, touched))}
    actual = {path: _hash(content) for path, content in contents.items()}
    pristine: Contents = {}
    for path in sorted(touched):
        recorded = site.recorded.get(path)
        content = contents[path] if actual[path] == recorded else site.store.get(recorded) if recorded else None
        if (content is None) == (recorded is None):
            pristine[path] = content
    target = None
    if len(pristine) == len(touched):
        try:
            target = patched_files(pristine, patches)
        except PatchRefusal:
            if not tolerant:
                raise
    foreign, differing, changed = [], [], []
    for path, found in actual.items():
        recorded = site.recorded.get(path)
        wanted = _hash(target[path]) if target is not None and path in target else recorded
        known = {recorded, wanted} | journal.get(path, set())
        if found not in known or (path in touched and path not in pristine):
            foreign.append(path)
        if found != wanted or (path in touched and target is None):
            differing.append(path)
        if found != recorded:
            changed.append(path)
    return Survey(site=site, actual=actual, pristine=pristine, target=target, foreign=tuple(foreign),
                  differing=tuple(differing), changed=tuple(changed))  # fmt: skip


def _hash(content: bytes | None) -> str | None:
    return None if content is None else content_hash(content)


def _strays(site: Site, known: set[str]) -> set[str]:
    """Python files in an unpacked tree that neither the wheel nor a series put there."""
    if site.upstream.placement != "repository":
        return set()
    folder = site.root / site.upstream.root
    found = {path.relative_to(site.root).as_posix() for path in folder.rglob("*.py")}
    return {path for path in found if path not in site.recorded and path not in known}


@dataclass(frozen=True, kw_only=True)
class AppliedState:
    """The facts about one upstream that a contract compares."""

    package: str
    """Folder under patches/."""
    version: str
    """The pinned version; the installed one is equal or was refused."""
    build: str | None
    """Which pinned wheel the files come from; None where absent."""
    state: str
    """ABSENT, PRISTINE, PATCHED, MIXED or FOREIGN."""
    num_patches: int
    """Length of the series."""
    series_digest: str
    """`series_digest(package)`."""
    paths: tuple[str, ...]
    """The foreign paths, else the ones that are not as the series wants them."""
    mend: str
    """What makes it PATCHED; empty where it is."""


def series_digest(package: str, repository: Path | None = None) -> str:
    """Hex SHA-256 of the package's series: names and diffs in order, without the prose."""
    repository = find_repository() if repository is None else repository
    _upstream(package, repository)
    return digest_series(read_series(repository / "patches" / package))


def applied_state(package: str, repository: Path | None = None, search: list[str] | None = None) -> AppliedState:
    """Reads the state of one package; refuses versions and wheels that are not pinned. Imports nothing of it."""
    repository = find_repository() if repository is None else repository
    upstream = _upstream(package, repository)
    patches = read_series(repository / "patches" / package)
    site = find_site(upstream, repository, search)
    taken = None if site is None else survey(site, patches)
    return AppliedState(
        package=package,
        version=upstream.version,
        build=None if site is None else site.build.name,
        state=ABSENT if taken is None else taken.state,
        num_patches=len(patches),
        series_digest=digest_series(patches),
        paths=() if taken is None else taken.foreign or taken.differing,
        mend=f"isoexec patches apply {package}" if taken is None else taken.mend,
    )


def _upstream(package: str, repository: Path) -> Upstream:
    upstreams = read_upstreams(repository)
    if package not in upstreams:
        raise PatchRefusal(
            what=f"unknown package {package!r}; known: {', '.join(upstreams)}",
            where=str(repository / "patches" / "upstreams.toml"),
            mend="use a known name",
        )
    return upstreams[package]
