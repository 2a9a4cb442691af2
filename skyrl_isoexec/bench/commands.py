"""`isoexec bench layers|engine|gdn|trainer`."""

import argparse
from pathlib import Path

from skyrl_isoexec.bench import engine


def _layers(arguments: argparse.Namespace) -> int:
    from skyrl_isoexec.bench.layers import run  # torch and triton only where they are used

    return run(arguments)


def _gdn(arguments: argparse.Namespace) -> int:
    from skyrl_isoexec.bench.gdn import run

    return run(arguments)


def _trainer(arguments: argparse.Namespace) -> int:
    from skyrl_isoexec.bench.trainer import run

    return run(arguments)


def add_parser(groups: argparse._SubParsersAction) -> None:
    """Adds the group to the `isoexec` parser; every command sets `run(arguments) -> exit code`."""
    group = groups.add_parser("bench", help="time our operators beside the stock ones", description=__doc__)
    verbs = group.add_subparsers(dest="verb", required=True, metavar="VERB")
    layers = verbs.add_parser("layers", help="every operator on the shapes of real models, on this GPU")
    layers.add_argument("--quick", action="store_true", help="a subset of models, operators and numbers of rows")
    layers.add_argument("--seconds", type=float, default=1e9, help="stop adding rows after this long")
    layers.add_argument("--models", nargs="*", help="default: all")
    layers.add_argument("--out", type=Path, default=Path("bench_layers.json"), help="JSON with every number")
    layers.set_defaults(run=_layers)
    engine.add_arguments(verbs.add_parser("engine", help="a whole engine beside stock vLLM, on this GPU"))
    gdn = verbs.add_parser("gdn", help="both forms of the gated delta rule beside the stock kernels, on this GPU")
    gdn.add_argument("--heads", nargs="*", help="of a whole model, or half, quarter, eighth of it; default: all")
    gdn.add_argument("--work", nargs="*", help="train, prefill, decode; default: all")
    gdn.add_argument("--unproved", action="store_true", help="time forms without a valid gate too, and say so")
    gdn.add_argument(
        "--refused-native", action="store_true", help="time stock training where it refuses, its numbers being wrong"
    )
    gdn.add_argument("--out", type=Path, default=Path("bench_gdn.json"), help="JSON with every number")
    gdn.set_defaults(run=_gdn)
    trainer = verbs.add_parser("trainer", help="forward and backward of a model beside transformers, on this GPU")
    trainer.add_argument("--models", nargs="*", help="default: all")
    trainer.add_argument("--out", type=Path, default=Path("bench_trainer.json"), help="JSON with every number")
    trainer.set_defaults(run=_trainer)
