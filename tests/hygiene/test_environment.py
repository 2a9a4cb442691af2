"""We have no environment variables of our own: what a run does is in its configuration, which is recorded."""

import ast
import re
from pathlib import Path

OWN = re.compile(r"^(?:ISO|ISOEXEC|SKYRL_ISO\w*)_[A-Z0-9_]+$")


def own_names(source: str) -> list[str]:
    """String constants of a Python source that have the form of an environment variable of ours."""
    nodes = ast.walk(ast.parse(source))
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and OWN.match(n.value)]


def test_detector_detects() -> None:
    names = ["_".join(("ISO", "SEED")), "_".join(("SKYRL_ISOEXEC", "MODE"))]
    assert own_names(f"import os\nx = os.environ[{names[0]!r}], os.getenv({names[1]!r})") == names


def test_no_variables_of_our_own(own_text: dict[Path, str]) -> None:
    """Neither our Python nor the lines that our patches add to an upstream read one."""
    found = [f"{p}: {name}" for p, text in own_text.items() if p.suffix == ".py" for name in own_names(text)]
    assert not found, f"environment variables of our own: {found}"


def test_no_variables_of_our_own_in_patches(root: Path, tracked: list[Path]) -> None:
    """Patched upstream code reads none of ours either."""
    quoted = re.compile(r"""["'](?:ISO|ISOEXEC|SKYRL_ISO\w*)_[A-Z0-9_]+["']""")
    found = [
        f"{path}: {line.strip()}"
        for path in tracked
        if path.suffix == ".patch"
        for line in (root / path).read_text(encoding="utf-8").splitlines()
        if line.startswith("+") and quoted.search(line)
    ]
    assert not found, f"environment variables of our own: {found}"
