"""A host's folder of packages is looked through before anything long is begun there."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def script():
    spec = importlib.util.spec_from_file_location("gpu_smollm2", ROOT / "scripts" / "gpu_smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_a_folder_lacks(tmp_path: Path) -> None:
    """By name and version, however a name is spelt; the folder comes before this Python."""
    for name, version in (("Made_Up.One", "1.0"), ("made-up-two", "2.0"), ("pytest", "0.1")):
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    asked = "# a comment\nmade-up-one==1.0\nmade_up_two==2.1  # newer\nmade-up-three==1\n\npytest==0.1\n"
    assert script().lacking(tmp_path, asked) == ["made_up_two==2.1", "made-up-three==1"]


def test_the_list_is_versions_alone() -> None:
    """Every line of the file names one version, which is what is compared."""
    text = (ROOT / "requirements" / "gpu-host.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) > 10 and all(line.count("==") == 1 and " " not in line for line in lines)
