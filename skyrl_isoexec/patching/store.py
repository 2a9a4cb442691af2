"""What has to be remembered beside a patched tree: the pristine bytes, and which contents are ours.

`blobs/<sha256>` holds pristine files by the hash of their content. `applied.json` is the journal: for every path that
a series of ours touches here, the hashes we may have written to it (null: we removed it). Both are complete before the
first file is replaced, so a killed run leaves only contents that are known.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from skyrl_isoexec.patching.errors import PatchRefusal
from skyrl_isoexec.patching.record import content_hash


class Store:
    """The store of one package in one environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def journal_path(self) -> Path:
        """The journal's file."""
        return self.folder / "applied.json"

    def journal(self) -> dict[str, set[str | None]]:
        """Path to our hashes; empty where nothing is applied; refuses a journal that cannot be read."""
        try:
            return {path: set(hashes) for path, hashes in json.loads(self.journal_path.read_text()).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise PatchRefusal(
                what=f"the journal of applied patches cannot be read: {type(error).__name__}: {error}",
                where=str(self.journal_path),
                mend="remove this folder and reinstall the pinned wheel (or unpack it again)",
            ) from error

    def write_journal(self, journal: Mapping[str, set[str | None]]) -> None:
        """Replaces the journal atomically."""
        raw = {path: sorted(hashes, key=str) for path, hashes in sorted(journal.items())}
        write_atomically(self.journal_path, (json.dumps(raw, indent=1) + "\n").encode())

    def put(self, content: bytes) -> None:
        """Keeps a pristine file."""
        path = self.folder / "blobs" / content_hash(content)
        if not path.is_file() or content_hash(path.read_bytes()) != path.name:
            write_atomically(path, content)

    def get(self, digest: str) -> bytes | None:
        """The kept file of this hash; None if there is none or its bytes changed."""
        path = self.folder / "blobs" / digest
        content = path.read_bytes() if path.is_file() else None
        return content if content is not None and content_hash(content) == digest else None

    def forget(self) -> None:
        """Removes the journal, then the blobs; called when every file is pristine again."""
        self.journal_path.unlink(missing_ok=True)
        shutil.rmtree(self.folder / "blobs", ignore_errors=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the store for one writer; a second one waits."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a new file beside `path`, then moves it there: other hard links of the old file keep their bytes."""
    stage(path, content)
    os.replace(staged(path), path)


def staged(path: Path) -> Path:
    """Where the new content of `path` waits for its replace."""
    return path.with_name(f".{path.name}.isoexec-new")


def stage(path: Path, content: bytes) -> None:
    """Writes the new content of `path` beside it, durable and with the same mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged(path).unlink(missing_ok=True)
    with open(staged(path), "xb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    if path.exists():
        shutil.copymode(path, staged(path))
