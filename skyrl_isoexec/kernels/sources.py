"""Digests of source code that move when the code does: what names an implementation, and what a gate's record is for.

A digest is taken over the syntax tree, so comments, docstrings and formatting do not move it, and Python 3.11 and 3.12
give the same one. What decides the bits of an implementation is found by following imports from its file, so that there
is no list to forget. Standard library only.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of `skyrl_isoexec`; other functions take another tree of the same name."""
_SKIPPED = {"kind", "type_comment", "type_ignores"}
"""Fields of nodes that say how something was written."""


def _is_docstring(node: object) -> bool:
    """A string that stands alone, wherever: it has no effect."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _joined(parts: list[ast.expr]) -> list[ast.expr]:
    """Pieces of an f-string with neighbouring constants as one: Python versions cut them differently."""
    merged: list[ast.expr] = []
    for part in parts:
        if isinstance(part, ast.Constant) and merged and isinstance(merged[-1], ast.Constant):
            merged[-1] = ast.Constant(merged[-1].value + part.value)
        elif not (isinstance(part, ast.Constant) and part.value == ""):
            merged.append(part)
    return merged


def _dump(node: object) -> str:
    if isinstance(node, ast.Constant):
        return f"{type(node.value).__name__} {ascii(node.value)}"
    if isinstance(node, list):
        return "[" + ",".join(_dump(item) for item in node if not _is_docstring(item)) + "]"
    if not isinstance(node, ast.AST):
        return ascii(node)
    fields = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(node, ast.JoinedStr):
            value = _joined(value)
        if name not in _SKIPPED and value is not None and value != []:
            fields.append(f"{name}={_dump(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


@functools.lru_cache(maxsize=512)
def dump(source: str) -> str:
    """The syntax tree of Python source as text, without what has no effect."""
    return _dump(ast.parse(source))


def _digest(named: list[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in named:
        digest.update(f"{name}\n{dump(path.read_text(encoding='utf-8'))}\n".encode())
    return digest.hexdigest()


def source_digest(*paths: Path | str) -> str:
    """Digest of files and folders in the order given; a folder stands for all Python files in it, by name.

    Where the paths lie does not enter. FileNotFoundError for a path, or a folder's Python files, that do not exist.
    """
    named: list[tuple[str, Path]] = []
    for path in map(Path, paths):
        found = sorted((p.relative_to(path).as_posix(), p) for p in path.rglob("*.py")) if path.is_dir() else []
        if path.is_dir() and not found:
            raise FileNotFoundError(f"{path} holds no Python file")
        named += [(f"{path.name}/{name}", p) for name, p in found] or [(path.name, path)]
    if not named:
        raise FileNotFoundError("a digest of no file was asked for")
    return _digest(named)


@functools.lru_cache(maxsize=512)
def _imported(source: str) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """(level, dotted name) of everything that may be a module among what is imported, wherever in the source."""
    names: list[tuple[int, tuple[str, ...]]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [(0, tuple(alias.name.split("."))) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = tuple(node.module.split(".")) if node.module else ()
            names += [(node.level, base)] + [(node.level, (*base, alias.name)) for alias in node.names]
    return tuple(names)


def _imports(path: Path, package: Path) -> Iterator[Path]:
    """Files of `package` that a file of it imports by name."""
    here = path.relative_to(package.parent).parts[:-1]
    for level, name in _imported(path.read_text(encoding="utf-8")):
        name = (here[: len(here) + 1 - level] if level else ()) + name
        if name[:1] != (package.name,):
            continue
        for depth in range(1, len(name) + 1):
            module = package.parent.joinpath(*name[:depth])
            yield from (p for p in (module.with_suffix(".py"), module / "__init__.py") if p.is_file())


def reached(path: Path, package: Path = PACKAGE) -> list[Path]:
    """`path` and every file of `package` that importing it imports, directly or not, in order of their names."""
    seen, waiting = set(), [path]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            waiting += _imports(current, package)
    return sorted(seen)


def import_digest(path: Path, package: Path = PACKAGE) -> str:
    """Digest of a file of `package` together with every file of it that is imported from there."""
    return _digest([(p.relative_to(package.parent).as_posix(), p) for p in reached(path, package)])


def impl_file(impl_id: str, package: Path = PACKAGE) -> Path:
    """The file of an implementation named "<op>.<file>", as "attention.cpu"; ValueError if there is none."""
    op, _, file = impl_id.partition(".")
    path = package / "kernels" / op / f"{file}.py"
    if not op.isidentifier() or not file.isidentifier() or not path.is_file():
        raise ValueError(f"kernels: no implementation {impl_id!r}: kernels/{op}/{file}.py does not exist")
    return path


def impl_source(impl_id: str, package: Path = PACKAGE) -> str:
    """Digest of all the code of ours that decides the bits of an implementation; ValueError if there is none."""
    return import_digest(impl_file(impl_id, package), package)
