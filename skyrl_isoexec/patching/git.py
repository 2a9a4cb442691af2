"""A temporary git repository in which a series is applied strictly, one commit per patch.

git runs without the user's configuration, so that the same input gives the same bytes on every machine. `git apply`
checks context exactly but searches for it at other line numbers; such an offset is refused here as well.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from skyrl_isoexec.patching.errors import PatchRefusal
from skyrl_isoexec.patching.patchfile import Patch

_SETTINGS = {
    "core.autocrlf": "false",
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
    "core.hooksPath": os.devnull,
    "commit.gpgSign": "false",
    "gc.auto": "0",
    "user.name": "IsoExec",
    "user.email": "isoexec@localhost",
    "init.defaultBranch": "main",
    "advice.detachedHead": "false",
}
_DIFF = (
    "diff --no-color --no-ext-diff --no-textconv --no-renames --full-index --diff-algorithm=myers --indent-heuristic "
    "--inter-hunk-context=0 --src-prefix=a/ --dst-prefix=b/"
).split()


class GitTree:
    """A git repository in `folder` whose commits are the pristine files and then one patch each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *arguments: str, stdin: bytes = b"") -> bytes:
        """Runs git in the tree and returns its stdout; CalledProcessError carries stderr."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment = kept | {
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_CEILING_DIRECTORIES": str(self.folder.parent),
            "LC_ALL": "C",
        }
        settings = [part for name, value in _SETTINGS.items() for part in ("-c", f"{name}={value}")]
        command = ["git", *settings, *arguments]
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, input=stdin, capture_output=True, check=True
            )
        except FileNotFoundError as error:
            raise PatchRefusal(what="git is not installed", where="PATH", mend="install git 2.30 or newer") from error
        return done.stdout + (done.stderr if "--verbose" in arguments else b"")

    def write(self, files: Mapping[str, bytes | None]) -> None:
        """Writes files without a repository around them; None is no file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            if content is not None:
                target = self.folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)

    def start(self, files: Mapping[str, bytes | None]) -> None:
        """Creates the repository with `files` as its first commit, tagged pristine."""
        self.write(files)
        self.run("init", "--quiet")
        self.run("add", "--all", "--force")
        self.commit("pristine")
        self.run("tag", "pristine")

    def commit(self, message: str) -> None:
        """Commits what is staged."""
        self.run("commit", "--quiet", "--allow-empty", "--no-verify", "--cleanup=verbatim", "--file=-",
                 stdin=message.encode())  # fmt: skip

    def apply(self, patch: Patch, *, reverse: bool = False) -> None:
        """Applies one patch to the files, and stages it; refuses drifted context and drifted line numbers."""
        options = [*(["--index"] if (self.folder / ".git").is_dir() else []), *(["--reverse"] if reverse else [])]
        try:
            said = self.run("apply", "--verbose", "--whitespace=nowarn", *options, stdin=patch.body)
        except subprocess.CalledProcessError as error:
            said, failed = error.stderr, True
        else:
            failed = b"(offset" in said
        if failed:
            raise PatchRefusal(
                what=f"{patch.name} does not {'revert' if reverse else 'apply'} strictly:\n{said.decode().rstrip()}",
                where=f"patch {patch.name}",
                mend="rewrite the patch against the pinned source: isoexec patches export --tree",
            )

    def read(self, path: str) -> bytes | None:
        """A file of the work tree, or None."""
        target = self.folder / path
        return target.read_bytes() if target.is_file() else None

    def diff(self, old: str, new: str, *, context: int) -> bytes:
        """The diff between two commits in the normal form of our patches."""
        return self.run(*_DIFF, f"--unified={context}", old, new)


@contextmanager
def temporary_tree(files: Mapping[str, bytes | None]) -> Iterator[GitTree]:
    """A `GitTree` of `files` that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="isoexec-patches-") as folder:
        tree = GitTree(Path(folder) / "tree")
        tree.start(files)
        yield tree


def patched_files(pristine: Mapping[str, bytes | None], patches: tuple[Patch, ...]) -> dict[str, bytes | None]:
    """The contents of the same paths after the whole series; None is a file that does not exist."""
    if not patches:
        return dict(pristine)
    with tempfile.TemporaryDirectory(prefix="isoexec-patches-") as folder:
        tree = GitTree(Path(folder))
        tree.write(pristine)
        for patch in patches:
            tree.apply(patch)
        return {path: tree.read(path) for path in pristine}
