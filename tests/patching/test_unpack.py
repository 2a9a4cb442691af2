"""The package that is unpacked into the checkout: complete, exact, resumable, and never over somebody's edits."""

import os
from pathlib import Path

import pytest

from skyrl_isoexec.patching import PatchRefusal, applied_state
from skyrl_isoexec.patching.state import ABSENT, FOREIGN, PATCHED, PRISTINE
from skyrl_isoexec.patching.transaction import apply, revert
from skyrl_isoexec.patching.unpack import ensure_unpacked
from skyrl_isoexec.patching.upstreams import read_upstreams

FILES = {"__init__.py", "main.py", "README.md"}


def unpack(workshop) -> int:
    """Unpacks `home` from the wheels of the workshop."""
    upstream = read_upstreams(workshop.repository)["home"]
    return ensure_unpacked(upstream, workshop.repository, workshop.root / "wheels")


def state_of(workshop):
    """The state of `home`."""
    return applied_state("home", workshop.repository)


def test_unpacks_patches_and_reverts(workshop) -> None:
    """Only the package's folder is taken, and its README.md is kept."""
    home: Path = workshop.repository / "home"
    assert state_of(workshop).state == ABSENT
    assert unpack(workshop) == 2
    assert set(workshop.content(home)) == FILES and not (workshop.repository / "other").exists()
    assert state_of(workshop).state == PRISTINE
    pristine = workshop.content(home)
    apply(workshop.site("home"), workshop.patches("home"))
    assert state_of(workshop).state == PATCHED and b"patched" in (home / "main.py").read_bytes()
    assert unpack(workshop) == 0
    revert(workshop.site("home"), workshop.patches("home"))
    assert workshop.content(home) == pristine and (home / "README.md").read_text() == "Generated.\n"


def test_a_killed_unpacking_goes_on(workshop, monkeypatch) -> None:
    """Without its RECORD a tree does not count, and what is there already is compared, not trusted."""
    real = os.replace

    def replace(source, target) -> None:
        if str(target).endswith("main.py"):
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            unpack(workshop)
    assert state_of(workshop).state == ABSENT
    assert unpack(workshop) == 1
    assert state_of(workshop).state == PRISTINE


def test_an_unknown_tree_is_not_overwritten(workshop) -> None:
    """Somebody's own checkout of the package may lie there."""
    path = workshop.repository / "home" / "main.py"
    path.write_text("mine\n")
    with pytest.raises(PatchRefusal, match="home/main.py"):
        unpack(workshop)
    assert path.read_text() == "mine\n"


def test_every_file_counts(workshop) -> None:
    """An edit, a new module and a missing file are each foreign, though no patch touches them."""
    unpack(workshop)
    apply(workshop.site("home"), workshop.patches("home"))
    stray = workshop.repository / "home" / "stray.py"
    stray.write_text("")
    assert (state_of(workshop).state, state_of(workshop).paths) == (FOREIGN, ("home/stray.py",))
    stray.unlink()
    package = workshop.repository / "home" / "__init__.py"
    package.write_text("EDITED = True\n")
    assert (state_of(workshop).state, state_of(workshop).paths) == (FOREIGN, ("home/__init__.py",))
    package.unlink()
    assert (state_of(workshop).state, state_of(workshop).paths) == (FOREIGN, ("home/__init__.py",))
    assert unpack(workshop) == 1
    assert state_of(workshop).state == PATCHED


@pytest.mark.parametrize("edited", [False, True])
def test_a_new_pin_replaces_the_tree(workshop, edited) -> None:
    """The old tree goes with its patches, unless somebody edited it."""
    unpack(workshop)
    apply(workshop.site("home"), workshop.patches("home"))
    gone = workshop.repository / "home" / "__init__.py"
    if edited:
        gone.write_text("EDITED = True\n")
    new = {"home/main.py": b"def run():\n    return 'native'\n", "home/more.py": b""}
    workshop.pin("home", new, version="2.0", placement="repository")
    with pytest.raises(PatchRefusal, match="was unpacked from another wheel"):
        state_of(workshop)
    if edited:
        with pytest.raises(PatchRefusal, match="1 edited file"):
            unpack(workshop)
        assert gone.read_text() == "EDITED = True\n"
        return
    assert unpack(workshop) == 2
    assert set(workshop.content(workshop.repository / "home")) == {"main.py", "more.py", "README.md"}
    apply(workshop.site("home"), workshop.patches("home"))
    assert state_of(workshop).state == PATCHED
