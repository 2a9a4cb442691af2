"""A checkout with two small upstreams: `toy` is patched where it is installed, `home` is unpacked into the checkout."""

import base64
import hashlib
import os
import shutil
import subprocess
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from skyrl_isoexec.patching.patchfile import Patch, read_series
from skyrl_isoexec.patching.record import read_record, record_digest
from skyrl_isoexec.patching.site import Site, find_site
from skyrl_isoexec.patching.upstreams import read_upstreams

TOY = {
    "toy/__init__.py": b"",
    "toy/a.py": b'"""First."""\n\nLIMIT = 1\n\n\ndef first():\n    return LIMIT\n\n\ndef last():\n    return -LIMIT\n',
    "toy/b.py": b"VALUES = [\n    1,\n    2,\n    3,\n]\n",
    "toy/old.py": b"GONE = True\n",
    "toy/untouched.py": b"SAME = True\n",
}
HOME = {"home/__init__.py": b"", "home/main.py": b"def run():\n    return 'native'\n", "other/extra.py": b"NO = 1\n"}
EDITS = {
    "toy": {
        "seam-hook.patch": {"toy/a.py": TOY["toy/a.py"].replace(b"return LIMIT\n", b"return hook(LIMIT)\n")},
        "fix-two-files.patch": {
            "toy/a.py": TOY["toy/a.py"].replace(b"return LIMIT\n", b"return hook(LIMIT)\n").replace(b" = 1", b" = 2"),
            "toy/b.py": TOY["toy/b.py"].replace(b"    2,\n", b"    2,\n    2.5,\n"),
        },
        "backport-new-file.patch": {"toy/sub/new.py": b"NEW = True\n", "toy/old.py": None},
    },
    "home": {"seam-entry.patch": {"home/main.py": HOME["home/main.py"].replace(b"'native'", b"'patched'")}},
}
HEADER = """This text says why the change is needed, and that no extension point of the host would do.

Kind: {kind}
Upstream-Status: merged as 0123456789abcdef
Drop-when: the pin moves past it
Test: tests/test_toy.py::test_it
"""


TESTS = {
    "tests/test_toy.py": "def test_it():\n    pass\n\n\nclass TestAll:\n    def test_in(self):\n        pass\n",
    "home/README.md": "Generated.\n",
}


def build_wheel(folder: Path, distribution: str, version: str, files: dict[str, bytes]) -> Path:
    """A wheel with a RECORD like any other; the same input gives the same bytes."""
    name = distribution.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n".encode()
    tags = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content = files | {f"{info}/METADATA": metadata, f"{info}/WHEEL": tags}
    rows = []
    for path, value in content.items():
        encoded = base64.urlsafe_b64encode(hashlib.sha256(value).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={encoded},{len(value)}")
    content[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    path = folder / f"{name}-{version}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in content.items():
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), value)
    return path


