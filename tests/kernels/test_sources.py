"""A digest of source code moves with the code and with nothing else."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_isoexec.kernels import sources
from skyrl_isoexec.kernels.sources import PACKAGE, dump, impl_file, impl_source, reached, source_digest

CODE = '''"""Module."""
# a comment
import math


class A:
    """Class."""

    field: int = 1
    """Field."""

    def f(self, x: float, *, y=None) -> str:
        """Function."""
        return f"{x!r:>{self.field}}" "b" f"{{{y}" + u"c" if x < 1.5e-7 else None
'''
REFORMATTED = """import math
class A:
    field: int = 1
    def f(
        self, x: float, *, y=None,
    ) -> str:
        '''Another
        docstring.'''
        return (f'{x!r:>{self.field}}b{{{y}' + 'c'
                if x < 1.5e-7 else None)  # another comment
"""
DIGEST = "7c812c004c9e2cd02d7dbaec80c0debba053cc0fd6fd7e9c87479f4c36387962"
"""Of CODE in a file named `code.py`, under every Python version."""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "code.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package's kernels and schedule."""
    for name in ("kernels", "schedule"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE / name, tmp_path / PACKAGE.name / name, ignore=ignore)
    shutil.copy(PACKAGE / "__init__.py", tmp_path / PACKAGE.name)
    return tmp_path / PACKAGE.name


def test_comments_docstrings_and_formatting_do_not_move_it(code: Path) -> None:
    before = source_digest(code)
    code.write_text(REFORMATTED)
    assert source_digest(code) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1.5e-7", "1.5e-8"),
        ("x < 1", "x <= 1"),
        ("None)", "0)"),
        ("!r", "!s"),
        ("int = 1", "int = True"),
        ("'c'", "b'c'"),
    ],
)
def test_code_moves_it(code: Path, old: str, new: str) -> None:
    code.write_text(REFORMATTED)
    before = source_digest(code)
    assert old in REFORMATTED
    code.write_text(REFORMATTED.replace(old, new))
    assert source_digest(code) != before


def test_python_versions_agree(code: Path) -> None:
    """The value is written down, and whichever of the other supported versions is here is asked as well."""
    assert source_digest(code) == DIGEST
    program = f"import sys; sys.path.insert(0, {str(PACKAGE / 'kernels')!r})\n"
    program += f"import sources; print(sys.version_info[1], sources.source_digest({str(code)!r}))\n"
    program += f"print(sources.source_digest({str(PACKAGE / 'kernels')!r}))"
    for version in (11, 12):
        command = [f"python3.{version}", "-B", "-c", program]
        if version == sys.version_info[1]:
            command[0] = sys.executable
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except FileNotFoundError:
            continue
        if done.returncode == 0:
            assert done.stdout.split() == [str(version), DIGEST, source_digest(PACKAGE / "kernels")]


def test_dump_keeps_what_differs() -> None:
    texts = [
        "return None",
        "return",
        "return 1",
        "return 1.0",
        "return True",
        "return '1'",
        "return -0.0",
        "return 0.0",
    ]
    assert len({dump(f"def f():\n    {text}") for text in texts}) == len(texts)
    assert dump("f(**a, b=1)") != dump("f(b=1, **a)") and dump("{1: 2, **a}") != dump("{**a, 1: 2}")


def test_folders_and_files(tmp_path: Path, code: Path) -> None:
    """A folder is all its Python files; where it lies does not matter, what its files are called does."""
    (tmp_path / "a" / "inner").mkdir(parents=True)
    for name in ("one.py", "inner/two.py"):
        (tmp_path / "a" / name).write_text(f"x = {len(name)}")
    before = source_digest(tmp_path / "a")
    (tmp_path / "a" / "notes.md").write_text("text")
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere" / "a")
    assert source_digest(tmp_path / "elsewhere" / "a") == before
    (tmp_path / "a" / "one.py").rename(tmp_path / "a" / "three.py")
    assert source_digest(tmp_path / "a") != before
    assert source_digest(code, tmp_path / "a") != source_digest(tmp_path / "a", code)
    for missing in ([], [tmp_path / "b.py"]):
        with pytest.raises(FileNotFoundError):
            source_digest(*missing)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no Python file"):
        source_digest(tmp_path / "empty")


def test_an_implementation_is_what_it_imports() -> None:
    """The op's own files that are used and the shared arithmetic; neither the definition nor what proves it."""
    names = {p.relative_to(PACKAGE).as_posix() for p in reached(impl_file("attention.cpu"))}
    own = {"cpu", "spec", "loops", "store", "vectors", "loops_backward", "__init__"}
    assert {n for n in names if n.startswith("kernels/attention/")} == {f"kernels/attention/{n}.py" for n in own}
    assert {"kernels/numeric/cpu.py", "kernels/numeric/tile.py", "schedule/schedule.py", "schedule/tree.py"} <= names
    assert all(n.startswith(("kernels/attention/", "kernels/numeric/", "schedule/")) or n.count("/") < 2 for n in names)
    assert not {"kernels/bundle.py", "kernels/sources.py", "kernels/attention/reference.py"} & names
    assert "kernels/row_linear/reference.py" in {
        p.relative_to(PACKAGE).as_posix() for p in reached(impl_file("row_linear.cpu"))
    }  # whose tree_sum is used


def test_an_implementation_moves_with_what_it_imports(package: Path) -> None:
    before = impl_source("attention.cpu", package)
    assert before == impl_source("attention.cpu") != impl_source("attention.reference")
    kernels = package / "kernels"
    (kernels / "attention" / "other.py").write_text("x = 1")
    for unused in ("attention/cases.py", "attention/reference.py", "linear/cpu.py", "bundle.py"):
        (kernels / unused).write_text((kernels / unused).read_text() + "\nx = 1\n")
    assert impl_source("attention.cpu", package) == before
    for used in ("attention/loops.py", "attention/spec.py", "numeric/tile.py", "numeric/reference.py"):
        text = (kernels / used).read_text()
        (kernels / used).write_text(text + "\nx = 1\n")
        assert impl_source("attention.cpu", package) != before, used
        (kernels / used).write_text(text)
    assert impl_source("attention.cpu", package) == before


@pytest.mark.parametrize("name", ["attention", "attention.triton", "attn.cpu", "", "attention.", "../model.decoder"])
def test_unknown_implementations_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no implementation"):
        impl_source(name)


def test_standard_library_only() -> None:
    """So that a digest can be taken where nothing is installed."""
    code = f"import sys; sys.path.insert(0, {str(Path(sources.__file__).parent)!r}); import sources"
    subprocess.run([sys.executable, "-S", "-c", code], check=True, timeout=60)
