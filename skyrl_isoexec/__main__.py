"""The command `isoexec`, also `python -m skyrl_isoexec`.

Each group of commands is a module with `add_parser(groups)`: it adds a parser whose commands set `run`, a function from
the parsed arguments to an exit code (0 done, 2 refused). Modules of groups stay light at import.
Who reads the output may stop before its end, as `head` does: that is silent.
"""

import argparse
import importlib
import os
import select
import signal
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
    try:
        try:
            parsed = parser.parse_args(arguments)
            return parsed.run(parsed)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if _is_read():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered is flushed at exit
        return 128 + signal.SIGPIPE


def _is_read() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # of a pipe without a reader, an error is told unasked
    return not any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