@dataclass(kw_only=True)
class Workshop:
    """The checkout, its wheels and one site-packages folder."""

    root: Path
    """Everything lies below it."""
    wheels: dict[str, Path] = field(default_factory=dict)
    """Package to wheel."""

    @property
    def repository(self) -> Path:
        """The checkout."""
        return self.root / "repository"

    @property
    def site_packages(self) -> Path:
        """Where `toy` is installed."""
        return self.root / "site-packages"

    def pin(self, package: str, files: dict[str, bytes], *, version: str = "1.0", placement: str) -> None:
        """Builds the wheel of a package and pins it; call for every package before `write_pins`."""
        wheel = build_wheel(self.root / "wheels", f"{package}-dist", version, files)
        with zipfile.ZipFile(wheel) as archive:
            record = archive.read(f"{package}_dist-{version}.dist-info/RECORD").decode()
        self.wheels[package] = wheel
        self._pins[package] = (
            f'[{package}]\nversion = "{version}"\nroot = "{package}"\nplacement = "{placement}"\n\n'
            f'[{package}.builds.any]\ndistribution = "{package}-dist"\nwheel = "{wheel.name}"\n'
            f'sha256 = "{hashlib.sha256(wheel.read_bytes()).hexdigest()}"\n'
            f'record_sha256 = "{record_digest(read_record(record, package))}"\n'
        )
        path = self.repository / "patches" / "upstreams.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(self._pins.values()))

    _pins: dict[str, str] = field(default_factory=dict)

    def install(self, wheel: Path, *, cache: Path | None = None) -> None:
        """Unpacks a wheel as an installer does; with `cache` its files are hard links into that folder."""
        unpacked = self.site_packages if cache is None else cache
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
            (record,) = [name for name in archive.namelist() if name.endswith("RECORD")]
        if cache is not None:
            shutil.copytree(cache, self.site_packages, copy_function=os.link, dirs_exist_ok=True)
        path = self.site_packages / record
        text = path.read_text()
        path.unlink()
        compiled = "toy/__pycache__/a.cpython-311.pyc,,\n"
        path.write_text(compiled + text + record.replace("RECORD", "INSTALLER") + ",sha256=zuuue4knoyJ,4\n")

    def write_series(self, package: str, pristine: dict[str, bytes], edits: dict[str, dict], context: int = 1) -> None:
        """Writes one patch per entry of `edits`: the content of each file after it. Uses plain git."""
        folder = self.repository / "patches" / package
        folder.mkdir(parents=True, exist_ok=True)
        tree = self.root / "plain-git" / package
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost"]
        for path, content in pristine.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(content)
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "pristine"]):
            subprocess.run([*git, *command], cwd=tree, check=True)
        for name, files in edits.items():
            for path, content in files.items():
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                (tree / path).unlink(missing_ok=True)
                if content is not None:
                    (tree / path).write_bytes(content)
            subprocess.run([*git, "add", "-A"], cwd=tree, check=True)
            command = [*git, "diff", "--cached", f"-U{context}", "--full-index", "--no-renames"]
            diff = subprocess.run(command, cwd=tree, check=True, capture_output=True).stdout
            (folder / name).write_bytes(HEADER.format(kind=name.partition("-")[0]).encode() + b"\n" + diff)
            subprocess.run([*git, "commit", "-qm", name], cwd=tree, check=True)
        (folder / "series").write_text("# in this order\n" + "".join(f"{name}\n" for name in edits))

    def patches(self, package: str = "toy") -> tuple[Patch, ...]:
        """The series as it is on disk."""
        return read_series(self.repository / "patches" / package)

    def site(self, package: str = "toy") -> Site:
        """The package's site; fails if it is absent."""
        found = find_site(read_upstreams(self.repository)[package], self.repository, [str(self.site_packages)])
        assert found is not None
        return found

    def content(self, folder: Path | None = None) -> dict[str, bytes]:
        """Every file under site-packages (or `folder`) except the store."""
        folder = self.site_packages if folder is None else folder
        paths = [path for path in folder.rglob("*") if path.is_file() and ".isoexec-patches" not in path.parts]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """What every test starts from: `toy` installed and pristine, `home` not yet unpacked, both with a series."""
    made = Workshop(root=tmp_path_factory.mktemp("template"))
    made.pin("toy", TOY, placement="installed")
    made.pin("home", HOME, placement="repository")
    made.install(made.wheels["toy"])
    made.write_series("toy", TOY, EDITS["toy"])
    made.write_series("home", HOME, EDITS["home"])
    for path, text in TESTS.items():
        (made.repository / path).parent.mkdir(exist_ok=True)
        (made.repository / path).write_text(text)
    return made


@pytest.fixture
def workshop(template: Workshop, tmp_path: Path) -> Workshop:
    """A copy of the template that the test may change."""
    root = tmp_path / "workshop"
    shutil.copytree(template.root, root)
    wheels = {package: root / "wheels" / wheel.name for package, wheel in template.wheels.items()}
    return Workshop(root=root, wheels=wheels, _pins=dict(template._pins))


@pytest.fixture
def pristine() -> dict[str, bytes]:
    """The files of `toy`'s wheel."""
    return dict(TOY)


@pytest.fixture
def edits() -> dict[str, dict]:
    """What each patch of `toy` makes of its files."""
    return {name: dict(files) for name, files in EDITS["toy"].items()}


@pytest.fixture
def patched(pristine: dict[str, bytes], edits: dict[str, dict]) -> dict[str, bytes]:
    """The files of `toy` after its series."""
    files: dict[str, bytes | None] = dict(pristine)
    for change in edits.values():
        files |= change
    return {path: content for path, content in files.items() if content is not None}
