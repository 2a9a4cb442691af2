"""Changes on one side only: each is refused before the first update, by the command that a user types, and named."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from saboteur import COMMON, LIVE

from skyrl_isoexec.launch.commands import REFUSED
from skyrl_isoexec.launch.main import main
from skyrl_isoexec.patching.site import STORE

HERE = Path(__file__).parent
SMALL = ("+exec=isoexec", "run=short", "trainer.max_training_steps=2")
pytestmark = pytest.mark.slow


def command(folder: Path, *arguments: str, module: str = "skyrl.train", **variables: str) -> tuple[int, str]:
    """(exit status, standard error) of a command that ends by itself."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments, f"run_dir={folder / 'run'}"],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr


def sabotaged(folder: Path, start: Callable[..., object], fault: str, timeout: float = 240) -> object:
    """A run with a fault, ended; nothing of it is left."""
    with start(folder / "run", *SMALL, module="saboteur", before=(fault,), path=str(HERE)) as run:
        run.status = run.wait(timeout)
        assert not run.left_over()
    return run


EARLY = {
    "a misspelled option": (("kernels.kv_blok=16",), "kernels.kv_block"),
    "a misspelled group": (("kernels=cpuu",), "kernels=cpu"),
    "a misspelled key of the host": (("trainer.max_training_step=1",), "trainer.max_training_steps"),
    "another temperature for the trainer": (("trainer.algorithm.temperature=0.5",), "trainer.algorithm.temperature"),
    "a cut distribution for the engine": (("generator.sampling_params.top_p=0.9",), "generator.sampling_params.top_p"),
    "another dtype for the engine": (
        ("++generator.inference_engine.engine_init_kwargs.dtype=bfloat16",),
        "engine_init_kwargs.dtype",
    ),
    "another worker for the engine": (
        ("++generator.inference_engine.engine_init_kwargs.worker_cls=auto",),
        "engine_init_kwargs.worker_cls",
    ),
    "an unproven degree": (("topology.trainer.tp=16",), "topology.trainer.tp"),
}
"""What -> (arguments, what the refusal names): refused without a process."""


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says in this process, which starts no other."""
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, *arguments, f"run_dir={folder / 'run'}"])
    said = capsys.readouterr().err
    assert ended.value.code == REFUSED and said.startswith("refused: "), said
    assert not (folder / "run").exists()
    return said


@pytest.mark.parametrize("what", EARLY)
def test_early(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, named = EARLY[what]
    assert named in refused(tmp_path, capsys, *arguments)


def test_variable_of_the_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert "environment.NCCL_ALGO is 'Tree', the contract says unset" in refused(tmp_path, capsys)


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    """A folder with a copy of the installed, patched Megatron-core, to be put first on the path."""
    distribution = importlib.metadata.distribution("megatron-core")
    folder = tmp_path / "overlay"
    for top in sorted({file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "/")}):
        source = Path(distribution.locate_file(top))
        if source.is_dir():
            shutil.copytree(source, folder / top, ignore=shutil.ignore_patterns("__pycache__"))
    store = Path(distribution.locate_file(STORE)) / "megatron-core"
    shutil.copytree(store, folder / STORE / "megatron-core")
    return folder


def test_edited_file_of_a_patched_package(tmp_path: Path, overlay: Path) -> None:
    patched = overlay / "megatron" / "core" / "optimizer" / "optimizer.py"
    with patched.open("a") as file:
        file.write("\nEDITED = True\n")
    status, said = command(tmp_path, *SMALL, PYTHONPATH=str(overlay))
    assert status == REFUSED, said
    assert "patch.megatron-core is 'foreign'" in said and "optimizer.py" in said
    assert "pip install --force-reinstall --no-deps megatron-core" in said and "isoexec patches apply" in said


def test_edited_kernel_has_no_record(tmp_path: Path) -> None:
    for name in ("skyrl_isoexec", "configs", "patches", "skyrl"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(__file__).parents[2] / name, tmp_path / "copy" / name, ignore=ignore)
    kernel = tmp_path / "copy" / "skyrl_isoexec" / "kernels" / "rmsnorm" / "cpu.py"
    kernel.write_text(kernel.read_text() + "\nEDITED = True\n")
    status, said = command(tmp_path / "copy", *SMALL)
    assert status == REFUSED, said
    assert "rmsnorm" in said and "stale" in said and "isoexec gate --arch cpu --region rmsnorm" in said


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., object]) -> dict[tuple[str, str], str | None]:
    """One run in which every change of LIVE was made in a running process, and taken away again."""
    folder = tmp_path_factory.mktemp("live")
    run = sabotaged(folder, start, "live", timeout=420)
    assert run.status == 0, run.tail()
    row = run.steps[1]
    assert row["isoexec/mismatched_tokens"] == 0 and row["isoexec/compared_tokens"] > 0
    found = json.loads((folder / "sabotage.json").read_text())
    return {(one["process"], one["change"]): one["refusal"] for one in found}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("process", "change", "field"), LIVE)
def test_live(process: str, change: str, field: str, swept: dict) -> None:
    refusal = swept[process, change]
    assert refusal is not None, f"{change} in {process} was not found"
    assert field in refusal, refusal
    assert process in refusal or change == "schedule", refusal


def test_enough_were_tried() -> None:
    assert len(set(LIVE)) == len(LIVE)
    alone = [test_variable_of_the_launcher, test_edited_file_of_a_patched_package, test_edited_kernel_has_no_record]
    assert len(LIVE) + len(EARLY) + len(STARTED) + len(alone) == 51, "the README says how many"
    assert {name for _, name, _ in LIVE} >= COMMON.keys()


STARTED = {
    "variable_in_one_worker": (2, ("trainer rank 0", "environment.NCCL_ALGO is 'Tree', the contract says None")),
    "other_bits_for_the_engine": (2, ("engine 0 rank 0", "contract.numerical_policy")),
    "no_plugin": (2, ("plugin.architecture",)),
    "flipped_weight": (2, ("weight sync of epoch 0", "engine 0 rank 0: model.norm.weight is float32")),
    "other_epoch": (2, ("sampling_params.extra_args.isoexec_epoch is 1, the engine's epoch is 0",)),
}
"""Fault -> (exit status, what is said)."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", STARTED)
def test_started(fault: str, tmp_path: Path, start: Callable[..., object]) -> None:
    run = sabotaged(tmp_path, start, fault)
    status, words = STARTED[fault]
    assert run.status == status, run.tail()
    assert "Traceback" not in run.errors
    for word in words:
        assert word in run.errors, run.errors
    assert not run.steps
