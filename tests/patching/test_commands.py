"""What a user meets: exit codes, one line per upstream, and refusals that say what, where and what to do."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_isoexec.__main__ import main
from skyrl_isoexec.patching.check import check
from skyrl_isoexec.patching.lint import lint
from skyrl_isoexec.patching.patchfile import read_series
from skyrl_isoexec.patching.site import find_site
from skyrl_isoexec.patching.state import series_digest, survey
from skyrl_isoexec.patching.upstreams import find_repository, read_upstreams

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def isoexec(workshop, capsys):
    """Runs a verb on the workshop's checkout and site-packages; returns exit code, stdout and stderr."""

    def run(verb: str, *arguments: str) -> tuple[int, str, str]:
        places = ["--repository", str(workshop.repository), "--site", str(workshop.site_packages)]
        return (main(["patches", verb, *arguments, *places]), *capsys.readouterr())

    return run


def test_the_life_of_an_environment(workshop, isoexec) -> None:
    """status, apply, apply again, revert."""
    wheels = ["--wheel-dir", str(workshop.root / "wheels")]
    digest = series_digest("toy", workshop.repository)[:16]
    code, out, err = isoexec("status")
    assert (code, err) == (0, "")
    toy, home = out.splitlines()
    assert toy.split() == ["toy", "1.0", "any", "pristine", "3", "patches", digest]
    assert home.split()[:4] == ["home", "1.0", "-", "absent"]
    code, out, err = isoexec("apply", *wheels)
    assert (code, err) == (0, "")
    assert "3 patches applied: 4 files written" in out and "1 files written, 2 unpacked" in out
    assert isoexec("apply", *wheels)[1].count("already applied") == 2
    assert [line.split()[3] for line in isoexec("status")[1].splitlines()] == ["patched", "patched"]
    assert isoexec("revert", "toy")[:2] == (0, "toy            1.0  pristine: 4 files written\n")
    assert [line.split()[3] for line in isoexec("status")[1].splitlines()] == ["pristine", "patched"]


def test_a_refusal_says_what_where_and_what_to_do(workshop, isoexec) -> None:
    """One package is refused; the other is still brought to its series."""
    path = workshop.site_packages / "toy/a.py"
    path.write_text("mine\n")
    code, out, err = isoexec("apply", "--wheel-dir", str(workshop.root / "wheels"))
    assert code == 2 and out.startswith("home") and "Traceback" not in err
    assert "toy/a.py" in err and f"where: {workshop.site_packages}" in err
    assert "pip install --force-reinstall --no-deps toy-dist==1.0" in err
    code, out, _ = isoexec("status")
    assert code == 2 and "foreign" in out and "toy/a.py" in out


def test_absent_and_unknown_packages_are_refused(workshop, isoexec) -> None:
    """Nothing to patch is not success."""
    code, _, err = isoexec("revert", "home")
    assert code == 2 and "home is not there" in err
    code, _, err = isoexec("status", "tyo")
    assert code == 2 and "unknown package tyo; known: toy, home" in err


def test_a_mixed_state_names_its_mend(workshop, isoexec) -> None:
    """One file was replaced by its pristine bytes behind our back."""
    pristine = (workshop.site_packages / "toy/b.py").read_bytes()
    isoexec("apply", "toy")
    (workshop.site_packages / "toy/b.py").write_bytes(pristine)
    code, out, _ = isoexec("status", "toy")
    assert code == 2 and "mixed" in out and "toy/b.py" in out and "mend: isoexec patches apply" in out
    assert isoexec("apply", "toy")[1] == "toy            1.0  3 patches applied: 1 files written\n"


def test_a_shadowed_unpacked_package_is_reported(workshop, isoexec, monkeypatch) -> None:
    """A second copy in front of the patched one would run unpatched."""
    isoexec("apply", "home", "--wheel-dir", str(workshop.root / "wheels"))
    other = workshop.root / "other"
    (other / "home").mkdir(parents=True)
    (other / "home" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(other))
    assert "WARNING" in isoexec("status", "home")[1]
    monkeypatch.syspath_prepend(str(workshop.repository))
    assert "WARNING" not in isoexec("status", "home")[1]


def test_this_repository_keeps_its_rules() -> None:
    """The series of this repository: lint finds nothing fatal."""
    fatal = [f"{found.where}: {found.what}" for found in lint(ROOT) if found.fatal]
    assert not fatal, "\n".join(fatal)
    assert find_repository() == ROOT and set(read_upstreams(ROOT)) == {"skyrl", "vllm", "megatron-core"}


@pytest.mark.parametrize("package", list(read_upstreams(ROOT)))
def test_our_series_holds_on_the_installed_wheel(package) -> None:
    """The whole proof of `check`, without a network: the pristine bytes come from the environment itself."""
    site = find_site(read_upstreams(ROOT)[package], ROOT)
    if site is None:
        pytest.skip(f"{package} is not there: run scripts/bootstrap.py")
    patches = read_series(ROOT / "patches" / package)
    found = survey(site, patches)
    assert patches and not found.foreign
    check(site.upstream, site.build, found.pristine, site.recorded, patches)


def test_patching_stands_alone() -> None:
    """It runs before anything is installed, and it must not import what it patches."""
    for path in (ROOT / "skyrl_isoexec/patching").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                standard = name.partition(".")[0] in sys.stdlib_module_names
                assert standard or name.startswith("skyrl_isoexec.patching"), f"{path.name} imports {name}"


def test_status_imports_no_upstream() -> None:
    """Finding a package must not run its code."""
    script = (
        "import sys\nfrom skyrl_isoexec.__main__ import main\nmain(['patches', 'status'])\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'torch', 'vllm', 'megatron', 'skyrl', 'numpy'}, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["skyrl", "vllm", "megatron-core"]
