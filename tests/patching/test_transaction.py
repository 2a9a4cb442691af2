"""Applying and reverting: exact, idempotent, reversible, safe for hard links, and mendable after a kill anywhere."""

import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_isoexec.patching import PatchRefusal
from skyrl_isoexec.patching.state import FOREIGN, MIXED, PATCHED, PRISTINE, applied_state, survey
from skyrl_isoexec.patching.transaction import apply, revert


class Killed(BaseException):
    """Stands for the end of the process."""


def files_of(workshop) -> dict[str, bytes]:
    """The package's own files, without byte code."""
    return {path: value for path, value in workshop.content().items() if path.startswith("toy/")}


def test_apply_then_revert_restores_every_byte(workshop, pristine, patched) -> None:
    """The series gives what git gives; a second apply writes nothing; revert leaves the tree as it was."""
    before = workshop.content()
    assert survey(workshop.site(), workshop.patches()).state == PRISTINE
    written = apply(workshop.site(), workshop.patches())
    assert set(written) == {"toy/a.py", "toy/b.py", "toy/old.py", "toy/sub/new.py"}
    assert files_of(workshop) == patched != pristine
    assert survey(workshop.site(), workshop.patches()).state == PATCHED
    assert apply(workshop.site(), workshop.patches()) == ()
    assert set(revert(workshop.site(), workshop.patches())) == set(written)
    assert workshop.content() == before
    assert not (workshop.site_packages / "toy" / "sub").exists()
    assert survey(workshop.site(), workshop.patches()).state == PRISTINE
    assert revert(workshop.site(), workshop.patches()) == ()


def test_other_hard_links_keep_their_bytes(workshop, tmp_path: Path, pristine, patched) -> None:
    """An installer's cache may share inodes with the environment: patching must not reach into it."""
    cache = tmp_path / "cache"
    for path in workshop.site_packages.rglob("*"):
        if path.is_file():
            path.unlink()
    workshop.install(workshop.wheels["toy"], cache=cache)
    assert os.stat(cache / "toy/a.py").st_ino == os.stat(workshop.site_packages / "toy/a.py").st_ino
    apply(workshop.site(), workshop.patches())
    assert files_of(workshop) == patched
    assert {path: (cache / path).read_bytes() for path in pristine} == pristine


def test_mode_is_kept(workshop) -> None:
    """A replaced file keeps its permissions."""
    path = workshop.site_packages / "toy/a.py"
    path.chmod(0o640)
    apply(workshop.site(), workshop.patches())
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("direction", [apply, revert])
@pytest.mark.parametrize("mend", [apply, revert])
@pytest.mark.parametrize("steps", range(6))
def test_a_kill_between_two_files_is_mended(workshop, monkeypatch, steps, direction, mend, pristine, patched) -> None:
    """Wherever the process ends, status names the state, and both apply and revert finish the work."""
    if direction is revert:
        apply(workshop.site(), workshop.patches())
    real, left = os.replace, [steps]

    def replace(source, target) -> None:
        if "toy/" in str(target) and STORE not in str(target):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        try:
            direction(workshop.site(), workshop.patches())
            killed = False
        except Killed:
            killed = True
    assert killed == (steps < 3), "three files are replaced in either direction; one more is removed"
    state = applied_state("toy", workshop.repository, [str(workshop.site_packages)])
    assert state.state in (PRISTINE, MIXED, PATCHED) and (not killed or steps == 0 or state.state == MIXED)
    mend(workshop.site(), workshop.patches())
    assert files_of(workshop) == (patched if mend is apply else pristine)
    assert not list(workshop.site_packages.rglob("*.isoexec-new"))


STORE = ".isoexec-patches"


def test_a_process_that_really_dies_is_mended(workshop, pristine, patched) -> None:
    """The same with a process that exits without any clean-up."""
    script = (
        "import os, sys\n"
        "real = os.replace\n"
        "def replace(source, target):\n"
        "    real(source, target)\n"
        "    if str(target).endswith('toy/a.py'): os._exit(9)\n"
        "os.replace = replace\n"
        "from skyrl_isoexec.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    options = ["toy", "--repository", str(workshop.repository), "--site", str(workshop.site_packages)]
    command = [sys.executable, "-c", script, "patches", "apply", *options]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=60)
    assert done.returncode == 9
    found = survey(workshop.site(), workshop.patches())
    assert found.state == MIXED and not found.foreign
    apply(workshop.site(), workshop.patches())
    assert files_of(workshop) == patched
    revert(workshop.site(), workshop.patches())
    assert files_of(workshop) == pristine


