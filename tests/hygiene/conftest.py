"""What the repository's own files are: tracked ones, and new ones that git does not ignore."""

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tracked(root: Path) -> list[Path]:
    """Every file of the repository that exists, as a path relative to its root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    files = [Path(name) for name in names if name and (root / name).is_file()]
    assert files, "git lists no files"
    return files


@pytest.fixture(scope="session")
def own_text(root: Path, tracked: list[Path]) -> dict[Path, str]:
    """Text of every file that we wrote ourselves: no patches, which quote upstream, and no licence."""
    suffixes = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".cfg", ".txt", ""}
    chosen = [p for p in tracked if p.suffix in suffixes and p.name != "LICENSE"]
    return {p: (root / p).read_text(encoding="utf-8") for p in chosen}
