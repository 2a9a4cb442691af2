"""`python -m skyrl_isoexec.gate --arch sm90`: the same command on a host that has torch and triton alone."""

import argparse
import sys

from skyrl_isoexec.gate.commands import add_parser

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="isoexec")
    add_parser(parser.add_subparsers(dest="group", required=True))
    arguments = parser.parse_args(["gate", *sys.argv[1:]])
    sys.exit(arguments.run(arguments))
