"""Rules that a series must keep, checked on the files alone: no wheel and no git needed."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from skyrl_isoexec.patching.errors import PatchRefusal
from skyrl_isoexec.patching.patchfile import MAX_CONTEXT, NAME, Patch, read_names, split_patch
from skyrl_isoexec.patching.upstreams import Upstream, read_upstreams

TRAILERS = ("Kind", "Upstream-Status", "Drop-when", "Test")
SEAM_LINES, SEAM_LIMIT = 15, 40
"""Changed lines of a seam patch: above the first a question, above the second refused."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One broken rule."""

    where: str
    """File, relative to the repository."""
    what: str
    """The rule and what was found."""
    fatal: bool = True
    """False for a question that a reviewer has to answer."""


def lint(repository: Path) -> tuple[Finding, ...]:
    """Every broken rule of every series, and packages that have no pin or no folder."""
    upstreams = read_upstreams(repository)
    folders = {path.name for path in (repository / "patches").iterdir() if path.is_dir()}
    unpinned = "has no pin in upstreams.toml"
    found = [Finding(where=f"patches/{name}", what=unpinned) for name in sorted(folders - set(upstreams))]
    for upstream in upstreams.values():
        found += _lint_package(repository, upstream)
    return tuple(found)


def _lint_package(repository: Path, upstream: Upstream) -> list[Finding]:
    folder = repository / "patches" / upstream.package
    where = f"patches/{upstream.package}/series"
    try:
        names = read_names(folder)
    except PatchRefusal as refusal:
        return [Finding(where=where, what=refusal.what)]
    present = {path.name for path in folder.iterdir()} - {"series", "README.md"}
    problems = [f"lists {name} more than once" for name in sorted(set(names)) if names.count(name) > 1]
    problems += [f"lists {name}, which does not exist" for name in sorted(set(names) - present)]
    problems += [f"does not list {name}" for name in sorted(present - set(names))]
    found = [Finding(where=where, what=what) for what in problems]
    for name in dict.fromkeys(name for name in names if name in present):
        patch = split_patch(name, (folder / name).read_bytes())
        problems = [*_header_problems(repository, patch), *_diff_problems(upstream, patch)]
        found += [Finding(where=f"patches/{upstream.package}/{name}", what=what) for what in problems]
        lines = sum(file.changed_lines for file in patch.files)
        if name.startswith("seam-") and SEAM_LINES < lines:
            what = f"a seam patch of {lines} changed lines; it should add one call (about 10, at most {SEAM_LIMIT})"
            fatal = lines > SEAM_LIMIT
            found.append(Finding(where=f"patches/{upstream.package}/{name}", what=what, fatal=fatal))
    return found


def _header_problems(repository: Path, patch: Patch) -> list[str]:
    problems = []
    if not NAME.fullmatch(patch.name):
        problems.append("the name must be seam-, fix- or backport- and words in lower case, joined by -, then .patch")
    if len(patch.prose.split()) < 8:
        problems.append("the header must begin with a paragraph of why")
    values: dict[str, list[str]] = {}
    for name, value in patch.trailers:
        values.setdefault(name, []).append(value)
    for name in TRAILERS:
        given = values.pop(name, [])
        if not given or not all(given):
            problems.append(f"the trailer {name}: is missing or empty")
        elif len(given) > 1 and name != "Test":
            problems.append(f"the trailer {name}: is given {len(given)} times")
        elif name == "Kind" and given[0] != patch.name.partition("-")[0]:
            problems.append(f"Kind: is {given[0]!r}, the file name says {patch.name.partition('-')[0]!r}")
        elif name == "Test":
            problems += [problem for test in given if (problem := _test_problem(repository, test))]
        elif name == "Upstream-Status" and patch.name.startswith("backport-"):
            if not re.search(r"\b[0-9a-f]{7,40}\b|/pull/\d+", given[0]):
                problems.append("Upstream-Status: of a backport must name the upstream commit or pull request")
    problems += [f"unknown trailer {name}:; known are {', '.join(TRAILERS)}" for name in values]
    return problems


def _test_problem(repository: Path, test: str) -> str | None:
    path, *names = test.split("::")
    if not names or not path.startswith("tests/"):
        return f"Test: must be tests/<file>.py::<name>, is {test!r}"
    if not (repository / path).is_file():
        return f"Test: {path} does not exist"
    nodes: list[ast.stmt] = ast.parse((repository / path).read_text()).body
    for name in names:
        named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        match = [node for node in nodes if isinstance(node, named) and node.name == name.partition("[")[0]]
        if not match:
            return f"Test: {path} has no {'::'.join(names)}"
        nodes = match[0].body
    return None


def _diff_problems(upstream: Upstream, patch: Patch) -> list[str]:
    if not patch.files:
        return ["has no git diff (a line that starts with 'diff --git')"]
    problems = []
    for file in patch.files:
        if not file.path.startswith(f"{upstream.root}/") or ".." in Path(file.path).parts:
            problems.append(f"touches {file.path}, which is not under {upstream.root}/ of the wheel")
        if file.context > MAX_CONTEXT:
            problems.append(f"has {file.context} lines of context in {file.path}; at most {MAX_CONTEXT}, better 1")
        if file.changed_lines == 0:
            problems.append(f"changes no line of {file.path}")
    unfit = re.search(rb"^(rename |copy |similarity |old mode|new mode|GIT binary|Binary files|-- $)", patch.body, re.M)
    if unfit:
        problems.append(f"only whole text changes are allowed, found {unfit[0].decode().strip()!r}")
    paths = [file.path for file in patch.files]
    if len(set(paths)) != len(paths):
        problems.append("has two sections for one file")
    if not patch.body.endswith(b"\n"):
        problems.append("does not end with a newline")
    return problems
