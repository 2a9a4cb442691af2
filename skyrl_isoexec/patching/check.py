"""Proof, from pristine files, that a series is what it says.

It applies strictly patch by patch, leaves Python that compiles, reverts to exact bytes both patch by patch and through
the same transaction that patches an environment, and export reproduces every patch byte for byte.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from skyrl_isoexec.patching.errors import PatchRefusal
from skyrl_isoexec.patching.export import build_commits, read_commits
from skyrl_isoexec.patching.git import patched_files, temporary_tree
from skyrl_isoexec.patching.patchfile import Patch
from skyrl_isoexec.patching.site import STORE, Site
from skyrl_isoexec.patching.state import PATCHED, PRISTINE, Contents, survey
from skyrl_isoexec.patching.store import Store
from skyrl_isoexec.patching.transaction import apply, revert
from skyrl_isoexec.patching.upstreams import Build, Upstream


def check(
    upstream: Upstream, build: Build, pristine: Contents, recorded: Mapping[str, str], patches: tuple[Patch, ...]
) -> None:
    """Runs the whole proof for one wheel and refuses at the first failure.

    `pristine` holds the touched files, `recorded` the hashes of the wheel's RECORD."""

    def refusal(what: str, mend: str) -> PatchRefusal:
        return PatchRefusal(what=what, where=f"patches/{upstream.package} on {build.wheel}", mend=mend)

    target = patched_files(pristine, patches)
    for path, content in target.items():
        problem = _syntax_problem(path, content)
        if problem:
            raise refusal(f"{path} does not compile when patched: {problem}", "correct the patch")
    with temporary_tree(pristine) as tree:
        build_commits(tree, patches)
        for patch, exported in zip(patches, read_commits(tree, patches), strict=True):
            if (patch.header, patch.body) != (exported.header, exported.body):
                what = f"{patch.name} is not byte-equal to its export: {_first_difference(patch, exported)}"
                raise refusal(what, f"isoexec patches export {upstream.package}")
        for patch in reversed(patches):
            tree.apply(patch, reverse=True)
        different = [path for path, content in pristine.items() if tree.read(path) != content]
        if different:
            raise refusal(f"the reverted series leaves other bytes in {different}", "report this fault")
    touched = {path: digest for path, digest in recorded.items() if path in pristine}
    with tempfile.TemporaryDirectory(prefix="isoexec-check-") as folder:
        root = Path(folder)
        for path, content in pristine.items():
            if content is not None:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(content)
        site = Site(upstream=upstream, build=build, root=root, recorded=touched, store=Store(root / STORE))
        for act, wanted, state in ((apply, target, PATCHED), (revert, pristine, PRISTINE)):
            act(site, patches)
            different = [path for path, content in wanted.items() if site.read(path) != content]
            if different or (patches and survey(site, patches).state != state):
                raise refusal(f"{act.__name__} leaves other bytes in {different}", "report this fault")


def _syntax_problem(path: str, content: bytes | None) -> str | None:
    if content is None or not path.endswith(".py"):
        return None
    try:
        compile(content, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return str(error)
    return None


def _first_difference(patch: Patch, exported: Patch) -> str:
    old = (patch.header.encode() + patch.body).splitlines()
    new = (exported.header.encode() + exported.body).splitlines()
    for number, (ours, theirs) in enumerate(zip(old, new, strict=False), start=1):
        if ours != theirs:
            return f"line {number} is {ours.decode()!r}, export gives {theirs.decode()!r}"
    return f"{len(old)} lines, export gives {len(new)}"
