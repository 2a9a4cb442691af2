"""What `isoexec patches lint|check|export` do: the verbs of someone who writes patches."""

import argparse
import sys

from skyrl_isoexec.patching.check import check
from skyrl_isoexec.patching.errors import PatchRefusal
from skyrl_isoexec.patching.export import build_commits, open_tree, read_commits, write_series
from skyrl_isoexec.patching.git import GitTree, temporary_tree
from skyrl_isoexec.patching.lint import lint
from skyrl_isoexec.patching.patchfile import read_series, touched_paths
from skyrl_isoexec.patching.upstreams import Upstream, find_repository
from skyrl_isoexec.patching.verbs import REFUSED, each
from skyrl_isoexec.patching.wheels import Wheel, fetch


def run_lint(arguments: argparse.Namespace) -> int:
    """`isoexec patches lint`; questions do not count for its exit code."""
    findings = lint(find_repository(arguments.repository))
    for finding in findings:
        print(f"{finding.where}: {'' if finding.fatal else 'question: '}{finding.what}", file=sys.stderr)
    fatal = sum(finding.fatal for finding in findings)
    print(f"{fatal} broken rule(s), {len(findings) - fatal} question(s)")
    return REFUSED if fatal else 0


def run_check(arguments: argparse.Namespace) -> int:
    """`isoexec patches check`."""

    def act(upstream: Upstream) -> str:
        patches = read_series(find_repository(arguments.repository) / "patches" / upstream.package)
        checked = []
        for wheel in _wheels(arguments, upstream):
            pristine = wheel.read(list(touched_paths(patches)))
            check(upstream, wheel.build, pristine, wheel.recorded(), patches)
            checked.append((wheel.build.name, len(pristine)))
        return f"{upstream.version}  {len(patches)} patches hold on " + ", ".join(
            f"{name} ({files} files)" for name, files in checked
        )

    return each(arguments, act)


def run_export(arguments: argparse.Namespace) -> int:
    """`isoexec patches export`."""
    if arguments.tree is not None and len(arguments.packages) != 1:
        raise PatchRefusal(what="--tree needs exactly one PACKAGE", where="command line", mend="name the package")

    def act(upstream: Upstream) -> str:
        folder = find_repository(arguments.repository) / "patches" / upstream.package
        patches = read_series(folder)
        if arguments.tree is not None and not arguments.create:
            return _written(write_series(folder, read_commits(open_tree(arguments.tree), patches)))
        wheel = _wheels(arguments, upstream)[0]
        if arguments.tree is not None:
            if arguments.tree.exists():
                raise PatchRefusal(what="the tree exists", where=str(arguments.tree), mend="remove it or omit --create")
            tree = GitTree(arguments.tree)
            tree.start(wheel.read(sorted(path for path in wheel.recorded() if path.endswith(".py"))))
            build_commits(tree, patches)
            return f"{len(patches)} commits in {arguments.tree}; edit them, then export without --create"
        with temporary_tree(wheel.read(list(touched_paths(patches)))) as temporary:
            build_commits(temporary, patches)
            return _written(write_series(folder, read_commits(temporary, patches)))

    return each(arguments, act)


def _written(names: tuple[str, ...]) -> str:
    return f"wrote {', '.join(names)}" if names else "already in normal form"


def _wheels(arguments: argparse.Namespace, upstream: Upstream) -> list[Wheel]:
    """The named build; else every pinned wheel that lies in --wheel-dir; else the default build."""
    builds = [upstream.default_build()]
    if arguments.build is not None:
        builds = [build for build in upstream.builds if build.name == arguments.build]
    elif arguments.wheel_dir is not None:
        builds = [build for build in upstream.builds if (arguments.wheel_dir / build.wheel).is_file()] or builds
    if not builds:
        known = ", ".join(build.name for build in upstream.builds)
        raise PatchRefusal(
            what=f"{upstream.package} has no build {arguments.build!r}; known: {known}",
            where="patches/upstreams.toml",
            mend="use a known name",
        )
    return [fetch(upstream, build, find_repository(arguments.repository), arguments.wheel_dir) for build in builds]
