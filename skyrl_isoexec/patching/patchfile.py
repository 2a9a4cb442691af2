"""A patch file as data: a header of prose and trailers, then one strict git diff.

Only text files that are modified, added or deleted can be described; renames, modes and binary data cannot, and lint
refuses them. `body` is kept as bytes: it is what is applied and what export must reproduce.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from skyrl_isoexec.patching.errors import PatchRefusal
from skyrl_isoexec.patching.record import content_hash

NAME = re.compile(r"(seam|fix|backport)-[a-z0-9]+(-[a-z0-9]+)*\.patch")
MAX_CONTEXT = 3
"""Most lines of context at an edge of a hunk."""
_TRAILER = re.compile(r"([A-Z][A-Za-z-]*):(?:\s+(.*))?$")
_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


@dataclass(frozen=True, kw_only=True)
class FileDiff:
    """What a patch does to one file."""

    path: str
    """Relative to the root of the wheel."""
    change: str
    """"modify", "add" or "delete"."""
    changed_lines: int
    """Added plus removed lines."""
    context: int
    """The longest run of context lines at an edge of a hunk."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One file of a series."""

    name: str
    """File name; its prefix is the kind."""
    header: str
    """Everything before the diff."""
    body: bytes
    """From the first "diff --git" to the end."""

    @property
    def prose(self) -> str:
        """The header without its trailers."""
        return self._split_header()[0]

    @property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        """(name, value) pairs of the header's last paragraph; indented lines continue a value."""
        found: list[tuple[str, str]] = []
        for line in self._split_header()[1].splitlines():
            match = _TRAILER.match(line)
            if match:
                found.append((match[1], (match[2] or "").strip()))
            elif found:
                found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}".strip())
        return tuple(found)

    @property
    def text(self) -> str:
        """The header without surrounding blank lines and without a closing "---", which mail format puts there."""
        return self.header.strip().removesuffix("\n---").rstrip()

    def _split_header(self) -> tuple[str, str]:
        text = self.text
        prose, _, last = ("\n\n" + text).rpartition("\n\n")
        return (prose.strip(), last) if _TRAILER.match(last.split("\n", 1)[0]) else (text, "")

    @property
    def files(self) -> tuple[FileDiff, ...]:
        """One entry per "diff --git"."""
        sections = re.split(r"^diff --git ", self.body.decode(errors="surrogateescape"), flags=re.MULTILINE)
        return tuple(_read_section(section) for section in sections[1:])


def split_patch(name: str, content: bytes) -> Patch:
    """Cuts a patch file at its first "diff --git" line."""
    match = re.search(rb"^diff --git ", content, flags=re.MULTILINE)
    cut = match.start() if match else len(content)
    return Patch(name=name, header=content[:cut].decode(), body=content[cut:])


def read_names(folder: Path) -> tuple[str, ...]:
    """The names in `folder/series`, in order; blank lines and lines from # on are ignored."""
    series = folder / "series"
    if not series.is_file():
        raise PatchRefusal(
            what=f"no series for {folder.name}", where=str(series), mend="create it; it may be empty, but must exist"
        )
    stripped = (line.partition("#")[0].strip() for line in series.read_text().splitlines())
    return tuple(name for name in stripped if name)


def read_series(folder: Path) -> tuple[Patch, ...]:
    """Every patch of a package, in order."""
    patches = []
    for name in read_names(folder):
        path = folder / name
        if not path.is_file():
            raise PatchRefusal(
                what=f"the series lists a patch that does not exist: {name}",
                where=str(folder / "series"),
                mend="add the patch or remove its line",
            )
        patches.append(split_patch(name, path.read_bytes()))
    return tuple(patches)


def touched_paths(patches: tuple[Patch, ...]) -> tuple[str, ...]:
    """Every path that some patch touches, sorted."""
    return tuple(sorted({file.path for patch in patches for file in patch.files}))


def digest_series(patches: tuple[Patch, ...]) -> str:
    """Hex SHA-256 of the names and diffs in order. Wording of headers does not count: it changes no byte of a host."""
    lines = [f"{patch.name} {content_hash(patch.body)}\n" for patch in patches]
    return content_hash("".join(lines).encode())


def _read_section(section: str) -> FileDiff:
    lines = section.split("\n")
    change, changed, context = "modify", 0, 0
    old = new = run = 0  # lines the open hunk still expects on each side; context lines since its last change
    inner = False  # whether the open hunk has had a change: context between two changes is not an edge
    for line in lines[1:]:
        if old <= 0 and new <= 0:
            hunk = _HUNK.match(line)
            if hunk:
                old, new, run, inner = int(hunk[1] or 1), int(hunk[2] or 1), 0, False
            elif line.startswith(("new file", "deleted file")):
                change = "add" if line.startswith("new") else "delete"
            continue
        if line.startswith(("+", "-")):
            context = context if inner else max(context, run)
            changed, run, inner = changed + 1, 0, True
            old, new = old - line.startswith("-"), new - line.startswith("+")
        elif not line.startswith("\\"):
            old, new, run = old - 1, new - 1, run + 1
        if old <= 0 and new <= 0:
            context = max(context, run)
    return FileDiff(path=lines[0].rpartition(" b/")[2], change=change, changed_lines=changed, context=context)
