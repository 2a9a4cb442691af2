"""Rules about imports and style, checked with the tools that the Makefile runs, so that CI is never softer."""

import ast
import subprocess
import sys
from pathlib import Path


def run(root: Path, *command: str) -> None:
    """Run one tool of this environment in the repository and show what it said where it failed."""
    tool = Path(sys.executable).with_name(command[0])
    assert tool.exists(), f"{tool} is missing: run scripts/bootstrap.py"
    done = subprocess.run([str(tool), *command[1:]], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_import_directions(root: Path) -> None:
    """launch -> runtimes -> model -> kernels -> schedule -> contract, and each host in its own folder only."""
    run(root, "lint-imports", "--no-cache")


def test_style(root: Path) -> None:
    """The linter finds nothing in our own files."""
    run(root, "ruff", "check", "--no-cache", ".")


def imported(path: Path) -> set[str]:
    """Top-level names that a Python file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
    return names


def test_contract_is_standard_library_only(root: Path) -> None:
    """A contract is read and compared where nothing else is installed."""
    files = sorted((root / "skyrl_isoexec" / "contract").rglob("*.py"))
    foreign = {
        f"{path.relative_to(root)}: {name}"
        for path in files
        for name in imported(path)
        if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith("skyrl_isoexec.contract")
    }
    assert not foreign, f"the contract imports more than the standard library: {sorted(foreign)}"
