"""Applying and reverting a series as one transaction over all its files.

Order: compute and verify every new content; keep the pristine bytes and write the journal; stage every new file beside
its old one; move them into place one by one; verify. A run that is killed leaves only known contents, and running
`apply` or `revert` again finishes the work.
"""

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from skyrl_isoexec.patching.errors import PatchRefusal
from skyrl_isoexec.patching.patchfile import Patch
from skyrl_isoexec.patching.record import content_hash
from skyrl_isoexec.patching.site import Site
from skyrl_isoexec.patching.state import Contents, survey
from skyrl_isoexec.patching.store import stage, staged


def apply(site: Site, patches: tuple[Patch, ...]) -> tuple[str, ...]:
    """Brings the site to the series, from pristine or any known state; returns the paths it wrote."""
    with site.store.locked():
        found = survey(site, patches)
        found.refuse_foreign()
        target = found.target
        assert target is not None, "a survey without foreign files and without refusal has a target"
        changes = {path: target[path] for path in found.differing}
        wanted = {path: {_hash(content)} for path, content in target.items() if content != found.pristine[path]}
        before = site.store.journal()
        if not changes and before == wanted:
            _drop_staged(site.root, target)
            return ()
        for path in wanted:
            pristine = found.pristine[path]
            if pristine is not None:
                site.store.put(pristine)
        site.store.write_journal({path: before.get(path, set()) | wanted.get(path, set()) for path in before | wanted})
        _replace(site, changes, everything=target)
        site.store.write_journal(wanted)
        return tuple(changes)


def revert(site: Site, patches: tuple[Patch, ...]) -> tuple[str, ...]:
    """Brings every file back to its exact upstream bytes; returns the paths it wrote. Needs no series that applies."""
    with site.store.locked():
        found = survey(site, patches, tolerant=True)
        found.refuse_foreign()
        changes = {path: found.pristine[path] for path in found.changed}
        _replace(site, changes, everything=found.pristine)
        site.store.forget()
        return tuple(changes)


def _hash(content: bytes | None) -> str | None:
    return None if content is None else content_hash(content)


def _replace(site: Site, changes: Contents, *, everything: Contents) -> None:
    _drop_staged(site.root, everything)
    try:
        for path, content in changes.items():
            if content is not None:
                stage(site.root / path, content)
    except OSError as error:
        _drop_staged(site.root, changes)
        raise PatchRefusal(
            what=f"a new file cannot be written: {error}; nothing was changed",
            where=str(site.root),
            mend="make the folder writable (or free space), and run the command again",
        ) from error
    _drop_bytecode(site.root, changes)
    for path, content in changes.items():
        target = site.root / path
        if content is None:
            target.unlink(missing_ok=True)
            _drop_empty_folders(target.parent, site.root / site.upstream.root)
        else:
            os.replace(staged(target), target)
    _drop_bytecode(site.root, everything)
    for path, content in changes.items():
        if site.read(path) != content:
            raise PatchRefusal(
                what=f"{path} does not hold what was just written to it: another process is changing the package",
                where=str(site.root),
                mend="stop the other process and run the command again",
            )


def _drop_staged(root: Path, paths: Iterable[str]) -> None:
    for path in paths:
        staged(root / path).unlink(missing_ok=True)


def _drop_bytecode(root: Path, paths: Iterable[str]) -> None:
    for path in paths:
        source = root / path
        compiled = Path(importlib.util.cache_from_source(str(source)))
        for folder in {source.parent / "__pycache__", compiled.parent}:
            for stale in folder.glob(f"{source.stem}.*.pyc"):
                stale.unlink(missing_ok=True)


def _drop_empty_folders(folder: Path, stop: Path) -> None:
    while folder != stop and folder.is_relative_to(stop):
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent
