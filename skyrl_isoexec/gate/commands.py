"""`isoexec gate`: prove implementations on this machine and record what was proved."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path


def add_parser(groups: argparse._SubParsersAction) -> None:
    """Adds the command to the `isoexec` parser."""
    parser = groups.add_parser("gate", help="prove implementations bit by bit, and record it", description=__doc__)
    parser.add_argument("--arch", default="cpu", help="cpu or sm90 (default: cpu)")
    parser.add_argument("--region", help="an operator, or a kind of decoder (default: all; --list names them)")
    parser.add_argument("--list", action="store_true", help="one line per gate, with its status and elements compared")
    parser.add_argument("--records", type=Path, help="folder of the records (default: those of this package)")
    parser.set_defaults(run=run_gate)


def run_gate(arguments: argparse.Namespace) -> int:
    """0 if every gate asked for is passed (or listed), 1 if one fails, 2 for a name or a device that is not there."""
    from skyrl_isoexec.gate.record import RECORDS, REGIONS, GateError, check_names

    regions = REGIONS if arguments.region is None else (arguments.region,)
    try:
        for region in regions:
            check_names(region, arguments.arch)
    except GateError as error:
        print(error, file=sys.stderr)
        return 2
    verb = show if arguments.list else prove
    return verb(regions, arguments.arch, arguments.records or RECORDS)


def show(regions: tuple[str, ...], arch: str, records: Path) -> int:
    """Print the state of each gate."""
    from skyrl_isoexec.gate.record import GateError, load, status

    for region in regions:
        try:
            state, record = status(region, arch, records), load(region, arch, records)
            elements = 0 if record is None else record.elements
        except GateError as error:
            state, elements = "unusable", 0
            print(error, file=sys.stderr)
        print(f"{region:18} {arch:5} {state:9} {elements:>12,} elements")
    return 0


def prove(regions: tuple[str, ...], arch: str, records: Path) -> int:
    """Run gates one after the other, all of them even if one fails."""
    import torch

    from skyrl_isoexec.gate.device import require_device
    from skyrl_isoexec.gate.record import GateError
    from skyrl_isoexec.gate.run import run

    try:
        require_device(arch)
        records.mkdir(parents=True, exist_ok=True)
        if not os.access(records, os.W_OK | os.X_OK):
            raise PermissionError("it cannot be written")
    except GateError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"gate: --records {records}: {error}; name a folder that can be written", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    failed = []
    for number, region in enumerate(regions, start=1):
        start, place = time.monotonic(), f"[{number}/{len(regions)}] {region}"
        print(f"{place} on {arch}", flush=True)
        try:
            record = run(region, arch, lambda line: print(f"  {line}", flush=True), records)
        except GateError as error:
            failed.append(region)
            print(error, file=sys.stderr, flush=True)
            continue
        seconds = time.monotonic() - start
        print(f"{place} passed: {record.elements:,} elements equal in {seconds:.1f} s", flush=True)
    if failed:
        print(f"gate: {len(failed)} of {len(regions)} failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
