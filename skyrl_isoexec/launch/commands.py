"""`isoexec contract build|show|verify|diff`: the execution contract of a configuration, without starting a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

REFUSED = 2


def add_parser(groups: argparse._SubParsersAction) -> None:
    """Adds the group to the `isoexec` parser; every command sets `run(arguments) -> exit code`."""
    group = groups.add_parser("contract", help="the execution contract of a configuration", description=__doc__)
    verbs = group.add_subparsers(dest="verb", required=True, metavar="VERB")
    build = verbs.add_parser("build", help="compose the contract of a command line; canonical JSON on standard output")
    build.add_argument("overrides", nargs=argparse.REMAINDER, metavar="OVERRIDE", help="as of python -m skyrl.train")
    build.set_defaults(run=_refusing(_build))
    for name, run, text in (
        ("show", _show, "what a contract says, for reading"),
        ("verify", _verify, "check a contract by itself, then against this installation and its gate records"),
    ):
        verb = verbs.add_parser(name, help=text)
        verb.add_argument("file", type=Path, help="contract.json, as a run folder has it")
        verb.set_defaults(run=_refusing(run))
    diff = verbs.add_parser("diff", help="every difference of two contracts, in words; exit code 1 if there are any")
    diff.add_argument("first", type=Path)
    diff.add_argument("second", type=Path)
    diff.set_defaults(run=_refusing(_diff))


def _refusing(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    def guarded(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except BrokenPipeError:
            raise
        except (ValueError, OSError) as error:
            print(f"refused: {error}", file=sys.stderr)
            return REFUSED

    return guarded


def _build(arguments: argparse.Namespace) -> int:
    from ..contract import encode
    from .compose import compose
    from .composition import compose_contract, decoder_config

    launch, cfg = compose(arguments.overrides)
    if launch.exec.name != "isoexec":
        raise ValueError(f"exec={launch.exec.name} has no contract; use +exec=isoexec")
    contract = compose_contract(launch, cfg, decoder_config(launch))
    sys.stdout.write(encode(contract).decode())
    return 0


def _read(path: Path):
    from ..contract import decode

    return decode(path.read_bytes())


def _show(arguments: argparse.Namespace) -> int:
    from ..contract import digest

    contract = _read(arguments.file)
    print(f"contract {digest(contract)}")
    for name in ("semantic", "numerical_policy", "deployment"):
        print(f"  {name:<17} {getattr(contract.identities, name)}")
    print(f"\nmodel {contract.model.family}, {contract.model.dtype}")
    for name, value in sorted(contract.model.fields.items()):
        print(f"  {name:<24} {value}")
    print("\ncomposition")
    for entry in contract.composition:
        constants = ", ".join(f"{name} {value}" for name, value in sorted(entry.constants.items()))
        print(f"  {entry.impl.id:<18} {', '.join(entry.region)}")
        print(f"  {'':<18} cases {', '.join(entry.cases)}")
        print(f"  {'':<18} {constants + '; ' if constants else ''}gate {entry.gate}")
    print("\nclaims")
    for claim in contract.claims.topology:
        print(f"  {claim.axis:<3} {claim.kind:<10} {', '.join(map(str, claim.degrees))}")
    for state in contract.claims.state:
        print(f"  {state.state} is invalidated by {', '.join(state.invalidated_by)}")
    for tolerance in contract.claims.tolerances:
        print(f"  tolerance {tolerance.name} at {tolerance.boundary}: {tolerance.bound}")
    if not contract.claims.tolerances:
        print("  no tolerances: equality is to the bit")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from ..contract import validate
    from .composition import against_installation

    contract = _read(arguments.file)
    validate(contract)
    problems = against_installation(contract)
    for problem in problems:
        print(f"refused: {problem}", file=sys.stderr)
    if not problems:
        gates = len({entry.gate for entry in contract.composition})
        print(f"verified: valid by itself, as installed here, {gates} gate records valid")
    return REFUSED if problems else 0


def _diff(arguments: argparse.Namespace) -> int:
    from ..contract import diff

    lines = diff(_read(arguments.first), _read(arguments.second))
    for line in lines:
        print(line)
    if not lines:
        print("the contracts are equal")
    return 1 if lines else 0
