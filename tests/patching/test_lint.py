"""Every rule of lint is broken once, by itself, and lint names it."""

from pathlib import Path

import pytest

from skyrl_isoexec.patching.lint import SEAM_LIMIT, SEAM_LINES, lint
from skyrl_isoexec.patching.patchfile import split_patch

SEAM = "patches/toy/seam-hook.patch"


def edit(workshop, path: str, old: str, new: str) -> None:
    """Replaces text in a file of the checkout and asserts that it was there."""
    text = (workshop.repository / path).read_text()
    assert old in text
    (workshop.repository / path).write_text(text.replace(old, new))


def test_a_good_series_has_no_findings(workshop) -> None:
    """Also with a test inside a class, several tests, and a value that goes on in an indented line."""
    assert lint(workshop.repository) == ()
    edit(workshop, SEAM, "::test_it", "::TestAll::test_in\nTest: tests/test_toy.py::test_it")
    edit(workshop, SEAM, "Drop-when: the pin", "Drop-when:\n  the pin")
    assert lint(workshop.repository) == ()


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("This text says why the change is needed, and that no extension point of the host would do.\n", "", "why"),
        ("Kind: seam\n", "", "Kind: is missing"),
        ("Kind: seam", "Kind: fix", "Kind: is 'fix', the file name says 'seam'"),
        ("Upstream-Status: merged as 0123456789abcdef", "Upstream-Status:", "Upstream-Status: is missing or empty"),
        ("Drop-when: the pin moves past it\n", "", "Drop-when: is missing"),
        ("Drop-when: the", "Drop-when: now\nDrop-when: the", "Drop-when: is given 2 times"),
        ("Drop-when: the", "Owner: me\nDrop-when: the", "unknown trailer Owner:"),
        ("Test: tests/test_toy.py::test_it\n", "", "Test: is missing"),
        ("tests/test_toy.py::test_it", "tests/test_toy.py::test_other", "has no test_other"),
        ("tests/test_toy.py::test_it", "tests/test_no.py::test_it", "tests/test_no.py does not exist"),
        ("tests/test_toy.py::test_it", "test_it", "must be tests/<file>.py::<name>"),
        ("a/toy/a.py b/toy/a.py", "a/other/a.py b/other/a.py", "touches other/a.py"),
        ("a/toy/a.py b/toy/a.py", "a/toy/../x.py b/toy/../x.py", "touches toy/../x.py"),
        ("\nindex ", "\nold mode 100644\nnew mode 100755\nindex ", "only whole text changes"),
        ("hook(LIMIT)\n", "hook(LIMIT)\n-- \n", "only whole text changes"),
        ("diff --git", "diff", "has no git diff"),
    ],
)
def test_a_broken_patch_is_named(workshop, old, new, finding) -> None:
    """One rule, one finding, at the patch."""
    edit(workshop, SEAM, old, new)
    (found,) = [found for found in lint(workshop.repository) if finding in found.what]
    assert found.where == SEAM and found.fatal


def test_a_backport_names_its_commit(workshop) -> None:
    """Otherwise nobody can see that it is verbatim."""
    edit(workshop, "patches/toy/backport-new-file.patch", "merged as 0123456789abcdef", "merged")
    (found,) = lint(workshop.repository)
    assert "must name the upstream commit" in found.what


def test_series_and_folder_agree(workshop) -> None:
    """Neither a patch that is never applied nor a line that applies nothing."""
    folder: Path = workshop.repository / "patches" / "toy"
    (folder / "series").write_text("seam-hook.patch\nseam-hook.patch\nfix-none.patch\n")
    assert {found.what for found in lint(workshop.repository)} == {
        "lists seam-hook.patch more than once",
        "lists fix-none.patch, which does not exist",
        "does not list fix-two-files.patch",
        "does not list backport-new-file.patch",
    }
    (folder / "series").unlink()
    assert [found.what for found in lint(workshop.repository)] == ["no series for toy"]


def test_packages_and_pins_agree(workshop) -> None:
    """A folder without a pin would never be applied."""
    (workshop.repository / "patches" / "stranger").mkdir()
    (found,) = lint(workshop.repository)
    assert found.where == "patches/stranger" and "no pin" in found.what


def test_names_are_of_one_form(workshop) -> None:
    """The kind is in the name, and names are not numbered."""
    folder: Path = workshop.repository / "patches" / "toy"
    (folder / "seam-hook.patch").rename(folder / "0001-Seam_Hook.patch")
    edit(workshop, "patches/toy/series", "seam-hook.patch", "0001-Seam_Hook.patch")
    assert any("the name must be" in found.what for found in lint(workshop.repository))


@pytest.mark.parametrize(
    ("lines", "outcome"), [(SEAM_LINES, None), (SEAM_LINES + 1, False), (SEAM_LIMIT, False), (SEAM_LIMIT + 1, True)]
)
def test_size_of_a_seam(workshop, pristine, lines, outcome) -> None:
    """About ten changed lines; a fix or a backport may be longer."""
    longer = pristine["toy/b.py"] + b"MORE = 1\n" * lines
    workshop.write_series("toy", pristine, {"seam-hook.patch": {"toy/b.py": longer}})
    for path in (workshop.repository / "patches/toy").glob("[fb]*.patch"):
        path.unlink()
    found = lint(workshop.repository)
    assert [finding.fatal for finding in found] == ([] if outcome is None else [outcome])
    workshop.write_series("toy", pristine, {"fix-hook.patch": {"toy/b.py": longer}})
    (workshop.repository / SEAM).unlink()
    assert lint(workshop.repository) == ()


@pytest.mark.parametrize(("context", "fatal"), [(1, False), (3, False), (4, True)])
def test_context_is_short(workshop, pristine, context, fatal) -> None:
    """Long context breaks on unrelated changes. (Without any, git itself does not apply.)"""
    changed = pristine["toy/a.py"].replace(b"return LIMIT", b"return 1")
    workshop.write_series("toy", pristine, {"seam-hook.patch": {"toy/a.py": changed}}, context=context)
    for path in (workshop.repository / "patches/toy").glob("[fb]*.patch"):
        path.unlink()
    assert [finding.fatal for finding in lint(workshop.repository)] == [True] * fatal


def test_context_between_two_changes_is_no_edge() -> None:
    """With one line of context git joins changes that are two lines apart."""
    lines = ["diff --git a/x/y.py b/x/y.py", "--- a/x/y.py", "+++ b/x/y.py", "@@ -1,6 +1,6 @@", " edge", "-old", "+new"]
    lines += [" between", " between", "-old", "+new", " edge", ""]
    (file,) = split_patch("seam-x.patch", "\n".join(lines).encode()).files
    assert (file.path, file.change, file.changed_lines, file.context) == ("x/y.py", "modify", 4, 1)
