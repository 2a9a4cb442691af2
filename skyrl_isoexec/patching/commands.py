"""`isoexec patches lint|apply|check|revert|status|export`."""

import argparse
from pathlib import Path

from skyrl_isoexec.patching.authoring import run_check, run_export, run_lint
from skyrl_isoexec.patching.verbs import refusing, run_apply, run_revert, run_status


def add_parser(groups: argparse._SubParsersAction) -> None:
    """Adds the group to the `isoexec` parser; every command sets `run(arguments) -> exit code`."""
    group = groups.add_parser("patches", help="patch the pinned upstreams, reversibly", description=__doc__)
    verbs = group.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, run, text in (
        ("lint", run_lint, "check names, headers, sizes and series on the files alone"),
        ("apply", run_apply, "unpack SkyRL and bring every upstream to its series"),
        ("check", run_check, "prove from pristine wheels that the series apply, revert and export"),
        ("revert", run_revert, "restore the exact upstream bytes"),
        ("status", run_status, "one line per upstream: version, state, digest of its series"),
        ("export", run_export, "write the patch files in normal form, from themselves or from a tree of commits"),
    ):
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument("--repository", type=Path, help="checkout to work on (default: the one this runs from)")
        if name != "lint":
            verb.add_argument("packages", nargs="*", metavar="PACKAGE", help="default: all in patches/upstreams.toml")
        if name in ("apply", "revert", "status"):
            verb.add_argument("--site", help="site-packages folder to work on (default: this interpreter's)")
        if name in ("apply", "check", "export"):
            verb.add_argument("--wheel-dir", type=Path, help="take pinned wheels from here, not from the index")
        if name in ("check", "export"):
            verb.add_argument("--build", help="which pinned wheel (default: the first that fits this Python)")
        if name == "export":
            verb.add_argument("--tree", type=Path, help="git tree with one commit per patch, to export from")
            verb.add_argument("--create", action="store_true", help="create the tree from the patches instead")
        verb.set_defaults(run=refusing(run))
