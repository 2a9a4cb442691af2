"""The command `isoexec`, also `python -m skyrl_isoexec`.

Each group of commands is a module with `add_parser(groups)`: it adds a parser whose commands set `run`, a function from
the parsed arguments to an exit code (0 done, 2 refused). Modules of groups stay light at import.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

GROUPS = (
    "skyrl_isoexec.launch.doctor",
    "skyrl_isoexec.launch.commands",
    "skyrl_isoexec.gate.commands",
    "skyrl_isoexec.bench.commands",
    "skyrl_isoexec.patching.commands",
)
"""Modules in the order in which --help shows them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses and runs one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="isoexec", description="IsoExec: one execution contract for both runtimes.")
    groups = parser.add_subparsers(dest="group", required=True, metavar="GROUP")
    for module in GROUPS:
        importlib.import_module(module).add_parser(groups)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


if __name__ == "__main__":
    sys.exit(main())
