"""The package that lives in the checkout: unpacked from its wheel into a git-ignored folder.

Only files under the package's root are taken. RECORD is written last and marks a complete tree, so a killed run starts
over. The folder's README.md is tracked by git and never touched.
"""

from pathlib import Path

from skyrl_isoexec.patching.errors import PatchRefusal
from skyrl_isoexec.patching.record import content_hash, read_record, record_digest
from skyrl_isoexec.patching.site import repository_store
from skyrl_isoexec.patching.store import write_atomically
from skyrl_isoexec.patching.upstreams import Upstream
from skyrl_isoexec.patching.wheels import fetch


def ensure_unpacked(upstream: Upstream, repository: Path, wheel_dir: Path | None = None) -> int:
    """Unpacks what is missing of the pinned wheel's tree; returns how many files it wrote.

    A tree of another wheel is replaced if nothing in it was edited. Refuses to overwrite a file it does not know."""
    (build,) = upstream.builds
    store = repository_store(upstream, repository)
    record_path = store.folder / "RECORD"
    complete = False
    if record_path.is_file():
        recorded = read_record(record_path.read_text(), upstream.root)
        complete = record_digest(recorded) == build.record_sha256
        removed = {path for path, hashes in store.journal().items() if None in hashes}
        if complete and all((repository / path).is_file() for path in recorded if path not in removed):
            return 0
        if not complete:
            _remove(upstream, repository, recorded)
    wheel = fetch(upstream, build, repository, wheel_dir)
    contents = wheel.read(sorted(wheel.recorded()))
    missing = [path for path in contents if not (repository / path).exists()]
    edited = [path for path in contents if path not in missing and _content(repository, path) != contents[path]]
    if not complete and edited:
        raise PatchRefusal(
            what=f"{len(edited)} file(s) would be overwritten that are not from {build.wheel}: {', '.join(edited[:5])}",
            where=str(repository / upstream.root),
            mend=f"move them away; {upstream.root}/ is generated and must hold nothing but README.md",
        )
    for path in missing:
        content = contents[path]
        assert content is not None, "paths come from the wheel's RECORD"
        write_atomically(repository / path, content)
    write_atomically(record_path, wheel.record().encode())
    return len(missing)


def _content(repository: Path, path: str) -> bytes | None:
    target = repository / path
    return target.read_bytes() if target.is_file() else None


def _remove(upstream: Upstream, repository: Path, recorded: dict[str, str]) -> None:
    store = repository_store(upstream, repository)
    journal = store.journal()
    edited = []
    for path in recorded.keys() | journal.keys():
        content = _content(repository, path)
        if content is not None and content_hash(content) not in journal.get(path, set()) | {recorded.get(path)}:
            edited.append(path)
    if edited:
        raise PatchRefusal(
            what=f"the tree of an earlier wheel has {len(edited)} edited file(s): {', '.join(sorted(edited)[:5])}",
            where=str(repository / upstream.root),
            mend=f"keep the edits as a patch in patches/{upstream.package}/, remove these files, and run it again",
        )
    for path in recorded.keys() | journal.keys():
        (repository / path).unlink(missing_ok=True)
    store.forget()
    (store.folder / "RECORD").unlink()