@pytest.mark.parametrize("name", ["toy/b.py", "toy/untouched.py"])
@pytest.mark.parametrize("after", ["pristine", "patched"])
@pytest.mark.parametrize("act", [apply, revert])
def test_a_foreign_file_is_refused_by_name(workshop, after, act, name) -> None:
    """An edit of the user's is never overwritten, and nothing else is written, be it in a patched file or not."""
    if after == "patched":
        apply(workshop.site(), workshop.patches())
    path = workshop.site_packages / name
    path.write_bytes(path.read_bytes() + b"# mine\n")
    before = workshop.content()
    state = applied_state("toy", workshop.repository, [str(workshop.site_packages)])
    assert state.state == FOREIGN and state.paths == (name,)
    assert "pip install --force-reinstall --no-deps toy-dist==1.0 && isoexec patches apply toy" in state.mend
    with pytest.raises(PatchRefusal, match=name):
        act(workshop.site(), workshop.patches())
    assert workshop.content() == before


def test_an_unknown_file_where_a_patch_adds_one_is_refused(workshop) -> None:
    """A file that the series would create may already be somebody's."""
    path = workshop.site_packages / "toy/sub/new.py"
    path.parent.mkdir()
    path.write_text("mine\n")
    with pytest.raises(PatchRefusal, match="toy/sub/new.py"):
        apply(workshop.site(), workshop.patches())
    assert path.read_text() == "mine\n"


def test_stale_byte_code_is_removed(workshop) -> None:
    """Byte code that does not check its source would go on running the old code."""
    source = workshop.site_packages / "toy/a.py"
    compiled = py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    same = py_compile.compile(str(workshop.site_packages / "toy/untouched.py"))
    assert compiled and same
    apply(workshop.site(), workshop.patches())
    assert not Path(compiled).exists() and Path(same).exists()


def test_byte_code_made_meanwhile_is_removed(workshop, monkeypatch) -> None:
    """Another process may import the old source just before it is replaced."""
    real, compiled = os.replace, []

    def replace(source, target) -> None:
        if str(target).endswith("toy/a.py"):
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            compiled.append(py_compile.compile(str(target), invalidation_mode=mode))
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        apply(workshop.site(), workshop.patches())
    assert compiled and not Path(compiled[0]).exists()


def test_a_kill_is_mended_also_when_the_series_changes_next(workshop, monkeypatch, pristine, edits) -> None:
    """What a killed run wrote stays known though no series on disk makes it any more."""
    real = os.replace

    def replace(source, target) -> None:
        if str(target).endswith("toy/b.py"):
            raise Killed
        real(source, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", replace)
        apply(workshop.site(), workshop.patches())
    assert files_of(workshop)["toy/a.py"] != pristine["toy/a.py"]
    first = {"seam-hook.patch": edits["seam-hook.patch"]}
    workshop.write_series("toy", pristine, first)
    assert survey(workshop.site(), workshop.patches()).state == MIXED
    apply(workshop.site(), workshop.patches())
    assert files_of(workshop) == pristine | first["seam-hook.patch"]


def test_a_new_series_replaces_the_old_one(workshop, pristine, edits) -> None:
    """After the series changes, apply goes straight to it, also for files that it no longer touches."""
    apply(workshop.site(), workshop.patches())
    first = {"seam-hook.patch": edits["seam-hook.patch"]}
    workshop.write_series("toy", pristine, first)
    assert survey(workshop.site(), workshop.patches()).state == MIXED
    apply(workshop.site(), workshop.patches())
    assert files_of(workshop) == pristine | first["seam-hook.patch"]
    assert survey(workshop.site(), workshop.patches()).state == PATCHED
    revert(workshop.site(), workshop.patches())
    assert files_of(workshop) == pristine


def test_revert_needs_no_series_that_applies(workshop, pristine) -> None:
    """A broken patch in the checkout must not keep an environment patched."""
    apply(workshop.site(), workshop.patches())
    path = workshop.repository / "patches/toy/seam-hook.patch"
    path.write_bytes(path.read_bytes().replace(b"-    return LIMIT", b"-    return NOTHING"))
    with pytest.raises(PatchRefusal, match="seam-hook.patch does not apply strictly"):
        apply(workshop.site(), workshop.patches())
    revert(workshop.site(), workshop.patches())
    assert files_of(workshop) == pristine


def test_lost_pristine_bytes_are_a_refusal(workshop) -> None:
    """Without the kept bytes nothing is guessed."""
    apply(workshop.site(), workshop.patches())
    for blob in (workshop.site_packages / STORE / "toy" / "blobs").iterdir():
        blob.write_bytes(b"damaged")
    for act in (apply, revert):
        with pytest.raises(PatchRefusal, match="neither pristine nor ours"):
            act(workshop.site(), workshop.patches())


def test_a_folder_that_cannot_be_written_changes_nothing(workshop, monkeypatch) -> None:
    """All new files exist before the first one moves."""
    real = os.fsync
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 5:
            raise OSError(28, "No space left on device")
        real(descriptor)

    before = workshop.content()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(PatchRefusal, match="No space left"):
            apply(workshop.site(), workshop.patches())
    assert workshop.content() == before
    apply(workshop.site(), workshop.patches())
