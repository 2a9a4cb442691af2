"""Rules about the files themselves: their size, what is never committed, what they never say."""

import re
import warnings
from pathlib import Path

QUESTIONED, REFUSED = 300, 500
"""Lines of a Python file: about 120 is the aim, above the first number a file is listed, above the second refused."""

OF_ONE_MACHINE = re.compile(r"(?<![\w.\-/}])/(?:home|root|Users|work|mnt)/\w+|/tmp/w\b")
EMPTY_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "lab"}
SAY_NOTHING = re.compile(r"\b(?:helpers?|lab)\b", re.IGNORECASE)
THIS = Path("tests/hygiene/test_files.py")


def test_files_stay_small(root: Path, tracked: list[Path]) -> None:
    """A long file is more than one idea."""
    lines = {p: len((root / p).read_text(encoding="utf-8").splitlines()) for p in tracked if p.suffix == ".py"}
    for path, count in sorted(lines.items()):
        if count > QUESTIONED:
            warnings.warn(f"{path} has {count} lines: can it be two ideas?", stacklevel=1)
    too_long = {str(p): n for p, n in lines.items() if n > REFUSED}
    assert not too_long, f"files of more than {REFUSED} lines: {too_long}"


def test_upstream_is_not_committed(tracked: list[Path]) -> None:
    """`skyrl/` is generated from the pinned wheel and patches/skyrl; only its README is ours."""
    ours = {Path("skyrl/README.md")}
    committed = [str(p) for p in tracked if p.parts[0] == "skyrl" and p not in ours]
    assert not committed, f"generated files under skyrl/: {committed}"


def test_no_path_of_one_machine(own_text: dict[Path, str]) -> None:
    """A clone works anywhere, so no file names a folder of the machine that it was written on."""
    found = [f"{p}: {m.group(0)}" for p, text in own_text.items() if p != THIS for m in OF_ONE_MACHINE.finditer(text)]
    assert not found, f"absolute paths of one machine: {found}"


def test_names_say_something(own_text: dict[Path, str]) -> None:
    """A folder is a noun and a file one idea: no drawer for the rest, and no word for one either."""
    drawers = [str(p) for p in own_text if EMPTY_NAMES & {*p.parts[:-1], p.stem}]
    assert not drawers, f"names that say nothing: {drawers}"
    words = [f"{p}: {m.group(0)}" for p, t in own_text.items() if p != THIS for m in SAY_NOTHING.finditer(t)]
    assert not words, f"words that say nothing: {words}"
