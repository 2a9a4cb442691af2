"""Only bytes that are traced to a pinned wheel are patched, and only with context and line numbers that are exact."""

import pytest

from skyrl_isoexec.patching import PatchRefusal, applied_state, series_digest
from skyrl_isoexec.patching.git import patched_files
from skyrl_isoexec.patching.patchfile import split_patch
from skyrl_isoexec.patching.state import ABSENT
from skyrl_isoexec.patching.upstreams import read_upstreams


def state_of(workshop):
    """The state of `toy`."""
    return applied_state("toy", workshop.repository, [str(workshop.site_packages)])


def reinstall(workshop, distribution: str, version: str, files: dict[str, bytes], build) -> None:
    """Replaces what is installed."""
    for path in sorted(workshop.site_packages.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    workshop.install(build(workshop.root / "others", distribution, version, files))


@pytest.fixture
def build(request):
    """The wheel builder of conftest."""
    return request.config.pluginmanager.get_plugin(str(request.path.with_name("conftest.py"))).build_wheel


def test_another_version_is_refused_with_both_versions(workshop, pristine, build) -> None:
    """The series says nothing about other versions."""
    reinstall(workshop, "toy-dist", "1.1", pristine, build)
    with pytest.raises(PatchRefusal, match=r"toy-dist 1\.1 is installed, the patches are for 1\.0"):
        state_of(workshop)


def test_another_build_of_the_version_is_refused(workshop, pristine, build) -> None:
    """Same version, same touched files, but another wheel: one untouched file differs."""
    reinstall(workshop, "toy-dist", "1.0", pristine | {"toy/untouched.py": b"SAME = False\n"}, build)
    with pytest.raises(PatchRefusal, match="a wheel that is not pinned"):
        state_of(workshop)


def test_a_distribution_without_the_package_does_not_count(workshop, build) -> None:
    """A metadata-only distribution of the same name owns no file of the package."""
    reinstall(workshop, "toy-dist", "1.0", {"unrelated.py": b""}, build)
    assert state_of(workshop).state == ABSENT


def test_two_owners_are_refused(workshop, pristine, build) -> None:
    """Two builds installed over each other leave a mixture."""
    pins = workshop.repository / "patches" / "upstreams.toml"
    any_build = pins.read_text().partition("[toy.builds.any]")[2].partition("[home]")[0]
    second = f"[toy.builds.second]{any_build.replace('toy-dist', 'toy-second')}\n"
    pins.write_text(pins.read_text().replace("[home]", f"{second}[home]"))
    assert state_of(workshop).build == "any"
    workshop.install(build(workshop.root / "others", "toy-second", "1.0", pristine))
    with pytest.raises(PatchRefusal, match="several distributions own toy/: toy-dist, toy-second"):
        state_of(workshop)


def test_a_linked_folder_is_refused(workshop) -> None:
    """Files behind a linked folder belong to another environment too."""
    folder = workshop.site_packages / "toy"
    folder.rename(workshop.root / "elsewhere")
    folder.symlink_to(workshop.root / "elsewhere")
    with pytest.raises(PatchRefusal, match="linked folder"):
        state_of(workshop)


def test_drifted_context_is_refused(workshop, pristine) -> None:
    """GNU patch would accept this with fuzz and exit with 0."""
    (patch, *_) = workshop.patches()
    drifted = split_patch(patch.name, patch.body.replace(b" def first():", b" def first(x):"))
    assert drifted.body != patch.body
    with pytest.raises(PatchRefusal, match="seam-hook.patch does not apply strictly"):
        patched_files({"toy/a.py": pristine["toy/a.py"]}, (drifted,))


def test_drifted_line_numbers_are_refused(workshop, pristine) -> None:
    """git itself would search for the context elsewhere."""
    (patch, *_) = workshop.patches()
    shifted = split_patch(patch.name, patch.body.replace(b"@@ -6,3 +6,3 @@", b"@@ -8,3 +8,3 @@"))
    assert shifted.body != patch.body
    with pytest.raises(PatchRefusal, match="offset"):
        patched_files({"toy/a.py": pristine["toy/a.py"]}, (shifted,))


def test_a_patch_without_context_is_refused(workshop, pristine) -> None:
    """Its place could not be checked."""
    changed = {"seam-hook.patch": {"toy/b.py": pristine["toy/b.py"].replace(b"2", b"4")}}
    workshop.write_series("toy", pristine, changed, context=0)
    with pytest.raises(PatchRefusal, match="seam-hook.patch does not apply strictly"):
        patched_files({"toy/b.py": pristine["toy/b.py"]}, workshop.patches())


def test_users_git_configuration_has_no_say(workshop, pristine, monkeypatch, tmp_path) -> None:
    """A user's settings must not make lenient what is strict, nor lead git to another repository."""
    (tmp_path / ".gitconfig").write_text("[apply]\nignorewhitespace = change\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    files = {"toy/a.py": pristine["toy/a.py"]}
    (patch, *_) = workshop.patches()
    assert patched_files(files, (patch,)) != files
    drifted = split_patch(patch.name, patch.body.replace(b" def first():", b" def  first():"))
    with pytest.raises(PatchRefusal, match="does not apply strictly"):
        patched_files(files, (drifted,))


def test_digest_is_of_diffs_and_order(workshop) -> None:
    """Prose changes nothing; a diff, its place or its absence does."""
    digests = [series_digest("toy", workshop.repository)]
    path = workshop.repository / "patches/toy/seam-hook.patch"
    path.write_bytes(b"Better prose. " + path.read_bytes())
    assert series_digest("toy", workshop.repository) == digests[0]
    path.write_bytes(path.read_bytes().replace(b"+    return hook(LIMIT)", b"+    return hook(LIMIT + 0)"))
    digests.append(series_digest("toy", workshop.repository))
    series = workshop.repository / "patches/toy/series"
    names = series.read_text().splitlines()
    for order in (names[::-1], names[:-1], []):
        series.write_text("\n".join(order))
        digests.append(series_digest("toy", workshop.repository))
    assert len(set(digests)) == 5
    assert state_of(workshop).series_digest == digests[-1]


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('placement = "installed"', 'placement = "somewhere"', "placement"),
        ('version = "1.0"', 'versoin = "1.0"', "versoin"),
        ('sha256 = "', 'sha256 = "x', "sha256"),
        ("[toy]", "[toy", "TOMLDecodeError"),
        ("[toy.builds.any]", "[toy.bulids.any]", "builds"),
    ],
)
def test_ill_formed_pins_are_refused(workshop, old, new, named) -> None:
    """A pin that cannot be read in full is no pin."""
    path = workshop.repository / "patches" / "upstreams.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(PatchRefusal, match=named):
        read_upstreams(workshop.repository)
