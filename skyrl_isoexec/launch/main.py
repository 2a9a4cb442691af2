"""`python -m skyrl.train +exec=isoexec`: compose, check, start, run, and end with everything that was started."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ..contract import Contract
from .config import LaunchConfig

USAGE = """\
usage: python -m skyrl.train +exec=isoexec [GROUP=OPTION ...] [KEY=VALUE ...]
       python -m skyrl.train +exec=native  [GROUP=OPTION ...] [KEY=VALUE ...]

Choose the stack with +exec=isoexec (the unified model on both sides) or +exec=native (the stock stack, to compare).
Everything else has a default; configs/ lists the groups, and SkyRL's keys keep their names.
"""
WORKERS_LOG = "workers.log"
MENDS = {
    "hitting dynamic sampling limit": "no problem had right and wrong answers beside each other: give another model or "
    "task, or set trainer.algorithm.dynamic_sampling.type=null, as run=random_weights does",
}
"""What a host says of a failure -> what a user can do about it."""
RESUME = "trainer.resume_mode=latest, in a run that saves with trainer.ckpt_interval=STEPS"


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exits with 0, 1 (the run failed), 2 (something was refused) or 130."""
    argv = sys.argv[1:] if argv is None else argv
    helps = bool({"-h", "--help"} & set(argv))
    if helps or not any(argument.lstrip("+").startswith("exec=") for argument in argv):
        print(USAGE, file=sys.stderr, end="")
        raise SystemExit(0 if helps else 2)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported; in a file, bars would be one long line
    raise SystemExit(_main(argv))


def _main(argv: list[str]) -> int:
    from .compose import ConfigError, compose

    signal.signal(signal.SIGTERM, _interrupt)
    try:
        launch, cfg = compose(argv, present=_present)
        from .preflight import check

        contract = check(launch, cfg)
    except (ConfigError, ValueError, OSError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return _run(launch, cfg, contract)


def _present(device: str) -> None:
    if device != "cpu":
        from .preflight import machine

        machine.device(device)


def _run(launch: LaunchConfig, cfg: Any, contract: Contract | None) -> int:
    from loguru import logger

    from .record import summary
    from .watch import no_orphans

    warnings.simplefilter("ignore")  # of the hosts, at import: the terminal is for the run
    logs = launch.run_dir / "logs"
    log = logs / WORKERS_LOG
    old = log.stat().st_size if log.exists() else 0  # a resumed run goes on in it
    with no_orphans():
        try:
            _train(launch, cfg, contract, logs)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except Exception as error:
            refused = refusal(error, log, old)
            if refused is not None:
                print(f"\nrefused: {refused}", file=sys.stderr)  # below the line of a progress bar
                return 2
            logger.opt(exception=True).error("the run failed")
            print(f"\nfailed: {cause(error)}\n  the processes' output is in {logs}", file=sys.stderr)
            return 1
    print(summary(launch.run_dir), flush=True)
    return 0


def _train(launch: LaunchConfig, cfg: Any, contract: Contract | None, logs: Path) -> None:
    from .cluster import Cluster, environment
    from .experiment import Experiment
    from .folder import write_config
    from .handshake import write_contract
    from .record import log_to
    from .task import arithmetic, env

    logs.mkdir(parents=True, exist_ok=True)
    log_to(launch.run_dir)
    for task in (env, arithmetic):
        task.register()
    write_config(launch, cfg)
    if contract is not None:
        write_contract(contract, launch.run_dir)
    print(f"run folder {launch.run_dir}", flush=True)
    cuda = launch.runtime.device == "cuda"
    runner = None if contract is None else launch.runtime.runner
    variables = environment(log_file=logs / WORKERS_LOG, cuda=cuda, threads=launch.runtime.threads, runner=runner)
    with Cluster(cfg, variables, cuda=cuda, object_store_mib=launch.runtime.object_store_mib):
        signal.signal(signal.SIGTERM, _interrupt)  # Ray has put its own in the place
        experiment = Experiment(cfg, run_dir=launch.run_dir, seeded=launch.run.seeded_requests, contract=contract)
        try:
            experiment.run()
        except (Exception, KeyboardInterrupt) as error:
            watch = experiment.watch
            if watch is not None and isinstance(error, Exception):
                watch.look()
            gone = watch.found if watch is not None else None
            if gone is None:  # not looked for after a user's interruption, which ends the other processes as well
                raise
            from .watch import ProcessDied

            raise ProcessDied(f"{gone}; start again, or go on from the last checkpoint: {RESUME}") from error
        finally:
            experiment.close()


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what caused it, the innermost last, also where Ray carried it from another process."""
    while isinstance(error, BaseException):
        yield error
        inner = getattr(error, "cause", None) or error.__cause__
        if inner is error:
            return
        error = inner


def refusal(error: BaseException, log: Path, old: int) -> str | None:
    """What was refused, if that ended the run: here, in a trainer's process, or in an engine, which leaves a line.

    Lines in the first `old` bytes of the log are an earlier run's.
    """
    from ..runtimes.vllm.guard import MARK
    from ..runtimes.vllm.settings import ARCHITECTURE, HYBRID_ARCHITECTURE
    from .exactness import Mismatch
    from .expectation import FactsRefused
    from .preflight import Refusal
    from .sync import SyncRefused

    for one in chain(error):
        if isinstance(one, (Refusal, FactsRefused, SyncRefused, Mismatch)):
            return str(one)
        for name in (ARCHITECTURE, HYBRID_ARCHITECTURE):
            if f"Model architectures ['{name}'] are not supported" in str(one):
                return (
                    "an engine's server: plugin.architecture is False, the contract says True: the plugin isoexec, "
                    f"which brings {name}, did not load in that process; see isoexec doctor"
                )
    lines = log.read_bytes()[old:].decode(errors="replace").splitlines() if log.exists() else []
    marked = [line.partition(MARK)[2].strip() for line in lines if MARK in line]
    return marked[0] if marked else None


def cause(error: BaseException) -> str:
    """The first thing that went wrong, in one line: the innermost error, without Ray's copies of tracebacks."""
    from .watch import ProcessDied

    errors = list(chain(error))
    error = next((one for one in errors if isinstance(one, ProcessDied)), errors[-1])
    text = str(error).strip().splitlines() or [""]
    found = f"{type(error).__name__}: {text[0] if len(text) == 1 else text[-1]}"
    return next((f"{found}; {mend}" for said, mend in MENDS.items() if said in found), found)
