"""Writing patches: check proves a series from its wheel, export gives one normal form, from files or from commits."""

import subprocess
from pathlib import Path

import pytest

from skyrl_isoexec.__main__ import main


@pytest.fixture
def isoexec(workshop, capsys):
    """Runs `isoexec patches` on the workshop's checkout; returns exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["patches", *arguments, "--repository", str(workshop.repository)])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def wheels(workshop) -> str:
    """Folder of the pinned wheels."""
    return str(workshop.root / "wheels")


def test_check_proves_every_series(isoexec, wheels) -> None:
    """Both packages hold, with a file that is added and one that is removed."""
    code, out, err = isoexec("check", "--wheel-dir", wheels)
    assert (code, err) == (0, "")
    assert "toy            1.0  3 patches hold on any (4 files)" in out and "home" in out


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b" def first():", b" def first(x):", "does not apply strictly"),
        (b"hook(LIMIT)", b"hook(LIMIT", "does not compile"),
        (b"@@ LIMIT = 1", b"@@", "not byte-equal to its export"),
        (b"Kind:", b"\n\nKind:", None),
        (b"\n\ndiff --git", b"\n---\ndiff --git", "not byte-equal to its export"),
        (b"\nindex ", b"\nindex 0", "not byte-equal to its export"),
    ],
)
def test_check_refuses_what_is_not_exact(workshop, isoexec, wheels, old, new, said) -> None:
    """A patch that would apply is still refused if export would write it otherwise."""
    path = workshop.repository / "patches/toy/seam-hook.patch"
    (workshop.repository / "patches/toy/series").write_text("seam-hook.patch\n")
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    code, _, err = isoexec("check", "toy", "--wheel-dir", wheels)
    assert code == (0 if said is None else 2)
    assert said is None or said in err


def test_check_refuses_a_wrong_pin(workshop, isoexec, wheels) -> None:
    """A wheel with other bytes, and a RECORD digest that is not the wheel's."""
    pins = workshop.repository / "patches/upstreams.toml"
    good = pins.read_text()
    digest = good.partition('record_sha256 = "')[2][:64]
    pins.write_text(good.replace(digest, "0" * 64))
    assert "record_sha256" in isoexec("check", "toy", "--wheel-dir", wheels)[2]
    pins.write_text(good)
    workshop.wheels["toy"].write_bytes(workshop.wheels["toy"].read_bytes() + b"\0")
    code, _, err = isoexec("check", "toy", "--wheel-dir", wheels)
    assert code == 2 and "has sha256" in err
    code, _, err = isoexec("check", "toy", "--wheel-dir", str(workshop.root))
    assert code == 2 and "no toy_dist-1.0-py3-none-any.whl" in err


def test_export_brings_to_normal_form(workshop, isoexec, wheels) -> None:
    """Export is idempotent, changes nothing that check accepts, and mends what it refuses."""
    folder: Path = workshop.repository / "patches/toy"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "already in normal form" in isoexec("export", "toy", "--wheel-dir", wheels)[1]
    path = folder / "fix-two-files.patch"
    path.write_bytes(path.read_bytes().replace(b"\n\ndiff", b"\n---\ndiff", 1))
    assert isoexec("check", "toy", "--wheel-dir", wheels)[0] == 2
    assert "wrote fix-two-files.patch" in isoexec("export", "toy", "--wheel-dir", wheels)[1]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_export_from_a_tree_of_commits(workshop, isoexec, wheels) -> None:
    """Create the tree, change one commit, add one, export: the new series holds."""
    tree = workshop.root / "tree"
    code, out, _ = isoexec("export", "toy", "--wheel-dir", wheels, "--tree", str(tree), "--create")
    assert code == 0 and "3 commits" in out
    assert isoexec("export", "toy", "--wheel-dir", wheels, "--tree", str(tree), "--create")[0] == 2
    assert "already in normal form" in isoexec("export", "toy", "--tree", str(tree))[1]
    (tree / "toy/untouched.py").write_text("SAME = 1\n")
    code, _, err = isoexec("export", "toy", "--tree", str(tree))
    assert code == 2 and "uncommitted" in err
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost"]
    subprocess.run([*git, "commit", "-qam", "a change"], cwd=tree, check=True)
    code, _, err = isoexec("export", "toy", "--tree", str(tree))
    assert code == 2 and "first line of a commit message" in err
    header = "Why it must be 1, in one paragraph of words.\n\nKind: fix\nUpstream-Status: not sent\n"
    header += "Drop-when: never\nTest: tests/test_toy.py::test_it\n"
    message = f"fix-same.patch\n\n{header}"
    subprocess.run([*git, "commit", "-q", "--amend", "-m", message], cwd=tree, check=True)
    code, out, _ = isoexec("export", "toy", "--tree", str(tree))
    assert code == 0 and "wrote fix-same.patch, series" in out
    assert (workshop.repository / "patches/toy/fix-same.patch").read_text().startswith(header)
    code, out, _ = isoexec("check", "toy", "--wheel-dir", wheels)
    assert code == 0 and "4 patches hold on any (5 files)" in out
    assert isoexec("lint") == (0, "0 broken rule(s), 0 question(s)\n", "")


def test_a_wheel_is_fetched_by_hash_through_pip(workshop, isoexec, monkeypatch, wheels) -> None:
    """pip itself compares the hash; the second time the cache answers, without an index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", wheels)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert isoexec("check", "toy")[0] == 0
    cache = workshop.repository / ".cache/wheels"
    assert [path.name for path in cache.iterdir()] == ["toy_dist-1.0-py3-none-any.whl"]
    monkeypatch.setenv("PIP_FIND_LINKS", str(workshop.root / "nowhere"))
    assert isoexec("check", "toy")[0] == 0
    code, _, err = isoexec("check", "home")
    assert code == 2 and "could not fetch home-dist 1.0 by its hash" in err
    home = workshop.wheels["home"]
    home.write_bytes(home.read_bytes() + b"\0")
    monkeypatch.setenv("PIP_FIND_LINKS", wheels)
    assert isoexec("check", "home")[0] == 2
    assert len(list(cache.iterdir())) == 1
