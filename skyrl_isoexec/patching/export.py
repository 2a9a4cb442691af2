"""Patch files from commits, and commits from patch files.

In a commit-per-patch tree the commit after `pristine` is the first patch, and so on. A commit's message is the file
name, a blank line and the header; its diff is the body. Export writes one normal form, so that two people who make the
same change get the same bytes.
"""

import re
from pathlib import Path

from skyrl_isoexec.patching.errors import PatchRefusal
from skyrl_isoexec.patching.git import GitTree
from skyrl_isoexec.patching.patchfile import MAX_CONTEXT, NAME, Patch, split_patch
from skyrl_isoexec.patching.store import write_atomically


def build_commits(tree: GitTree, patches: tuple[Patch, ...]) -> None:
    """Applies each patch to a started tree and commits it; refuses one that does not apply strictly."""
    for patch in patches:
        tree.apply(patch)
        tree.commit(f"{patch.name}\n\n{patch.text}\n")


def read_commits(tree: GitTree, known: tuple[Patch, ...]) -> tuple[Patch, ...]:
    """The series that the commits since `pristine` describe, in normal form.

    A patch keeps the context length of its namesake in `known` (1 if it is new)."""
    context = {patch.name: _context(patch) for patch in known}
    commits = tree.run("rev-list", "--reverse", "pristine..HEAD").decode().split()
    patches = []
    for commit in commits:
        message = tree.run("show", "--no-patch", "--format=%B", commit).decode()
        name, _, header = message.partition("\n")
        if not NAME.fullmatch(name):
            raise PatchRefusal(
                what=f"the first line of a commit message must be the file name of its patch, is {name!r}",
                where=f"commit {commit[:12]} in {tree.folder}",
                mend="reword it: seam-..., fix- or backport-<words>.patch, a blank line, then the header",
            )
        body = tree.diff(f"{commit}^", commit, context=context.get(name, 1))
        patches.append(split_patch(name, header.strip().encode() + b"\n\n" + body))
    return tuple(patches)


def write_series(folder: Path, patches: tuple[Patch, ...]) -> tuple[str, ...]:
    """Writes the files that differ; returns their names. The series file is rewritten only if the order changed."""
    wanted = {patch.name: patch.header.encode() + patch.body for patch in patches}
    written = []
    for name, content in wanted.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            write_atomically(path, content)
            written.append(name)
    listed = [line.partition("#")[0].strip() for line in (folder / "series").read_text().splitlines()]
    if [name for name in listed if name] != list(wanted):
        write_atomically(folder / "series", "".join(f"{name}\n" for name in wanted).encode())
        written.append("series")
    return tuple(written)


def _context(patch: Patch) -> int:
    longest = max((file.context for file in patch.files), default=1)
    return min(max(longest, 1), MAX_CONTEXT)


def open_tree(folder: Path) -> GitTree:
    """An existing commit-per-patch tree with nothing uncommitted."""
    tree = GitTree(folder)
    if not (folder / ".git").is_dir():
        raise PatchRefusal(what="not a commit-per-patch tree", where=str(folder), mend="create it with --create")
    status = tree.run("status", "--porcelain").decode()
    changed = re.sub(r"\s+", " ", status).strip()
    if changed:
        raise PatchRefusal(
            what=f"the tree has uncommitted changes: {changed}",
            where=str(folder),
            mend="commit them (git commit --amend, or git commit --fixup and git rebase --autosquash pristine)",
        )
    return tree
